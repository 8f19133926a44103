"""Losses stay on the device and are written every 100 steps."""

import json
import os
import tempfile

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(128, 256, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)
    losses = []
    with tempfile.NamedTemporaryFile("w", dir=".") as log:
        for step in range(400):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == 100:
                for i, value in enumerate(torch.stack(losses).tolist(), step - 99):
                    log.write(json.dumps({"step": i, "loss": value}) + "\n")
                log.flush()
                os.fsync(log.fileno())
                losses.clear()


if __name__ == "__main__":
    main()
