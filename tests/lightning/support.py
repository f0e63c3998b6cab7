"""Layouts that every behaviour is tried under, and the comparison with plain single-device
Lightning.

A *body* is a module-level function ``body(layout, folder, *args)`` that trains and returns plain
data. It runs on one rank with Lightning's own strategy (``SINGLE``), then on the ranks of a layout
with MegatronStrategy; nothing else differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils._pytree import tree_map_only

from megatron_lightning.layers.styles import ColumnParallel, RowParallel, VocabParallel
from megatron_lightning.parallel import ShardingPlan
from tests.helpers.layouts import GLOBAL_BATCH as GLOBAL_BATCH
from tests.helpers.layouts import Layout as Layout
from tests.helpers.layouts import make_layout as make_layout
from tests.helpers.ranks import run_ranks

# fp32 on other partial sums; AdamW divides by the square root of the second moment, which amplifies
# the last bits of small gradients in the first steps.
TOLERANCE = 1e-5


# torch's own attention cannot be split; everything else of the toy's layers is.
TOY_TABLE = ShardingPlan(
    sequence_dim=1,
    modules={
        "model.embed": VocabParallel(),
        "model.layers.*.linear1": ColumnParallel(),
        "model.layers.*.linear2": RowParallel(),
        "model.head": VocabParallel(gather_output=True),
    },
)
SINGLE = Layout("single", 1, 1, None)
ONE = make_layout("one", 1, 1)
MICRO = make_layout("micro", 1, 1, mbs=2)
PP2 = make_layout("pp2", 2, 1, pp=2, mbs=2)
PP2_WHOLE = make_layout("pp2-whole", 2, 1, pp=2)
TP2 = make_layout("tp2", 2, 1, tp=2)
TP2_DP2 = make_layout("tp2-dp2", 4, 2, tp=2)
TP2_TOY = make_layout("tp2-toy", 2, 1, tp=2, sp=False, sharding_plan=TOY_TABLE)
DP2 = make_layout("dp2", 2, 2)
DP4 = make_layout("dp4", 4, 4)
DDP2 = make_layout("ddp2", 2, 2, dp="ddp")
PP2_DP2 = make_layout("pp2-dp2", 4, 2, pp=2, mbs=2)
TP2_PP2 = make_layout(
    "tp2-pp2",
    4,
    1,
    tp=2,
    pp=2,
    mbs=2,
    sp=False,
    sharding_plan=TOY_TABLE,
)
PP2_DDP2 = make_layout("pp2-ddp2", 4, 2, pp=2, mbs=2, dp="ddp")


def layouts(*usual: Layout, slow: Sequence[Layout] = ()) -> Any:
    """Parametrize a test over layouts; those in ``slow`` are part of the long matrix."""
    params = [pytest.param(layout, id=layout.name) for layout in usual]
    params += [pytest.param(layout, id=layout.name, marks=pytest.mark.slow) for layout in slow]
    return pytest.mark.parametrize("layout", params)


def thinned(rows: Sequence[Sequence[Any]], usual: int = 3) -> list[Any]:
    """Return parameters of a test: every ``usual``-th row; the others are of the long matrix."""
    marks = [() if index % usual == 0 else pytest.mark.slow for index in range(len(rows))]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]


def _body_main(body: Callable[..., Any], *args: Any) -> Any:
    """Tensors would travel as shared memory, which ends with the rank's process: return arrays."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().numpy(), body(*args))


def run(
    layout: Layout,
    body: Callable[..., Any],
    folder: Path | str,
    *args: Any,
    timeout_s: float = 110.0,
) -> list[Any]:
    """Return what ``body`` gives on every rank of ``layout``."""
    ranks = run_ranks(
        layout.ranks, _body_main, body, layout, str(folder), *args, timeout_s=timeout_s
    )
    return tree_map_only(np.ndarray, torch.from_numpy, ranks)


@lru_cache(maxsize=64)
def single(body: Callable[..., Any], *args: Any) -> Any:
    """Return what ``body`` gives on one device under plain Lightning, computed once."""
    with tempfile.TemporaryDirectory() as folder:
        return run(SINGLE, body, folder, *args)[0]


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE, where: str = "") -> None:
    """Compare nested plain data; numbers with a relative tolerance."""
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_close(actual[key], expected[key], tolerance, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {actual} != {expected}"
        for index, item in enumerate(expected):
            assert_close(actual[index], item, tolerance, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, float) and not isinstance(actual, str):
        assert actual == pytest.approx(expected, rel=tolerance, abs=1e-7), where
    else:
        assert actual == expected, where


def mean_over_ranks(results: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each number over the ranks."""
    return [sum(values) / len(values) for values in zip(*results, strict=True)]


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """Return callback_metrics as plain numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Lines(pl.loggers.Logger):
    """Values that a logger receives, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        """Nothing is kept of them."""

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


class History(pl.Callback):
    """The three kinds of metrics that a Trainer offers, as they stand after each batch and
    epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, float]]] = []

    def _note(self, trainer: pl.Trainer, *_: Any) -> None:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        self.seen.append(
            {kind: {k: float(v) for k, v in getattr(trainer, kind).items()} for kind in kinds}
        )

    on_train_batch_end = on_validation_end = on_train_epoch_end = _note
