"""Sequences of like length share a batch, which is padded to its own longest."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH = (64, 512) if DEVICE == "cuda" else (8, 64)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lengths = [int(8 + 504 * float(u) ** 4) for u in torch.rand(60 * BATCH)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    net = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for number in torch.randperm(len(batches)).tolist():
        chosen = batches[number]
        longest = max(lengths[i] for i in chosen)
        x = torch.randn(len(chosen), longest, WIDTH, device=DEVICE)
        real = torch.arange(longest, device=DEVICE) < torch.tensor([lengths[i] for i in chosen], device=DEVICE)[:, None]
        optimizer.zero_grad()
        (net(x, src_key_padding_mask=~real) * real[..., None]).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
