"""A run resumed on training data in another order is refused with the numbers, or warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 2, "num_train_samples": 16}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return _write(tmp_path / "data", 20)


def _write(path: Path, documents: int) -> str:
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(path, "uint16") as writer:
        for _ in range(documents):
            writer.add_document(random.randint(1, 29, size=random.randint(9, 20)))
    return str(path)


def _fit(
    prefix: str, strategy: Any, max_steps: int, ckpt_path: str | None, changes: dict[str, Any]
) -> pl.Trainer:
    data = PretrainDataModule(prefix, split="9,1,0", **(OPTIONS | changes))
    fit = trainer(strategy, max_steps=max_steps, limit_val_batches=0)
    fit.fit(GPTLightningModule(small_gpt(2)), datamodule=data, ckpt_path=ckpt_path)
    return fit


def _strategy(name: str, ranks: int) -> Any:
    size = {"pipeline_model_parallel_size": ranks} if ranks > 1 else {}
    return "auto" if name == "plain" else MegatronStrategy(**size)


def _save(prefix: str, path: str, strategy: str) -> None:
    _fit(prefix, _strategy(strategy, 1), 3, None, {}).save_checkpoint(path)


def _resume(prefix: str, path: str, strategy: str, ranks: int, changes: dict[str, Any]) -> int:
    return _fit(prefix, _strategy(strategy, ranks), 5, path, changes).global_step


@pytest.mark.parametrize("strategy", ["plain", "megatron"])
def test_a_changed_order_is_refused_with_the_numbers(
    strategy: str, prefix: str, tmp_path: Path
) -> None:
    path, number = str(tmp_path / "saved"), 6 if strategy == "megatron" else None
    _save(prefix, path, strategy)
    assert _resume(prefix, path, strategy, 1, {"num_workers": 0}) == 5
    read = "the samples" if number is None else f"the {number} samples"
    for name, value in (("seed", 7), ("sequence_length", 4), ("num_train_samples", 20)):
        before = {"seed": 1234, **OPTIONS}[name]
        row = f"{name}: {value} here, {before} there"
        message = rf"(?s)order:\n  {row}\.\n.*{read} .*on_changed_data"
        with pytest.raises(CheckpointError, match=message):
            _resume(prefix, path, strategy, 1, {name: value})
    with pytest.warns(UserWarning, match=r"seed: 7 here, 1234 there\.\nTraining reads on"):
        options = {"seed": 7, "on_changed_data": "reorder"}
        _resume_loudly(prefix, path, strategy, options)
    grown = _write(tmp_path / "grown", 25)
    with pytest.raises(
        CheckpointError,
        match=r"grown: 25 documents, .* here, absent there;\n  .*data: absent here, 20 doc",
    ):
        _resume(grown, path, strategy, 1, {})


def _resume_loudly(prefix: str, path: str, strategy: str, changes: dict[str, Any]) -> None:
    data = PretrainDataModule(prefix, split="9,1,0", **(OPTIONS | changes))
    fit = trainer(_strategy(strategy, 1), max_steps=5, limit_val_batches=0)
    warnings.simplefilter("always")
    fit.fit(GPTLightningModule(small_gpt(2)), datamodule=data, ckpt_path=path)


def test_stages_refuse_alike_and_evaluation_does_not_ask(prefix: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    _save(prefix, path, "megatron")
    with pytest.raises(AssertionError, match="seed: 7 here, 1234 there"):
        run_ranks(2, _resume, prefix, path, "megatron", 2, {"seed": 7})
    data = PretrainDataModule(prefix, split="9,1,0", **(OPTIONS | {"seed": 7}))
    trainer(MegatronStrategy()).validate(
        GPTLightningModule(small_gpt(2)), datamodule=data, ckpt_path=path
    )


def test_an_unknown_choice_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="on_changed_data='forget'; must be one of refuse"):
        PretrainDataModule(prefix, on_changed_data="forget", **OPTIONS)  # type: ignore[arg-type]
