"""Checkpoints of the GPT across layouts: stop anywhere, resume in any other layout, on plain
Lightning or from plain Lightning.

Every tensor is exact: what the new layout has loaded is saved again, and both checkpoints hold the
same bits. So the losses after the change differ from the uninterrupted run only by the layouts'
order of summation: 1e-5 relative, as in test_layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import GradientNormMonitor
from megatron_lightning.checkpoint import consolidate, plain_file, read_full
from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim.class_names import CLASSES
from megatron_lightning.strategies import (
    MegatronMixedPrecision,
    MegatronStrategy,
    ShardedCheckpointIO,
)
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, precision_options, trainer

STEPS, STOP, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 6, 3, 8, 8, 30
RTOL = 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (1, None),  # Lightning's own strategy
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "dp4": (4, {}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),  # more ranks than query groups
    "tp2-pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 4},
    ),
    "tp2-pp2-dp2": (
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    ),
    "pp2-fsdp2": (
        4,
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "data_parallel": "fsdp"},
    ),
    "tp2-fsdp2": (4, {"tensor_model_parallel_size": 2, "data_parallel": "fsdp"}),
    "pp2-vpp2": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 2,
        },
    ),
    "pp2-zbv-cut": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 2,
            "pipeline_schedule": "zbv",
            "pipeline_options": PipelineOptions(pipeline_model_parallel_layout="E|ttt|t|L"),
        },
    ),
    "pp4-ddp2": (
        8,
        {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "data_parallel": "ddp"},
    ),
}
SCALE = MegatronMixedPrecision.__qualname__
"""Key of the loss scale in a checkpoint."""
Run = list[list[float]]
"""The losses of a rank and the gradient norms, equal on all ranks, of the steps taken."""
Case = TypeVar("Case", bound=Hashable)


def _module(tied: bool) -> GPTLightningModule:
    config = tiny_config(
        num_layers=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    return GPTLightningModule(config, learning_rate=3e-3, warmup_steps=2, decay_steps=20)


def _loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    return DataLoader(
        [{"tokens": t[:-1], "labels": t[1:]} for t in text], batch_size=batch_size, shuffle=True
    )


class _SaveAgain(pl.Callback):
    """Saves what was loaded, before anything is computed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _fit(
    layout: str,
    tied: bool,
    precision: str,
    *,
    checkpoint: str | None = None,
    again: str | None = None,
    folder: str | None = None,
) -> Run:
    """Train from the beginning or a checkpoint, which is saved once more as ``again``."""
    pl.seed_everything(5, verbose=False)
    world, options = LAYOUTS[layout]
    record = Losses()
    callbacks: list[pl.Callback] = [record]
    if again is not None:
        callbacks.append(_SaveAgain(again))
    if folder is not None:
        callbacks.append(
            ModelCheckpoint(
                dirpath=folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1
            )
        )
    sizes = options or {}
    fit = trainer(
        "auto" if options is None else MegatronStrategy(**options),
        max_epochs=1,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        enable_checkpointing=folder is not None,
        **(
            {"plugins": [ShardedCheckpointIO()]}
            if options is None
            else precision_options(precision)
        ),
    )
    replicas = world // math.prod(
        sizes.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline")
    )
    fit.fit(_module(tied), _loader(GLOBAL_BATCH // replicas), ckpt_path=checkpoint)
    return [record.losses, record.norms]


def _content(path: Path) -> dict[str, Any]:
    """Return weights, optimizer state and progress of a checkpoint, a directory or a plain file."""
    whole = read_full(path) if path.is_dir() else torch.load(path, weights_only=True)
    for state in whole["optimizer_states"]:
        state.pop(CLASSES, None)  # which plain Lightning does not write
    return {
        key: whole[key]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", SCALE)
        if key in whole
    }


def _assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values to the bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            _assert_same(*pair, f"{where}[{i}]")
    else:
        is_tensor = isinstance(expected, torch.Tensor)
        same = (
            found.dtype == expected.dtype and torch.equal(found, expected)
            if is_tensor
            else found == expected
        )
        assert same, f"{where}: {found} and {expected}"


def _means(ranks: list[Run]) -> list[float]:
    """Return the mean of each step's loss over the ranks, each of which has its share of the
    batch."""
    return [sum(step) / len(step) for step in zip(*(losses for losses, _ in ranks), strict=True)]


def _check(pairs: Sequence[tuple[str, str]], folder: Path, precision: str = "32-true") -> None:
    """Save once under each layout and resume under the others; ranks are started once for layouts
    of the same size."""
    sources = list(dict.fromkeys(saved for saved, _ in pairs))
    whole: dict[str, list[Run]] = {}
    for world, names in _by_world(sources, key=str).items():
        whole |= _over_ranks(
            names, run_ranks(world, _save_each, names, str(folder), precision, timeout_s=300)
        )
    restarted = lru_cache(partial(_restarted, folder))
    for world, batch in _by_world(pairs, key=lambda pair: pair[1]).items():
        rest = _over_ranks(
            batch, run_ranks(world, _load_each, batch, str(folder), precision, timeout_s=300)
        )
        for saved, loaded in batch:
            path = folder / saved / f"step={STOP}.ckpt"
            _assert_same(_content(Path(f"{path}.{loaded}")), _content(path), f"{saved} to {loaded}")
            if precision == "32-true":  # others round sums that layouts take in another order
                has_position = "plain" not in (saved, loaded)
                expected = (
                    [[x[STOP:] for x in rank] for rank in whole[saved]]
                    if has_position
                    else restarted(_is_tied(saved))
                )
                _assert_continued(rest[saved, loaded], expected)


def _assert_continued(rest: list[Run], whole: list[Run]) -> None:
    assert len(whole[0][1]) == STEPS - STOP
    assert _means(rest) == pytest.approx(_means(whole), rel=RTOL)
    for _, norms in rest:
        assert norms == pytest.approx(whole[0][1], rel=RTOL)


def _restarted(folder: Path, tied: bool) -> list[Run]:
    """Resume as plain Lightning does, which does not know the position in the data: from the
    beginning of the epoch."""
    run_ranks(1, _save, "plain", tied, f"{folder}/tied={tied}")
    return run_ranks(1, _load, "plain", tied, f"{folder}/tied={tied}/step={STOP}.ckpt", "again")


def _is_tied(saved: str) -> bool:
    """Whether a layout saves a model whose output layer is its embedding: every second one does."""
    return list(LAYOUTS).index(saved) % 2 == 0


def _by_world(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[int, list[Case]]:
    found: dict[int, list[Case]] = {}
    for case in cases:
        found.setdefault(LAYOUTS[key(case)][0], []).append(case)
    return found


def _over_ranks(cases: Sequence[Case], ranks: Sequence[Sequence[Run]]) -> dict[Case, list[Run]]:
    """Turn each rank's runs into each case's runs by rank."""
    return {case: [runs[i] for runs in ranks] for i, case in enumerate(cases)}


def _save_each(names: list[str], folder: str, precision: str) -> list[Run]:
    return [_save(name, _is_tied(name), f"{folder}/{name}", precision) for name in names]


def _load_each(pairs: list[tuple[str, str]], folder: str, precision: str) -> list[Run]:
    paths = [f"{folder}/{saved}/step={STOP}.ckpt" for saved, _ in pairs]
    return [
        _load(b, _is_tied(a), path, b, precision) for (a, b), path in zip(pairs, paths, strict=True)
    ]


def _save(layout: str, tied: bool, folder: str, precision: str = "32-true") -> Run:
    return _fit(layout, tied, precision, folder=folder)


def _load(layout: str, tied: bool, checkpoint: str, again: str, precision: str = "32-true") -> Run:
    return _fit(layout, tied, precision, checkpoint=checkpoint, again=f"{checkpoint}.{again}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ring",
    [
        ["plain", "tp2", "pp2-zbv-cut", "plain"],
        ["pp2-zbv-cut", "tp2-fsdp2", "plain"],
    ],
    ids=" ".join,
)
def test_training_resumes_in_another_layout(ring: list[str], tmp_path: Path) -> None:
    """Every kind of split saves and loads; the long matrix has every pair."""
    _check([*pairwise(ring)], tmp_path)


@pytest.mark.slow  # test_precision and test_optim_parity check main params of one layout each
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("precision", "every"),
    [(precision, 4) for precision in ("bf16-true", "16-true", "16-mixed", "bf16-mixed")],
)
def test_masters_and_the_loss_scale_are_exact_in_another_layout(
    precision: str, every: int, tmp_path: Path
) -> None:
    names = [name for name in LAYOUTS if name != "plain"]
    pairs = [
        pair
        for i, pair in enumerate(product(names, names))
        if i % every == 1 and pair[0] != pair[1]
    ]
    _check(pairs, tmp_path, precision)
    for saved, _ in pairs:
        whole = read_full(tmp_path / saved / f"step={STOP}.ckpt")
        assert all(
            "master" in state for state in whole["optimizer_states"][0]["state"].values()
        ) == precision.endswith("16-true")
        assert (SCALE in whole) == (precision == "16-mixed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_training_resumes_in_every_layout(saved: str, tmp_path: Path) -> None:
    _check([(saved, loaded) for loaded in LAYOUTS], tmp_path)


@pytest.mark.slow
def test_consolidated_checkpoint_loads_into_the_module(tmp_path: Path) -> None:
    run_ranks(2, _save, "pp2", True, str(tmp_path), timeout_s=100)
    path = tmp_path / f"step={STOP}.ckpt"
    consolidate(path, tmp_path / "whole.ckpt")
    with plain_file(path) as file:
        for source in (tmp_path / "whole.ckpt", file):
            module = GPTLightningModule.load_from_checkpoint(source)
            assert module.model.output_layer.weight is module.model.embedding.word_embeddings.weight
            assert not torch.equal(
                module.model.output_layer.weight, _whole_at_start().model.output_layer.weight
            )
            _assert_same(dict(module.state_dict()), read_full(path)["state_dict"])


def _whole_at_start() -> GPTLightningModule:
    module = _module(tied=True)
    module.configure_model()
    return module


def _monitored(options: dict[str, Any] | None) -> float:
    fit = trainer(
        "auto" if options is None else MegatronStrategy(**options),
        max_steps=1,
        callbacks=[GradientNormMonitor()],
    )
    fit.fit(_module(tied=True), _loader(GLOBAL_BATCH))
    return float(fit.callback_metrics["grad_norm"])


def test_gradient_norm_monitor_sees_one_norm() -> None:
    expected = run_ranks(1, _monitored, None)[0]
    options = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert run_ranks(4, _monitored, options) == pytest.approx([expected] * 4, rel=RTOL)
