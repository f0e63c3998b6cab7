"""Blends in a fit: losses by validation set, resume on other numbers of ranks, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml

from megatron_lightning.cli import main
from megatron_lightning.config import TransformerConfig
from megatron_lightning.data import IndexedDatasetWriter
from megatron_lightning.errors import CheckpointError
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

VOCABULARY, SEQUENCE = 50, 16


def _write(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, begin, count in (("a", 1, 40), ("b", 20, 15), ("c", 1, 9), ("d", 30, 30)):
        with IndexedDatasetWriter(str(folder / name), np.dtype(np.uint16)) as writer:
            for _ in range(count):
                tokens = random.integers(begin, begin + 20, int(random.integers(5, 60)))
                lengths = np.array([len(tokens)], np.int32)
                writer.add_documents(tokens, lengths, np.ones(1, np.int64))
            writer.finish()


def _data(folder: str, replicas: int = 1, **options: Any) -> PretrainDataModule:
    prefix: Any = {
        "train": [[0.3, f"{folder}/a"], [0.7, f"{folder}/b"]],
        "validation": {"code": f"{folder}/c", "web": [f"{folder}/d"]},
    }
    settings = {"num_train_samples": 64, "cache_dir": f"{folder}/cache", **options}
    return PretrainDataModule(prefix, SEQUENCE, 8 // replicas, **settings)


def _module() -> GPTLightningModule:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, init_method_std=0.1,
    )  # fmt: skip
    return GPTLightningModule(config, learning_rate=1e-3)


def _validate(folder: str, options: dict[str, Any] | None, replicas: int) -> dict[str, float]:
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    run = trainer(strategy)
    run.validate(_module(), datamodule=_data(folder, replicas), verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


def _validate_all(folder: str, cases: list[Any]) -> list[dict[str, float]]:
    return [_validate(folder, *case) for case in cases]


@pytest.mark.timeout(200)
def test_a_loss_for_each_validation_set(tmp_path: Path) -> None:
    """On every layout that of plain Lightning, and of each set alone; fp32: 1e-5."""
    _write(tmp_path)
    (plain,) = run_ranks(1, _validate_all, str(tmp_path), [(None, 1)])
    metrics = plain[0]
    assert metrics.keys() == {"val_loss", "val_loss/code", "val_loss/web"}
    pieces = {"code": "c", "web": "d"}
    alone, sizes = {}, {}
    for name, file in pieces.items():
        data = PretrainDataModule(
            {"train": str(tmp_path / "a"), "validation": str(tmp_path / file)}, SEQUENCE, 4,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        run = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        run.validate(_module(), datamodule=data, verbose=False)
        alone[name] = float(run.callback_metrics["val_loss"])
        sizes[name] = len(data._datasets["valid"])
        assert metrics[f"val_loss/{name}"] == pytest.approx(alone[name], rel=1e-5)
    total = sum(alone[name] * sizes[name] for name in alone) / sum(sizes.values())
    assert metrics["val_loss"] == pytest.approx(total, rel=1e-5)
    cases = [
        ({"pipeline_model_parallel_size": 2, "micro_batch_size": 2}, 1),
        ({"context_parallel_size": 2}, 1),
        ({}, 2),
    ]
    for rank in run_ranks(2, _validate_all, str(tmp_path), cases, timeout_s=150):
        for (options, replicas), found in zip(cases, rank, strict=True):
            # Two shares of unequal length repeat a sample.
            tolerance = 1e-5 if replicas == 1 or sum(sizes.values()) % 2 == 0 else 0.05
            assert found == pytest.approx(metrics, rel=tolerance), options


class Seen(pl.Callback):
    """First tokens and data set of all samples of every batch."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        keys = torch.cat([batch["dataset_id"][:, None], batch["tokens"][:, :6]], 1)
        self.batches.append(keys.tolist())


def _fit(
    folder: str, replicas: int, steps: int, resume: bool, options: dict[str, Any]
) -> list[list[list[int]]]:
    seen = Seen()
    run = trainer(
        MegatronStrategy(), max_steps=steps, callbacks=[seen], limit_val_batches=0, max_epochs=-1
    )
    checkpoint = f"{folder}/mid.ckpt"
    data = _data(folder, replicas, **options)
    run.fit(_module(), datamodule=data, ckpt_path=checkpoint if resume else None)
    if not resume:
        run.save_checkpoint(checkpoint)
    return seen.batches


@pytest.mark.timeout(200)
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    _write(tmp_path)
    folder = str(tmp_path)
    (whole,) = run_ranks(1, _fit, folder, 1, 7, False, {})
    halves = run_ranks(2, _fit, folder, 2, 3, False, {})
    (rest,) = run_ranks(1, _fit, folder, 1, 7, True, {})
    joined = [sorted([*one, *two]) for one, two in zip(*halves, strict=True)]
    assert joined + [sorted(batch) for batch in rest] == [sorted(batch) for batch in whole]
    with pytest.raises(AssertionError, match=r"seed: 99 here, 1234 there"):
        run_ranks(1, _fit, folder, 1, 7, True, {"seed": 99})
    assert issubclass(CheckpointError, RuntimeError)


def test_the_index_is_built_before_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    (tmp_path / "blend.yaml").write_text(f"train: [[0.3, {tmp_path}/a], [0.7, {tmp_path}/b]]\n")
    data = {
        "class_path": "PretrainDataModule",
        "init_args": {
            "data_prefix": str(tmp_path / "blend.yaml"), "sequence_length": 16, "batch_size": 2,
            "num_train_samples": 30, "cache_dir": str(tmp_path / "cache"),
        },
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    main(["data", "index", "--config", str(tmp_path / "config.yaml")])
    assert capsys.readouterr().out == "train: 30 samples\n"
    assert len(list((tmp_path / "cache").glob("*document_index.npy"))) == 2
    pairs = f"[[0.5, {tmp_path}/a], [0.5, {tmp_path}/b]]"
    both = ["--config", str(tmp_path / "config.yaml"), f"--data.data_prefix={pairs}"]
    main(["data", "index", *both, "--data.num_val_samples=4", "--data.split=8,2,0"])
    assert capsys.readouterr().out == "train: 30 samples\nval: 4 samples\n"
    with pytest.raises(SystemExit):
        main(["data", "index", *both])
    assert "num_val_samples is not set, so that the size" in capsys.readouterr().err
