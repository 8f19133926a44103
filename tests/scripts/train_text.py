"""Text: an embedding and a GRU over a stream of characters, clipped gradients, dropout, no DataLoader."""

import torch


class Next(torch.nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.embed = torch.nn.Embedding(letters, 32)
        self.memory = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(64, letters))

    def forward(self, letters, state):
        out, state = self.memory(self.embed(letters), state)
        return self.head(out), state.detach()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    text = ("the quick brown fox jumps over the lazy dog and " * 100).encode()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    rows = data[: len(data) // 8 * 8].view(8, -1)
    net = Next(len(letters))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    state = None
    for at in range(0, min(rows.shape[1] - 25, 40 * 12), 12):
        scores, state = net(rows[:, at : at + 24], state)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, at + 1 : at + 25].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    print("final loss", loss.item().hex())


if __name__ == "__main__":
    main()
