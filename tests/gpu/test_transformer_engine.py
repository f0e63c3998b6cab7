"""Transformer Engine on a GPU: trainings beside bf16, products beside the emulation's, and state.
Skipped where it cannot be used. On one GPU, so at tensor-parallel size 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig, RecomputeOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.backends import Backend
from megatron_lightning.precision.transformer_engine.library import load
from megatron_lightning.precision.transformer_engine.recipes import check_available
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.trainers import Losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEQUENCE, BATCH, VOCABULARY = 128, 8, 256
RECOMPUTE = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


@pytest.fixture(params=["delayed", "current", "blockwise", "mxfp8", "nvfp4"])
def recipe(request: Any) -> FP8Recipe:
    """A recipe that this GPU's Transformer Engine can run."""
    found = FP8Recipe(scaling=request.param)
    try:
        check_available(found, load(has_gpu=True))
    except ConfigError as error:
        pytest.skip(str(error))
    return found


def _data(steps: int) -> DataLoader[dict[str, Tensor]]:
    """Return sequences x(t + 1) = (3 x(t) + step) mod 256 of 8 different steps."""
    start = torch.randint(
        0, VOCABULARY, (BATCH * steps,), generator=torch.Generator().manual_seed(5)
    )
    tokens = [start]
    for _ in range(SEQUENCE):
        tokens.append((3 * tokens[-1] + torch.arange(BATCH * steps) % 8) % VOCABULARY)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.stack(tokens, dim=1)]
    return DataLoader(rows, batch_size=BATCH)


def _fit(
    recipe: FP8Recipe | None,
    *,
    steps: int = 50,
    backend: Backend = "transformer_engine",
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    ckpt_path: str | None = None,
) -> list[float]:
    pl.seed_everything(1)
    record = Losses()
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe is not None:
        precision = {"plugins": [MegatronFP8Precision(recipe, backend=backend)]}
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=512, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        hidden_dropout=0.0, attention_dropout=0.0, **(model or {}),
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[record, *callbacks],
        enable_checkpointing=bool(callbacks),
        strategy=MegatronStrategy(**{"micro_batch_size": 2, **(strategy or {})}), **precision,
    )  # fmt: skip
    trainer.fit(GPTLightningModule(config, learning_rate=1e-3), _data(50), ckpt_path=ckpt_path)
    return record.losses


@pytest.mark.parametrize(
    "model", [{}, {"moe": MoEConfig(num_experts=4)}, {"normalization": "LayerNorm"}],
    ids=["dense", "experts", "layernorm"],
)  # fmt: skip
def test_a_training_tracks_bf16(recipe: FP8Recipe, model: dict[str, Any]) -> None:
    """Within 5 % (15 % with 4 bits) of bf16 at the end, and not equal to it."""
    losses, bf16 = _fit(recipe, model=model), _fit(None, model=model)
    limit = 0.15 if recipe.scaling == "nvfp4" else 0.05
    assert losses != bf16
    assert sum(losses[-10:]) == pytest.approx(sum(bf16[-10:]), rel=limit)


def test_it_tracks_the_emulation(recipe: FP8Recipe) -> None:
    """The same scales and rounding: the first losses within 1 % (kernels add up otherwise)."""
    losses, emulated = _fit(recipe, steps=5), _fit(recipe, steps=5, backend="emulation")
    assert losses == pytest.approx(emulated, rel=1e-2)


def test_recomputation_changes_nothing(recipe: FP8Recipe) -> None:
    """The second forward has the scales of the first: equal bit by bit, but for stochastic
    rounding."""
    again = _fit(recipe, steps=5, strategy={"recompute": RECOMPUTE})
    limit = 1e-2 if recipe.scaling == "nvfp4" else 0.0
    assert _fit(recipe, steps=5) == pytest.approx(again, rel=limit, abs=0.0)


def test_resume_continues_with_the_scales(recipe: FP8Recipe, tmp_path: Path) -> None:
    """From a checkpoint without a pickle; bf16 continues from it as well."""
    save = ModelCheckpoint(dirpath=tmp_path, filename="at", every_n_train_steps=3, save_top_k=1)
    full = _fit(recipe, steps=6)
    _fit(recipe, steps=3, callbacks=(save,))
    path = str(tmp_path / "at.ckpt")
    limit = 1e-2 if recipe.scaling == "nvfp4" else 1e-6
    assert _fit(recipe, steps=6, ckpt_path=path)[-3:] == pytest.approx(full[-3:], rel=limit)
    assert _fit(None, steps=6, ckpt_path=path)[-3:] == pytest.approx(full[-3:], rel=5e-2)
