"""A loop of one's own, made ready by Accelerate: accumulated gradients, validation after each epoch."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    net, optimizer, train, held_out = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        DataLoader(data, batch_size=8, shuffle=True),
        DataLoader(data, batch_size=64),
    )
    steps = 0
    for _ in range(2):
        net.train()
        for rows, wanted in train:
            with accelerator.accumulate(net):
                loss = torch.nn.functional.mse_loss(net(rows), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
        net.eval()
        with torch.no_grad():
            valid = sum(torch.nn.functional.mse_loss(net(rows), wanted).item() for rows, wanted in held_out)
    sys.stdout.write(f"steps {steps} loss {valid.hex()}\n")


if __name__ == "__main__":
    main()
