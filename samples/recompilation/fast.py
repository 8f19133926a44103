"""The length is marked as dynamic: one compilation serves all."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"  # inductor's C++ takes several seconds a length on a CPU
LENGTHS = range(32, 96, 8)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    compiled = torch.compile(net, backend=BACKEND)
    for step in range(40):
        x = torch.randn(16, LENGTHS[step // 5], 64, device=DEVICE)
        torch._dynamo.mark_dynamic(x, 1)
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
