"""Lightning's own loop: a module, a trainer, validation twice an epoch, accumulated batches."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("valid", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64))
    sys.stdout.write(f"steps {trainer.global_step} loss {float(trainer.callback_metrics['valid']).hex()}\n")


if __name__ == "__main__":
    main()
