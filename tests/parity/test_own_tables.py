"""A table that a user wrote trains as one device does, and a smaller batch at the end of the data does not end the run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.pipeline import schedules
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer


def _train(table: str | None) -> tuple[list[float], list[float]]:
    config = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=30, max_sequence_length=8)
    text = torch.randint(0, 30, (20, 9), generator=torch.Generator().manual_seed(5))
    samples = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(8)} for row in text]
    strategy = "auto" if table is None else MegatronStrategy(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, micro_batch_size=2, pipeline_schedule=table
    )  # fmt: skip
    record = Losses()
    fit = trainer(strategy, max_epochs=2, callbacks=[record])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(GPTLightningModule(config, learning_rate=1e-2), DataLoader(samples, batch_size=8))  # 8, 8 and 4 samples
    said = [str(entry.message) for entry in caught if "has no order for the 2 micro-batches" in str(entry.message)]
    assert len(said) == (table is not None and fit.global_rank == 0), said
    return record.losses, record.norms


@pytest.mark.parametrize("name", ["zbv", "interleaved"])
def test_a_file_with_a_table_for_whole_batches(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    table = schedules.make_schedule(name, num_coordinates=2, num_chunks=2, num_microbatches=4)
    path.write_text(schedules.write_csv(table))
    expected = run_ranks(1, _train, None)[0]
    assert len(expected[0]) == 6
    for losses, norms in run_ranks(2, _train, str(path)):
        assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(expected[1], rel=1e-5)
