"""Untouched Llama of transformers on 4 processes: ``python examples/hf_llama.py``.

Tensor parallel 2 x pipeline parallel 2; needs ``pip install transformers``. Set ``strategy="auto"``
and ``devices=1`` for the same losses on one.
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_lightning.strategies import MegatronStrategy


class Llama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)  # every process draws the same weights and data
    ids = torch.randint(3, 512, (128, 1)) + torch.arange(32)  # each token is one more
    samples = [{"input_ids": row % 512, "labels": row % 512} for row in ids]
    strategy = MegatronStrategy(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=2
    )
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=4, max_epochs=4, logger=False
    )
    trainer.fit(Llama(), DataLoader(samples, batch_size=8))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
