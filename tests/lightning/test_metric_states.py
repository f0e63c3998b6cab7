"""States of torchmetrics: lists that only the last stage fills; persistent ones, which are saved
with one replica only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from megatron_lightning.errors import CheckpointError
from tests.helpers.toy import ToyModule
from tests.lightning.support import DP2, ONE, Layout, assert_close, make_layout, run, single

# One micro-batch: the mean of a step is then the same under every layout.
STAGES = make_layout("pp2-dp2", 4, 2, pipeline_model_parallel_size=2, micro_batch_size=4)


class _Listed(Metric):
    """Lists with and without a reduction."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("sums", [], dist_reduce_fx=None)

    def update(self, ids: Tensor) -> None:
        self.rows.append(ids)
        self.sums.append(ids.sum())

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return torch.tensor([len(rows), rows.square().sum(), torch.stack(self.sums).sum()])


class _Module(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen = _Listed()
        self.values: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.seen.update(batch["ids"])  # only the last stage comes here
        return output

    def on_train_epoch_end(self) -> None:
        self.values = self.seen.compute().tolist()


def _fit(layout: Layout, folder: str) -> list[float]:
    module = _Module()
    layout.trainer(folder, max_epochs=1).fit(module, datamodule=layout.data_module(num_samples=32))
    return module.values


def test_lists_that_only_the_last_stage_fills(tmp_path: Path) -> None:
    """torchmetrics gathers them entry by entry, on every rank: stages that ask less often would
    wait forever."""
    expected = single(_fit)
    for values in run(STAGES, _fit, tmp_path):
        assert_close(values, expected, 1e-6)


def _saved_and_loaded(layout: Layout, folder: str) -> None:
    """Save with one replica; with two, both are refused, and a run that will save before it
    trains."""
    module, path = _Module(), f"{folder}/middle.ckpt"
    module.seen.persistent(True)
    data = layout.data_module(num_samples=32)
    if layout.ranks == 1:
        trainer = layout.trainer(folder, max_epochs=1)
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(path)
        return
    message = (
        r"seen is a _Listed with persistent states \(rows, sums\).*2 data-parallel "
        r"ranks.*persistent\(False\)"
    )
    trainer = layout.trainer(folder, max_epochs=1)
    trainer.fit(module, datamodule=data)
    with pytest.raises(CheckpointError, match=message):
        trainer.save_checkpoint(f"{folder}/other.ckpt")
    with pytest.raises(CheckpointError, match=message):
        layout.trainer(folder, max_epochs=2, enable_checkpointing=True).fit(module, datamodule=data)
    with pytest.raises(CheckpointError, match=message):
        layout.trainer(folder, max_epochs=2).fit(module, datamodule=data, ckpt_path=path)


def test_persistent_states_are_refused_with_several_replicas(tmp_path: Path) -> None:
    run(ONE, _saved_and_loaded, tmp_path)
    run(DP2, _saved_and_loaded, tmp_path)
