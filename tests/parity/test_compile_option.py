"""``compile="block"`` trains as uncompiled blocks do, in one graph a mode.

``aot_eager`` traces and differentiates as ``inductor`` does and runs eager kernels. Losses and
norms: 1e-6 relative, rounding of fp32 (rotary embeddings are computed by another formula in a
graph), at a learning rate where two steps of AdamW amplify it little.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from megatron_lightning.assembly.compile import compile_blocks, is_compiled
from megatron_lightning.assembly.part import describe_part
from megatron_lightning.config import CompileOptions, PipelineOptions, RecomputeOptions
from megatron_lightning.layers.losses.linear_loss import TakesLoss
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE, losses_of, small_gpt
from tests.helpers.ranks import run_ranks
from tests.parity.test_compiled import PP, TP, ZBV, _Graphs

LAYERS = 10
"""More than the 8 graphs at which torch stops, if blocks did not share them."""


def _train(layout: dict[str, Any], recompute: RecomputeOptions | None, compiled: bool) -> Any:
    pl.seed_everything(3, verbose=False)
    module, graphs = GPTLightningModule(small_gpt(LAYERS), learning_rate=1e-4), _Graphs()
    options: dict[str, Any] = {}
    if compiled:
        options = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
    strategy = MegatronStrategy(recompute=recompute, **layout, **options)
    results = losses_of(module, strategy, [graphs])
    assert not any("compile" in name or "_orig_mod" in name for name in module.state_dict())
    assert not any(is_compiled(child) for child in module.modules())  # after the run
    return results, graphs.count, graphs.breaks


def _compare(layout: dict[str, Any], recompute: RecomputeOptions | None) -> list[Any]:
    return [_train(layout, recompute, compiled)[:3] for compiled in (False, True)]


@pytest.mark.parametrize(
    ("world", "layout", "kind"),
    [
        pytest.param(1, {}, "selective", id="selective"),
        pytest.param(2, {TP: 2}, "none", id="tp2", marks=pytest.mark.slow),
        pytest.param(2, {"context_parallel_size": 2}, "none", id="cp2", marks=pytest.mark.slow),
        pytest.param(4, {**ZBV, TP: 2}, "none", id="tp2-zbv", marks=pytest.mark.slow),
        pytest.param(4, {TP: 2, PP: 2, "micro_batch_size": 1}, "none", id="tp2-pp2",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_compiled_blocks_train_as_plain_ones(world: int, layout: dict[str, Any], kind: str) -> None:
    for plain, compiled in run_ranks(world, _compare, layout, RECOMPUTE[kind], timeout_s=200):
        (losses, norms, val), (expected, expected_norms, expected_val) = compiled[0], plain[0]
        assert losses == pytest.approx(expected, rel=1e-6)
        assert val == pytest.approx(expected_val, rel=1e-6)
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert compiled[1] == 2 and not compiled[2]  # training and validation


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_only_inductor_writes_kernels_of_the_loss(backend: str) -> None:
    module = GPTModel(small_gpt(2))
    part = describe_part(module, tuple(module.state_dict()), 0, None, None)
    compile_blocks(module, part, PipelineOptions(), CompileOptions(backend=backend))
    heads = [child for child in module.modules() if isinstance(child, TakesLoss)]
    assert [head.compiles_loss for head in heads] == [backend == "inductor"]
