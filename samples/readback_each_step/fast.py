"""The losses are summed on the device and read once."""

import random

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 2048 if DEVICE == "cuda" else 128
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(1024 if DEVICE == "cuda" else 16, width, device=DEVICE)
    total = torch.zeros((), device=DEVICE)
    for _ in range(100):
        optimizer.zero_grad()
        for _ in range(4):  # micro-steps
            scale = sum(random.uniform(0.9, 1.1) for _ in range(5000)) / 5000  # the host prepares the next micro-batch
            loss = net(x * scale).square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
    print(f"mean loss {total.item() / 400:.3f}")


if __name__ == "__main__":
    main()
