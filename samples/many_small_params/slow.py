"""The optimizer visits 1500 small tensors one after the other."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(750)]).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
    x = torch.randn(4, 8, device=DEVICE)
    for _ in range(60):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
