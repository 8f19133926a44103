"""A training whose step takes 10 ms or more on one thread, and that times its own steps: `observer_steps.py OUT STEPS`.

OUT gets a list of [wall ns, CPU ns] a step, each from the end of one optimizer step to the end of the next.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps = int(sys.argv[2])
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(4)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(net.parameters())
    data = TensorDataset(torch.randn(128 * steps, 512), torch.randint(10, (128 * steps,)))
    times = []
    for rows, labels in DataLoader(data, batch_size=128):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(rows), labels).backward()
        optimizer.step()
        times.append((time.perf_counter_ns(), time.process_time_ns()))
    pairs = itertools.pairwise(times)
    Path(sys.argv[1]).write_text(json.dumps([[b[0] - a[0], b[1] - a[1]] for a, b in pairs]))


if __name__ == "__main__":
    main()
