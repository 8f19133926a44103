"""Four workers a CPU, and each runs its image operations on four threads: they take the CPUs from each other."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPUS = len(os.sched_getaffinity(0))
THREADS = 4


class Augmented(Dataset):
    def __init__(self):
        self.image = torch.rand(3, 192, 192)

    def __len__(self):
        return 640

    def __getitem__(self, i):
        image = self.image
        for _ in range(20):  # brightness, contrast, gamma
            image = (image * 1.02 - 0.01).clamp(0, 1)
            image = image + 0.1 * (image - image * image)
        return image[:, ::6, ::6].flatten(), i % 10


def set_threads(_worker):
    torch.set_num_threads(THREADS)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Linear(3 * 32 * 32, 10).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Augmented(), batch_size=8, num_workers=4 * CPUS, worker_init_fn=set_threads)
    for x, y in loader:
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
