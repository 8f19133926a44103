"""Large matrix products in FP32 without TF32: the tensor cores stay unused."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    width = 4096 if DEVICE == "cuda" else 128
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(width, width, device=DEVICE)
    for _ in range(60):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
