"""Short trainings of the language model on random tokens: what recomputed and compiled layers are
compared by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, SEQUENCE, VOCABULARY = 2, 4, 8, 30
RECOMPUTE: dict[str, RecomputeOptions | None] = {
    "none": None,
    "uniform": RecomputeOptions(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "block": RecomputeOptions(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    ),
    "selective": RecomputeOptions(
        recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]
    ),
}


def small_gpt(num_layers: int, dropout: float = 0.0, **options: Any) -> TransformerConfig:
    """Return a config whose gradients are large enough to tell two runs apart."""
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "init_method_std": 0.1,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }
    return tiny_config(num_layers=num_layers, **{**defaults, **options})


def losses_of(
    module: GPTLightningModule,
    strategy: MegatronStrategy | str,
    callbacks: Sequence[pl.Callback],
    **options: Any,
) -> tuple[list[float], list[float], float]:
    """Train for ``STEPS`` steps with a validation after each; return losses, gradient norms and the
    last validation loss; ``options``: of the Trainer."""
    text = torch.randint(
        0, VOCABULARY, (STEPS * 2 * BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3)
    )
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    record = Losses()
    fit = trainer(
        strategy,
        max_steps=STEPS,
        callbacks=[record, *callbacks],
        gradient_clip_val=1.0,
        limit_val_batches=1,
        val_check_interval=1,
        **options,
    )
    fit.fit(module, DataLoader(rows, batch_size=BATCH), DataLoader(rows, batch_size=BATCH))
    return record.losses, record.norms, float(fit.callback_metrics["val_loss"])
