"""The sampler gives whole batches of indices, and the tensor is indexed once a batch."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(100_000, 20), torch.randint(0, 2, (100_000,)))
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 4096, drop_last=False), batch_size=None)
    for _ in range(3):
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
