"""Layers compiled one by one train as uncompiled ones do, under every schedule, with recomputation and tensor parallelism.

``aot_eager`` traces, differentiates and partitions as ``inductor`` does, and runs the kernels of eager mode: equal numbers are
summed in an equal order, and losses and norms are bit-equal. ``inductor`` writes kernels of its own, which round otherwise.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, SEQUENCE, VOCABULARY = 2, 4, 8, 30
OPTIONS: dict[str, RecomputeOptions | None] = {
    "none": None,
    "uniform": RecomputeOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "uniform-1": RecomputeOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": RecomputeOptions(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "selective": RecomputeOptions(recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]),
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
    config = TransformerConfig(
        num_layers=layers, hidden_size=32, num_attention_heads=4, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        init_method_std=0.1, hidden_dropout=dropout, attention_dropout=dropout, add_bias_linear=True,
    )  # fmt: skip
    text = torch.randint(0, VOCABULARY, (STEPS * 2 * BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    record, graphs = Losses(), _Graphs()
    fit = trainer(
        MegatronStrategy(recompute=OPTIONS[kind], **layout) if layout else "auto",
        max_steps=STEPS,
        callbacks=[record, graphs],
        gradient_clip_val=1.0,
        limit_val_batches=1,
        val_check_interval=1,
    )
    module = _Module(config, learning_rate=1e-2)
    module.backend = backend
    fit.fit(module, DataLoader(rows, batch_size=BATCH), DataLoader(rows, batch_size=BATCH))
    return (record.losses, record.norms, float(fit.callback_metrics["val_loss"])), (graphs.count, graphs.breaks)


def _compare(layout: dict[str, Any], kinds: list[str], backend: str, dropout: float, layers: int) -> list[Any]:
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
    *((str(layout["pipeline_schedule"]), 2, layout) for layout in (ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV)),
    *((f"tp2-{layout['pipeline_schedule']}", 4, {**layout, TP: 2}) for layout in (ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV)),
]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("world", "layout", "kinds", "layers"),
    [
        pytest.param(2, ZB_H1, ["selective"], 2, id="short"),
        *(pytest.param(world, layout, list(OPTIONS), 4, id=name, marks=pytest.mark.slow) for name, world, layout in SLOW),
    ],
)
def test_compiled_layers_train_as_plain_ones(world: int, layout: dict[str, Any], kinds: list[str], layers: int) -> None:
    for results in run_ranks(world, _compare, layout, kinds, "aot_eager", 0.0, layers, timeout_s=400):
        for kind, expected, actual, (graphs, breaks) in results:
            assert actual == expected, kind
            assert graphs > 0 and not breaks, kind


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("layout", [{}, OWN_TABLE], ids=["one-device", "own-table"])
def test_inductor_trains_as_eager_mode_does(layout: dict[str, Any]) -> None:
    """1e-5 relative: fp32 sums in another order, which two steps of AdamW amplify a little."""
    kinds = list(OPTIONS) if layout else ["none"]
    for kind, expected, actual, (graphs, breaks) in run_ranks(1, _compare, layout, kinds, "inductor", 0.0, 2, timeout_s=400)[0]:
        for values, wanted in zip(actual, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-5), kind
        assert graphs > 0 and not breaks, kind
