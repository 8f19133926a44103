"""Batches lie in pageable memory: each copy is staged by the driver, blocks the host, and nothing runs beside it."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    net.to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    size = 256 if DEVICE == "cuda" else 1
    batches = [(torch.randn(size, 3, 224, 224), torch.randint(0, 10, (size,))) for _ in range(2)]
    for step in range(80):
        x, y = batches[step % 2]
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
