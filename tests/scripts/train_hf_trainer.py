"""Hugging Face's Trainer: a tiny GPT-2 with random weights, evaluation every 16 steps, accumulated gradients."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Letters(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        row = torch.arange(index, index + 16) % 50
        return {"input_ids": row, "labels": row}


def main():
    set_seed(0)
    torch.set_num_threads(1)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            eval_strategy="steps",
            eval_steps=16,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=net, args=asked, train_dataset=Letters(), eval_dataset=Letters())
        result = trainer.train()
    sys.stdout.write(f"steps {result.global_step} loss {result.training_loss.hex()}\n")


if __name__ == "__main__":
    main()
