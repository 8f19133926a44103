"""The workers are ended and started again at every epoch, and each start opens the index anew."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEX = json.dumps([{"name": f"sample-{i:06d}", "label": i % 10} for i in range(100_000)])


class Indexed(Dataset):
    index = None

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((256,), float(i)), self.index[i]["label"]


def open_index(_worker):
    Indexed.index = json.loads(INDEX)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Indexed(), batch_size=16, num_workers=1, worker_init_fn=open_index)
    for _ in range(20):
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            for _ in range(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
