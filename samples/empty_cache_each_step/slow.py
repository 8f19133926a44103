"""The allocator's cache is emptied after every step, so every step allocates and frees anew."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 2048 if DEVICE == "cuda" else 128
    net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(width, width), nn.ReLU())]).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(4096 if DEVICE == "cuda" else 16, width, device=DEVICE)
    for _ in range(80):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
