"""The cure: each sample is decoded once, before training, and a batch is one indexing operation."""

import zlib

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 8192 if DEVICE.type == "cuda" else 2048
BATCH = 1024 if DEVICE.type == "cuda" else 64
FEATURES = 1024


class Decoded(Dataset):
    """All samples, unpacked. Asked for a list of indices it answers with a batch."""

    def __init__(self, count: int) -> None:
        noise = torch.randint(0, 9, (1_000_000,), dtype=torch.uint8).numpy().tobytes()
        blob = zlib.compress(noise, 1)
        raw = torch.frombuffer(bytearray(zlib.decompress(blob)), dtype=torch.uint8)
        start = torch.arange(count) % 4096
        self.samples = raw[start[:, None] + torch.arange(FEATURES)].float() / 9
        self.labels = torch.arange(count) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[indices], self.labels[indices]


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = Decoded(60 * BATCH)
    batches = BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False)
    loader = DataLoader(dataset, sampler=batches, batch_size=None, pin_memory=DEVICE.type == "cuda")
    for features, labels in loader:
        features, labels = features.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
