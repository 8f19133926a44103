"""A table: an MLP with batch norm, accumulated gradients, validation after each epoch, the best weights kept."""

import io

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split


def main():
    torch.manual_seed(2)
    torch.set_num_threads(1)
    table = torch.randn(768, 20)
    target = (table[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(768, 1)).tanh()
    train, held_out = random_split(TensorDataset(table, target), [640, 128])
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    best, kept = float("inf"), io.BytesIO()
    for _ in range(4):
        net.train()
        for step, (rows, wanted) in enumerate(DataLoader(train, batch_size=32, shuffle=True)):
            loss = torch.nn.functional.mse_loss(net(rows), wanted) / 2
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            valid = sum(torch.nn.functional.mse_loss(net(x), y).item() for x, y in DataLoader(held_out, batch_size=64))
        if valid < best:
            best = valid
            torch.save(net.state_dict(), kept)
    print("final loss", loss.item().hex(), best.hex(), kept.tell())


if __name__ == "__main__":
    main()
