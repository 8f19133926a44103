"""Batches for training, three ways, each said in the result: from a folder, synthetic, or in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpudiag.bench.models import CLASSES, ModelSpec, sample
from gpudiag.bench.result import MeasuringRules
from gpudiag.errors import GpudiagError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
POOL = 4  # batches held in memory: enough that one batch is not always the one in cache


def describe(rules: MeasuringRules) -> str:
    if rules.data == "folder":
        where = f"in {rules.workers} worker processes" if rules.workers else "in the training process"
        return f"folder: images decoded, cropped and normalised {where}, drawn with replacement"
    if rules.data == "synthetic":
        return "synthetic: every batch drawn anew on the CPU, then copied"
    return f"in memory: {POOL} random batches in host memory, copied each step; no decoding"


def batches(spec: ModelSpec, rules: MeasuringRules, batch: int, pin: bool) -> Iterator[tuple[Any, Any]]:
    """Endless (inputs, targets) on the CPU; pinned where asked, so that the copy can be asynchronous."""
    if rules.data == "folder":
        yield from _folder(spec, rules, batch, pin)
        return
    if rules.data == "memory":
        pool = [_one(spec, batch, rules.seed + index, pin) for index in range(POOL)]
        while True:
            yield from pool
    seed = rules.seed
    while True:
        yield _one(spec, batch, seed, pin)
        seed += 1


def _one(spec: ModelSpec, batch: int, seed: int, pin: bool) -> tuple[Any, Any]:
    import torch

    inputs, targets = sample(spec, batch, seed)
    if targets is None:
        targets = torch.randint(CLASSES, (batch,), generator=torch.Generator().manual_seed(seed))
        if not spec.name.isidentifier():  # the user's own model: its classes are not known, loss_of draws them
            targets = None
    if pin and isinstance(inputs, torch.Tensor):
        inputs = inputs.pin_memory()
    return inputs, targets


def image_files(folder: Path) -> list[Path]:
    """All images below the folder, sorted. Raises GpudiagError when there are none."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    if not files:
        raise GpudiagError(f"{folder}: no images found", "give a folder with .jpg or .png files, or --data synthetic")
    return files


class FolderImages:
    """A map-style dataset: any tree of images; the class is the parent folder's rank, 0 for a flat folder."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        from torchvision import transforms

        self.files = image_files(folder)
        names = sorted({file.parent.name for file in self.files})
        self.classes = {name: index % CLASSES for index, name in enumerate(names)}
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(shape[-2:]),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        file = self.files[index]
        with Image.open(file) as image:
            return self.transform(image.convert("RGB")), self.classes[file.parent.name]


def _folder(spec: ModelSpec, rules: MeasuringRules, batch: int, pin: bool) -> Iterator[tuple[Any, Any]]:
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    images = FolderImages(Path(rules.folder), spec.input_shape)
    generator = torch.Generator().manual_seed(rules.seed)
    # With replacement: a folder smaller than one batch still fills it, and an epoch's end (workers restart) is not in the measurement.
    sampler = RandomSampler(images, replacement=True, num_samples=1 << 40, generator=generator)
    loader = DataLoader(
        images,
        batch_size=batch,
        sampler=sampler,
        num_workers=rules.workers,
        pin_memory=pin,
        drop_last=True,
    )
    yield from loader
