"""The cure: one checkpoint at the end."""

import os
import tempfile

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, BATCH = (4096, 1024) if DEVICE.type == "cuda" else (512, 64)


def save(state: dict[str, object], path: str) -> None:
    with open(path, "wb") as file:  # noqa: PTH123
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = torch.zeros(15_000_000)  # stands for the rest of the state: moving averages, optimizer state
    features, labels = torch.randn(BATCH, WIDTH, device=DEVICE), torch.randint(0, 10, (BATCH,), device=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(60):
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save({"model": model.state_dict(), "average": average}, os.path.join(folder, "last.pt"))  # noqa: PTH118
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
