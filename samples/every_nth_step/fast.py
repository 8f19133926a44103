"""A batch costs one request instead of one a sample, so the workers stay ahead."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENCY = 0.012  # s, of one request to an object store


class Remote(Dataset):
    """Samples behind a request that takes its time: the process blocks in poll() on a pipe, as it would on a socket."""

    pipe = None

    def __len__(self):
        return 960

    def request(self):
        import select

        if self.pipe is None:
            self.pipe = os.pipe()
        select.select([self.pipe[0]], [], [], LATENCY)

    def sample(self, i):
        return torch.full((512,), i / 960), i % 10

    def __getitems__(self, batch):
        self.request()
        return [self.sample(i) for i in batch]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(
        DEVICE
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Remote(), batch_size=16, num_workers=4, prefetch_factor=1, persistent_workers=True)
    for _ in range(2):
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
