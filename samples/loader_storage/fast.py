"""The records are copied to the local disk once, before training; the workers read them there."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from store import RECORD, Reader, serve
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Records(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 240

    def __getitem__(self, i):
        with Path(self.path).open("rb") as file:
            raw = np.frombuffer(os.pread(file.fileno(), RECORD, i * RECORD), np.uint8)
        return torch.from_numpy(raw[:3072].astype(np.float32) / 255), i % 10


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reader = Reader(serve())
    with tempfile.NamedTemporaryFile() as local:
        for i in range(240):
            local.write(reader.read(i))
        local.flush()
        train(local.name)


def train(path):
    net = nn.Sequential(nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Records(path), batch_size=8, num_workers=2, persistent_workers=True)
    for _ in range(20):
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
