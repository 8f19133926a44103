"""Batches lie in pinned memory, and the next one is copied on a stream of its own while the present one computes."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Ahead:
    """The batches of an iterable of pinned batches, on the device; each is copied while the one before it is used."""

    def __init__(self, batches):
        self.batches, self.stream = iter(batches), torch.cuda.Stream()
        self.fetch()

    def fetch(self):
        with torch.cuda.stream(self.stream):
            self.next = [part.to(DEVICE, non_blocking=True) for part in next(self.batches, ())]

    def __iter__(self):
        while self.next:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            for part in batch:
                part.record_stream(torch.cuda.current_stream())
            self.fetch()
            yield batch


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    net.to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    size = 256 if DEVICE == "cuda" else 1
    batches = [(torch.randn(size, 3, 224, 224), torch.randint(0, 10, (size,))) for _ in range(2)]
    if DEVICE == "cuda":
        batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
    run = (batches[step % 2] for step in range(80))
    for x, y in Ahead(run) if DEVICE == "cuda" else run:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
