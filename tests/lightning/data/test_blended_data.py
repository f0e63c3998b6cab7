"""Blends in a fit: losses by validation set, resume on other numbers of ranks, and the command."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml

from megatron_lightning.cli import main
from megatron_lightning.data import BatchSizeSchedule, IndexedDataset
from megatron_lightning.errors import CheckpointError, DataError
from megatron_lightning.modules import PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.blends import SEQUENCE, blended_data, blended_module, write_blends
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer


def _validate(folder: str, options: dict[str, Any] | None, replicas: int) -> dict[str, float]:
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    run = trainer(strategy)
    run.validate(blended_module(), datamodule=blended_data(folder, replicas), verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


def _validate_all(folder: str, cases: list[Any]) -> list[dict[str, float]]:
    return [_validate(folder, *case) for case in cases]


@pytest.mark.timeout(200)
def test_a_loss_for_each_validation_set(tmp_path: Path) -> None:
    """On every layout that of plain Lightning, and of each set alone; fp32: 1e-5."""
    write_blends(tmp_path)
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
        run.validate(blended_module(), datamodule=data, verbose=False)
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
    saves = options.pop("saves", not resume)
    data = blended_data(folder, replicas, **options)
    run.fit(blended_module(), datamodule=data, ckpt_path=checkpoint if resume else None)
    if saves:
        run.save_checkpoint(checkpoint)
    return seen.batches


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    write_blends(tmp_path)
    folder = str(tmp_path)
    (whole,) = run_ranks(1, _fit, folder, 1, 7, False, {})
    halves = run_ranks(2, _fit, folder, 2, 3, False, {})
    (rest,) = run_ranks(1, _fit, folder, 1, 7, True, {})
    joined = [sorted([*one, *two]) for one, two in zip(*halves, strict=True)]
    assert joined + [sorted(batch) for batch in rest] == [sorted(batch) for batch in whole]
    # With other weights, of which the checkpoint of the changed run says enough for the next one.
    changed = {"weights": (0.5, 0.5), "on_changed_data": "continue"}
    (whole,) = run_ranks(1, _fit, folder, 1, 7, True, changed)
    (first,) = run_ranks(1, _fit, folder, 1, 5, True, {**changed, "saves": True})
    parts = run_ranks(2, _fit, folder, 2, 7, True, changed)
    joined = first + [[*one, *two] for one, two in zip(*parts, strict=True)]
    assert [sorted(batch) for batch in joined] == [sorted(batch) for batch in whole]
    counts = np.bincount([row[0] for batch in whole for row in batch])
    assert counts.tolist() == [16, 16]


def _fit_on_nodes(folder: str, urls: str, steps: int, resume: bool) -> list[list[list[int]]]:
    """Fit with the cache folder of a node for each rank, on data at URLs."""
    cache = f"{folder}/node-{os.environ['RANK']}"
    pairs = [(0.3, f"{urls}/a"), (0.7, f"{urls}/b")]
    data = PretrainDataModule({"train": pairs}, SEQUENCE, 4, num_train_samples=64, cache_dir=cache)
    seen = Seen()
    run = trainer(MegatronStrategy(), max_steps=steps, callbacks=[seen], max_epochs=-1)
    run.fit(blended_module(), datamodule=data, ckpt_path=f"{folder}/mid.ckpt" if resume else None)
    run.save_checkpoint(f"{folder}/mid.ckpt")
    return seen.batches


@pytest.mark.slow
def test_every_node_has_a_cache_of_its_own(tmp_path: Path) -> None:
    """Without a shared file system: sample indices and blocks of a store, once a node. A resume
    finds other nodes, with nothing in their caches.
    """
    write_blends(tmp_path)
    (whole,) = run_ranks(1, _fit, str(tmp_path), 1, 6, False, {})
    folder, urls = str(tmp_path), f"local://{tmp_path}"  # a URL that all processes read
    first = run_ranks(2, _fit_on_nodes, folder, urls, 3, False)
    for rank in range(2):
        cache = tmp_path / f"node-{rank}"
        assert len(list(cache.glob("*-sample_index.npy"))) == 2
        assert len(list(cache.glob("*.blocks/whole"))) == 2  # the files' indices
        assert len(list(cache.glob("*.blocks/0*"))) >= 2
        shutil.rmtree(cache)
    rest = run_ranks(2, _fit_on_nodes, folder, urls, 6, True)
    ranks = [one + two for one, two in zip(first, rest, strict=True)]
    joined = [sorted([*one, *two]) for one, two in zip(*ranks, strict=True)]
    assert joined == [sorted(batch) for batch in whole]


def _read(folder: str, case: dict[str, Any], steps: int, begin: str, end: str) -> list[Any]:
    """Return the samples and losses of a fit."""
    seen, losses = Seen(), Losses()
    run = trainer(
        MegatronStrategy(micro_batch_size=2, **case["layout"]),
        max_steps=steps, callbacks=[seen, losses], limit_val_batches=2, val_check_interval=2,
        max_epochs=-1, check_val_every_n_epoch=None,
    )  # fmt: skip
    data = blended_data(folder, case["replicas"], **case["options"])
    run.fit(blended_module(), datamodule=data, ckpt_path=f"{folder}/{begin}" if begin else None)
    run.save_checkpoint(f"{folder}/{end}")
    return [seen.batches, losses.values]


def _read_all(folder: str, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Return samples and losses of every case, without and with a reading thread, which resumes."""
    results = []
    for case in cases:
        threaded = {**case, "options": {**case["options"], "reading_thread": True}}
        whole = _read(folder, case, 7, "", "whole.ckpt")
        first = _read(folder, threaded, 4, "", "first.ckpt")
        rest = _read(folder, threaded, 7, "first.ckpt", "rest.ckpt")
        results.append([whole, [one + two for one, two in zip(first, rest, strict=True)]])
    return results


class Losses(pl.Callback):
    """Losses of all steps."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


@pytest.mark.slow
def test_a_reading_thread_changes_nothing(tmp_path: Path) -> None:
    """Samples and losses of a run that resumes, also of a loader without a length, on which the
    ranks agree batch by batch.
    """
    write_blends(tmp_path)
    ramp = BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(4, 4, 8))
    cases: list[dict[str, Any]] = [
        {"layout": {"tensor_model_parallel_size": 2}, "replicas": 1, "options": {}},
        {"layout": {}, "replicas": 2, "options": {"batch_size": None, "batch_size_schedule": ramp}},
    ]
    for rank in run_ranks(2, _read_all, str(tmp_path), cases, timeout_s=100):
        for whole, resumed in rank:
            assert len(whole[1]) == 7
            assert whole == resumed


def test_changed_data_go_on_where_they_were_left(tmp_path: Path) -> None:
    """a and b stay, a with another weight; d is new."""
    write_blends(tmp_path)
    folder = str(tmp_path)
    before = _opened(folder, ("a", "b"), (0.3, 0.7), 25)
    state = before.state_dict()
    read = [row["consumed"] for row in state["datasets"]]
    assert sum(read) == 25
    with pytest.raises(CheckpointError, match="another order:\n") as refused:
        _opened(folder, ("b", "a", "d"), (0.4, 0.3, 0.3), 0).load_state_dict(state)
    sizes = {
        name: f"{data.num_documents} documents, {data.num_tokens} tokens"
        for name in "abd"
        for data in [IndexedDataset(f"{folder}/{name}")]
    }
    assert str(refused.value).splitlines()[1:4] == [
        f"  {folder}/b: {sizes['b']}, weight 0.4 here, {sizes['b']}, weight 0.7 there;",
        f"  {folder}/d: {sizes['d']}, weight 0.3 here, absent there;",
        f"  order of data sets: {folder}/b, {folder}/a, {folder}/d here, {folder}/a, {folder}/b "
        "there.",
    ]
    with pytest.raises(CheckpointError, match="seed: 99 here, 1234 there"):
        _opened(
            folder, ("b", "a", "d"), (0.4, 0.3, 0.3), 0, seed=99, on_changed_data="continue"
        ).load_state_dict(state)
    other_ids = {**state, "order": {**state["order"], "tokenizer": "other"}}
    with pytest.raises(CheckpointError, match=r"tokenizer: \w+ here, other there"):
        _opened(
            folder, ("b", "a", "d"), (0.4, 0.3, 0.3), 0,
            tokenizer_type="bytes", on_changed_data="continue",
        ).load_state_dict(other_ids)  # fmt: skip
    after = _opened(folder, ("b", "a", "d"), (0.4, 0.3, 0.3), 60, on_changed_data="continue")
    with pytest.warns(UserWarning, match="data sets go on where they were left") as warned:
        after.load_state_dict(state)
    old = {name: before._datasets["train"].children[i] for i, name in enumerate("ab")}
    data, seen = after._datasets["train"], Counter[int]()
    assert len(data) == 64
    names, starts = "bad", {"a": read[0], "b": read[1], "d": 0}
    again = [0, 0, 0]
    for position in range(25, 64):
        sample = data[position]
        number = int(sample["dataset_id"])
        at = starts[names[number]] + seen[number]
        seen[number] += 1
        if names[number] in old and at < len(old[names[number]]):
            expected = old[names[number]][at]["tokens"]
            assert torch.equal(sample["tokens"], expected), position
        again[number] += names[number] in old and at >= len(old[names[number]])
    table = str(warned[0].message).splitlines()[2:]
    assert table == [
        f"{folder}/{name}, {starts[name]}, {seen[i]}, {again[i]}" for i, name in enumerate(names)
    ]
    # The checkpoint of the changed run gives the same samples, without a warning.
    later = _opened(folder, ("b", "a", "d"), (0.4, 0.3, 0.3), 0)
    later.load_state_dict(after.state_dict())
    for position in (25, 40, 63):
        found = later._datasets["train"][position]
        assert torch.equal(found["tokens"], data[position]["tokens"])
    with pytest.raises(DataError, match="sample 3 was read before the data changed"):
        data[3]


def test_changed_data_begin_again(tmp_path: Path) -> None:
    write_blends(tmp_path)
    state = _opened(str(tmp_path), ("a", "b"), (0.3, 0.7), 25).state_dict()
    after = _opened(str(tmp_path), ("b",), (1.0,), 0, on_changed_data="restart")
    with pytest.warns(UserWarning, match="all data sets begin again") as warned:
        after.load_state_dict(state)
    fresh = (
        _opened(str(tmp_path), ("b",), (1.0,), 0, num_train_samples=39)
        ._datasets["train"]
        .children[0]
    )
    assert torch.equal(after._datasets["train"][25]["tokens"], fresh[0]["tokens"])
    lines = str(warned[0].message).splitlines()
    read = {row["prefix"][-1]: row["consumed"] for row in state["datasets"]}
    assert lines[2] == f"{tmp_path}/b, {read['b']}, 39, {read['b']}"
    assert lines[3] == f"{tmp_path}/a, {read['a']}, 0, 0"


def _opened(
    folder: str, names: Sequence[str], weights: Sequence[float], consumed: int, **options: Any
) -> PretrainDataModule:
    """Return a data module in the middle of a fit."""
    pairs = [(weight, f"{folder}/{name}") for name, weight in zip(names, weights, strict=True)]
    data = PretrainDataModule(
        {"train": pairs}, SEQUENCE, 8,
        **{"num_train_samples": 64, "cache_dir": f"{folder}/cache", **options},
    )  # fmt: skip
    data.setup("fit")
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(consumed_samples=consumed),
        lightning_module=None,
    )
    return data


def test_the_index_is_built_before_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_blends(tmp_path)
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
