"""Data parallel over gloo on CPUs: each rank its part of the data, gradients averaged."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 32), torch.randn(512, 1))
    net = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for rows, wanted in DataLoader(data, batch_size=16, sampler=sampler):
            loss = torch.nn.functional.mse_loss(net(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
    weight = next(net.parameters()).sum().item()
    sys.stdout.write(f"rank {dist.get_rank()} weight {weight.hex()}\n")  # one write: the ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
