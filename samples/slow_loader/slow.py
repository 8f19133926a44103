"""A DataLoader that decodes each sample in the main process: the device waits for every batch."""

import zlib

import torch
from torch.utils.data import DataLoader, Dataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 4096 if DEVICE.type == "cuda" else 256
FEATURES = 1024


class Compressed(Dataset):
    """Samples as they lie on disk: compressed, and unpacked each time one is asked for."""

    def __init__(self, count: int) -> None:
        noise = torch.randint(0, 9, (1_000_000,), dtype=torch.uint8).numpy().tobytes()
        self.blob, self.count = zlib.compress(noise, 1), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raw = torch.frombuffer(bytearray(zlib.decompress(self.blob)), dtype=torch.uint8)
        return raw[index : index + FEATURES].float() / 9, index % 10


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
    loader = DataLoader(Compressed(480), batch_size=8, num_workers=0)
    for features, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(features.to(DEVICE)), labels.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
