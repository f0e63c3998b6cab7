"""A table that a user wrote trains as one device does; a smaller batch at the end of the data does
not end the run, nor does resuming at one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.pipeline import schedules
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer


class _SavedAtStepTwo(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def _samples() -> list[dict[str, torch.Tensor]]:
    text = torch.randint(0, 30, (20, 9), generator=torch.Generator().manual_seed(5))
    return [{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(8)} for row in text]


def _layout(table: str) -> dict[str, Any]:
    sizes = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
    }
    return {**sizes, "pipeline_schedule": table}


def _fit(table: str | None, **options: Any) -> tuple[Losses, pl.Trainer, GPTLightningModule]:
    config = tiny_config(
        num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=30, max_sequence_length=8
    )
    strategy = "auto" if table is None else MegatronStrategy(**_layout(table))
    record, ckpt_path, module = (
        Losses(),
        options.pop("ckpt_path", None),
        GPTLightningModule(config, learning_rate=1e-2),
    )
    fit = trainer(strategy, callbacks=[record, *options.pop("callbacks", [])], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # 8, 8 and 4 samples.
        fit.fit(module, DataLoader(_samples(), batch_size=8), ckpt_path=ckpt_path)
    said = [
        str(entry.message)
        for entry in caught
        if "has no order for the 2 micro-batches" in str(entry.message)
    ]
    assert len(said) == (table is not None and fit.global_rank == 0), said
    return record, fit, module


def _train(table: str | None) -> tuple[list[float], list[float]]:
    record, _, _ = _fit(table, max_epochs=2)
    return record.losses, record.norms


def _resume(table: str, checkpoint: str) -> bool:
    """Stop before the smaller batch and resume with it: is that bit-equal to never having
    stopped?"""
    whole, _, expected = _fit(table, max_epochs=2, callbacks=[_SavedAtStepTwo(checkpoint)])
    rest, _, found = _fit(table, max_epochs=2, ckpt_path=checkpoint)
    weights = zip(expected.state_dict().values(), found.state_dict().values(), strict=True)
    return rest.losses == whole.losses[2:] and all(torch.equal(a, b) for a, b in weights)


def _begin_anew(table: str, same_trainer: bool) -> None:
    """Train, then begin another training with what came out of it, on batches for which the table
    has no order."""
    _, fit, module = _fit(table, max_epochs=1)
    again = fit if same_trainer else trainer(MegatronStrategy(**_layout(table)), max_epochs=2)
    again.fit_loop.max_epochs = 2
    with pytest.raises(ConfigError, match="is a table for 4 micro-batches, and the run has 2"):
        again.fit(module, DataLoader(_samples(), batch_size=4))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["zbv", "interleaved"])
def test_a_file_with_a_table_for_whole_batches(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    table = schedules.make_schedule(name, num_ranks=2, num_chunks=2, num_microbatches=4)
    path.write_text(schedules.write_csv(table))
    expected = run_ranks(1, _train, None)[0]
    assert len(expected[0]) == 6
    for losses, norms in run_ranks(2, _train, str(path)):
        assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(
            expected[1], rel=1e-5
        )


@pytest.mark.slow
def test_resuming_at_a_smaller_batch_is_bit_equal(tmp_path: Path) -> None:
    """The first batch that the resumed run meets is the epoch's last, for which the table has no
    order."""
    path = tmp_path / "mine.csv"
    path.write_text(
        schedules.write_csv(
            schedules.make_schedule("zbv", num_ranks=2, num_chunks=2, num_microbatches=4)
        )
    )
    assert run_ranks(2, _resume, str(path), str(tmp_path / "stopped.ckpt")) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("same_trainer", [True, False])
def test_another_training_is_judged_by_its_own_batches(same_trainer: bool, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        schedules.write_csv(
            schedules.make_schedule("zbv", num_ranks=2, num_chunks=2, num_microbatches=4)
        )
    )
    run_ranks(2, _begin_anew, str(path), same_trainer)
