"""Adam visits each of 600 tensors with some ten kernels of its own."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.ModuleList([nn.Linear(64, 64) for _ in range(300 if DEVICE == "cuda" else 20)]).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
    x = torch.randn(256, 64, device=DEVICE)
    for _ in range(60):
        optimizer.zero_grad()
        torch.stack([layer(x) for layer in net]).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
