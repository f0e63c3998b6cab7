"""``compile="block"`` with every other feature: a compiled training equals the same uncompiled one
on the same layout, in a known number of graphs.

The backend is ``aot_eager``, which traces and differentiates as ``inductor`` does and runs eager
kernels. Losses and norms: 1e-5 relative, as in ``test_compiled``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest

from megatron_lightning.config import CompileOptions, LatentAttentionConfig, MoEConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.language_model import RECOMPUTE, losses_of, small_gpt
from tests.helpers.ranks import run_ranks
from tests.parity.test_compiled import INTERLEAVED, ONE_F_ONE_B, TP, ZBV, _Graphs

EP, ETP, LAYERS = "expert_model_parallel_size", "expert_tensor_parallel_size", 4
GLOBAL = {"router_load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.1}
SHARED = {"shared_expert_intermediate_size": 16, "shared_expert_gate": True}
CAPACITY = {"expert_capacity_factor": 1.0}


def _experts(**options: Any) -> dict[str, Any]:
    return {"moe": MoEConfig(num_experts=4, **{"aux_loss_coeff": 0.1, **options})}


@dataclass(frozen=True)
class Case:
    """A training, and how its blocks are compiled."""

    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    dropout: float = 0.0
    trainer: dict[str, Any] = field(default_factory=dict)
    graphs: int = 2
    """Of training and validation."""
    breaks: int = 0
    """Places where a graph ends, once for each of the two."""
    band: float = 1e-5


# Norm and attention, router, experts, the sum; once more with other numbers of rows.
ALONE = {"graphs": 8, "breaks": 2}
CASES: dict[str, Case] = {
    "experts": Case(model=_experts(), **ALONE),
    "experts-ep2": Case(2, {EP: 2}, _experts(), graphs=9, breaks=2),
    "experts-shared": Case(model=_experts(**SHARED), graphs=10, breaks=2),
    "experts-capacity": Case(model=_experts(**CAPACITY), graphs=9, breaks=2),
    "experts-global": Case(2, {EP: 2}, _experts(**GLOBAL), graphs=12, breaks=3),
    "experts-gather": Case(
        2, {EP: 2}, _experts(token_dispatcher_type="allgather"), graphs=9, breaks=2
    ),
    "experts-tp2": Case(2, {TP: 2}, _experts(), graphs=8, breaks=2),
    "experts-ep2-pp2": Case(4, {EP: 2, **ONE_F_ONE_B}, _experts(), graphs=9, breaks=2),
    "experts-ep2-zbv": Case(4, {EP: 2, **ZBV}, _experts(), graphs=9, breaks=2),
    "experts-recompute": Case(2, {EP: 2}, _experts(), "uniform", graphs=9, breaks=2),
    # Layers that are recomputed and layers that are not have a graph each.
    "experts-recompute-block": Case(2, {EP: 2}, _experts(), "block", graphs=9, breaks=4),
    # A graph cannot hold a checkpoint of them: the tries count, and do not grow with the layers.
    "experts-recompute-mlp": Case(2, {EP: 2}, _experts(), "selective", graphs=9, breaks=15),
    "latent": Case(
        model={"mla": LatentAttentionConfig(
            q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
        )},
    ),
    "vpp": Case(2, INTERLEAVED),
    "vpp-recompute": Case(2, INTERLEAVED, recompute="uniform"),
    "bf16": Case(trainer={"precision": "bf16-mixed"}, band=1e-2),
    "bf16-tp2-pp2": Case(4, {TP: 2, **ONE_F_ONE_B}, trainer={"precision": "bf16-mixed"}, band=1e-2),
    "dropout": Case(dropout=0.2),
    "dropout-recompute": Case(dropout=0.2, recompute="uniform"),
    # The first layer of each stage is recomputed.
    "dropout-recompute-block": Case(dropout=0.2, recompute="block", graphs=4),
    "dropout-tp2": Case(2, {TP: 2}, {"attention_dropout": 0.0}, dropout=0.2),
    "dropout-tp2-recompute": Case(2, {TP: 2}, {"attention_dropout": 0.0}, "uniform", 0.2),
    "dropout-tp2-recompute-block": Case(
        2, {TP: 2}, {"attention_dropout": 0.0}, "block", 0.2, graphs=4
    ),
    "dropout-tp2-attention": Case(2, {TP: 2}, dropout=0.2, graphs=8, breaks=4),
    "fsdp": Case(2, {"data_parallel": "fsdp"}),
    "fp8": Case(trainer={"plugins": "fp8"}, band=5e-2),
    "fp8-tp2": Case(2, {TP: 2}, trainer={"plugins": "fp8"}, band=5e-2),
}  # fmt: skip
FAST = ["experts-ep2"]


def _train(case: Case, compiled: bool) -> Any:
    pl.seed_everything(3, verbose=False)
    config = small_gpt(LAYERS, case.dropout, **case.model)
    module = GPTLightningModule(config, learning_rate=1e-3)
    graphs, options = _Graphs(), dict(case.trainer)
    if "plugins" in options:
        recipe = FP8Recipe(scaling="delayed", stochastic_rounding=False)
        options["plugins"] = [MegatronFP8Precision(recipe=recipe, backend="emulation")]
    compile = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
    strategy = MegatronStrategy(
        recompute=RECOMPUTE[case.recompute], **case.layout, **(compile if compiled else {})
    )
    results = losses_of(module, strategy, [graphs], **options)
    return results, graphs.count, graphs.breaks


def _compare(case: Case) -> list[Any]:
    return [_train(case, compiled) for compiled in (False, True)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_compiled_blocks_train_as_plain_ones(name: str) -> None:
    case = CASES[name]
    for plain, (compiled, graphs, breaks) in run_ranks(case.ranks, _compare, case, timeout_s=280):
        for values, expected in zip(compiled, plain[0], strict=True):
            assert values == pytest.approx(expected, rel=case.band)
        assert (graphs, sum(breaks.values())) == (case.graphs, case.breaks), breaks
