"""Layers compiled one by one train as uncompiled ones do, under every schedule, with recomputation
and tensor parallelism.

``aot_eager`` traces, differentiates and partitions as ``inductor`` does, and runs the kernels of
eager mode; ``inductor`` writes kernels of its own. Both round otherwise than uncompiled layers,
whose norms, rotations and SwiGLU are operations of their own. Losses and gradient norms: 1e-6
relative, rounding of fp32 (at most 1.3e-7 was seen).
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE, losses_of, small_gpt
from tests.helpers.ranks import run_ranks

OPTIONS: dict[str, RecomputeOptions | None] = {
    **RECOMPUTE,
    "uniform-1": RecomputeOptions(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}
PP, TP, VPP = (f"{axis}_model_parallel_size" for axis in ("pipeline", "tensor", "virtual_pipeline"))
MICRO = {"micro_batch_size": 1}


class _Module(GPTLightningModule):
    """Compiles each layer, as a user would."""

    backend: str | None = None

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.decoder.layers.values():
            if self.backend is not None and layer._compiled_call_impl is None:
                layer.compile(backend=self.backend)


class _Graphs(pl.Callback):
    """Counts what was compiled."""

    def on_train_end(self, *_: Any) -> None:
        counters = torch._dynamo.utils.counters
        self.count, self.breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        counters.clear()
        torch._dynamo.reset()


def _train(
    layout: dict[str, Any], kind: str, backend: str | None, dropout: float, layers: int
) -> tuple[tuple[list[float], list[float], float], tuple[int, dict[str, int]]]:
    pl.seed_everything(3, verbose=False)
    module, graphs = (
        _Module(small_gpt(layers, dropout, add_bias_linear=True), learning_rate=1e-3),
        _Graphs(),
    )
    module.backend = backend
    strategy = MegatronStrategy(recompute=OPTIONS[kind], **layout) if layout else "auto"
    return losses_of(module, strategy, [graphs]), (graphs.count, graphs.breaks)


def _compare(
    layout: dict[str, Any], kinds: list[str], backend: str, dropout: float, layers: int
) -> list[Any]:
    expected, _ = _train(layout, "none", None, dropout, layers)
    return [(kind, expected, *_train(layout, kind, backend, dropout, layers)) for kind in kinds]


ZB_H1 = {PP: 2, "pipeline_schedule": "zb-h1", **MICRO}
ZBV = {PP: 2, VPP: 2, "pipeline_schedule": "zbv", **MICRO}
ONE_F_ONE_B = {PP: 2, "pipeline_schedule": "1f1b", **MICRO}
INTERLEAVED = {PP: 2, VPP: 2, "pipeline_schedule": "interleaved", **MICRO}
OWN_TABLE = {"pipeline_schedule": ["0F0 0F1 0I0 0I1 0W0 0W1 0F2 0B2 0F3 0I3 0W3"], **MICRO}


SLOW = [
    ("one-device", 1, {}),
    ("own-table", 1, OWN_TABLE),
    ("tp2", 2, {TP: 2, "sequence_parallel": False}),
    *(
        (str(layout["pipeline_schedule"]), 2, layout)
        for layout in (ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV)
    ),
    *(
        (f"tp2-{layout['pipeline_schedule']}", 4, {**layout, TP: 2})
        for layout in (ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV)
    ),
]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("world", "layout", "kinds", "layers"),
    [
        *(
            pytest.param(world, layout, list(OPTIONS), 4, id=name, marks=pytest.mark.slow)
            for name, world, layout in SLOW
        ),
    ],
)
def test_compiled_layers_train_as_plain_ones(
    world: int, layout: dict[str, Any], kinds: list[str], layers: int
) -> None:
    for results in run_ranks(
        world, _compare, layout, kinds, "aot_eager", 0.0, layers, timeout_s=400
    ):
        for kind, expected, actual, (graphs, breaks) in results:
            for values, wanted in zip(actual, expected, strict=True):
                assert values == pytest.approx(wanted, rel=1e-6), kind
            assert graphs > 0 and not breaks, kind


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("layout", [{}, OWN_TABLE], ids=["one-device", "own-table"])
def test_inductor_trains_as_eager_mode_does(layout: dict[str, Any]) -> None:
    kinds = list(OPTIONS) if layout else ["none"]
    for kind, expected, actual, (graphs, breaks) in run_ranks(
        1, _compare, layout, kinds, "inductor", 0.0, 2, timeout_s=400
    )[0]:
        for values, wanted in zip(actual, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-6), kind
        assert graphs > 0 and not breaks, kind
