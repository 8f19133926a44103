"""A training loop with nothing wrong in it: the data lie on the device, and each step is matrix products."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, BATCH = (8192, 4096) if DEVICE.type == "cuda" else (1024, 128)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())),
        torch.nn.Linear(WIDTH, 16),
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    features = torch.randn(BATCH, WIDTH, device=DEVICE)
    labels = torch.randint(0, 16, (BATCH,), device=DEVICE)
    for _ in range(60):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = torch.nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
