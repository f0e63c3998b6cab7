"""A language model as an ordinary LightningModule: it runs on one device and under ``MegatronStrategy`` unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.transformer import GPTModel

Batch = dict[str, Tensor]


def warmup_cosine(step: int, *, warmup_steps: int, decay_steps: int, min_ratio: float) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine from 1 to ``min_ratio``, then ``min_ratio``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class GPTLightningModule(LightningModule):
    """Trains a :class:`GPTModel` with AdamW.

    A batch holds ``tokens`` and ``labels`` [b, s] (already shifted), and may hold ``loss_mask`` [b, s] (0 leaves a token out)
    and ``position_ids`` [b, s].

    Args:
        config: The model.
        learning_rate: Peak learning rate.
        min_learning_rate: Learning rate after the decay.
        weight_decay: Decoupled weight decay of matrices; norms and biases have none.
        betas: Adam's decay rates.
        eps: Adam's epsilon.
        warmup_steps: Optimizer steps of linear warm-up.
        decay_steps: Optimizer steps until the cosine reaches its end; None: constant after the warm-up.

    Raises:
        ConfigError: If the schedule contradicts itself.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1}

    def __init__(
        self,
        config: TransformerConfig,
        *,
        learning_rate: float = 3e-4,
        min_learning_rate: float = 0.0,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= min_learning_rate <= learning_rate:
            raise ConfigError(
                f"min_learning_rate={min_learning_rate} is not between 0 and learning_rate={learning_rate}. Lower it."
            )
        if decay_steps is not None and decay_steps <= warmup_steps:
            raise ConfigError(
                f"decay_steps={decay_steps} ends before warmup_steps={warmup_steps}; it counts from the start of training. "
                "Set it above warmup_steps."
            )
        if not isinstance(config, TransformerConfig):
            config = TransformerConfig(**config)  # as `load_from_checkpoint` passes it: a checkpoint holds plain values only
        self.config = config
        settings: dict[str, Any] = {
            "learning_rate": learning_rate,
            "min_learning_rate": min_learning_rate,
            "weight_decay": weight_decay,
        }
        settings |= {"betas": tuple(betas), "eps": eps, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
        self.save_hyperparameters({"config": config.to_dict(), **settings})
        self.learning_rate, self.min_learning_rate = learning_rate, min_learning_rate
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        """Build the model, on ``meta`` where the strategy will keep only a part of it and materialise that."""
        if self.model is not None:
            return
        mesh = self.device_mesh
        parallel = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
        with torch.device("meta" if parallel else torch.empty(0).device):
            self.model = GPTModel(self.config)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Return the model's logits [b, s, v], or with labels the tokens' losses [b, s]."""
        if self.model is None:
            self.configure_model()
        out: Tensor = self.model(tokens, labels=labels, position_ids=position_ids)  # type: ignore[misc]
        return out

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the tokens that count, and their number."""
        losses = self(batch["tokens"], batch["labels"], batch.get("position_ids"))
        mask = batch["loss_mask"] if "loss_mask" in batch else batch["labels"] != -100
        num_tokens = mask.sum()
        return (losses * mask).sum() / num_tokens.clamp(min=1), num_tokens

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of one micro-batch and the number of tokens it is the mean of."""
        loss, num_tokens = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "num_items": num_tokens}

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``val_loss``, the mean over all tokens."""
        loss, num_tokens = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=int(num_tokens))
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``test_loss``, the mean over all tokens."""
        loss, num_tokens = self._loss(batch)
        self.log("test_loss", loss, sync_dist=True, batch_size=int(num_tokens))
        return loss

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely next token at every position, [b, s]."""
        logits: Tensor = self(batch["tokens"], position_ids=batch.get("position_ids"))
        return logits.argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW, and a schedule stepped with it where one is configured."""
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": self.weight_decay}]
        groups += [{"params": others, "weight_decay": 0.0}] if others else []
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)
        if not self.warmup_steps and self.decay_steps is None:
            return optimizer
        factor = partial(
            warmup_cosine,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps or 1,
            min_ratio=self.min_learning_rate / self.learning_rate if self.decay_steps else 1.0,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
