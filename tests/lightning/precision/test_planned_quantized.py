"""Weights that are kept as quantized data of 8 bits: what a plan counts is what ranks hold
between steps.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.live_bytes import LiveBytes
from megatron_lightning.config import LatentAttentionConfig, MoEConfig
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning import memory
from megatron_lightning.planning.ledger.quantized_weights import count_quantized
from megatron_lightning.planning.ledger.rank_parameters import (
    ParameterCount,
    count_rank,
    pipeline_units,
)
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.parity.test_planned_memory import Rows

MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 128, "num_query_groups": 2,
    "vocab_size": 512, "ffn_hidden_size": 256, "max_sequence_length": 256,
}  # fmt: skip
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LATENT = LatentAttentionConfig(
    q_lora_rank=48, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
)
EXPERTS = MoEConfig(num_experts=4, ffn_hidden_size=96, shared_expert_intermediate_size=64)
ENDS = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}


class Case(NamedTuple):
    """One training; ranks that are not in the layout are data-parallel."""

    world_size: int
    layout: dict[str, Any]
    model: dict[str, Any]
    recipe: dict[str, Any]
    data_parallel: Any = "zero1"


CASES = {
    "zero1": Case(2, {}, {}, {}),
    "fsdp": Case(2, {}, {}, {}, "fsdp"),
    "one rank": Case(1, {}, {}, {}),
    "tensor": Case(4, TENSOR, {}, ENDS),
    "pipeline": Case(4, PIPELINE, {"mtp_num_layers": 1}, {"modules": {"**.linear_proj": "bf16"}}),
    "latent": Case(2, {}, {"mla": LATENT, "num_query_groups": None}, {"scaling": "current"}),
    "experts": Case(4, {"expert_model_parallel_size": 2}, {"moe": EXPERTS}, {}),
    "experts, fsdp": Case(4, {"expert_model_parallel_size": 2}, {"moe": EXPERTS}, {}, "fsdp"),
}


class Held(pl.Callback):
    """Bytes that a rank holds before the second batch."""

    def __init__(self) -> None:
        self.num_codes = self.num_bytes = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 1:
            return
        self.num_codes = sum(p.numel() for p in module.parameters() if is_quantized(p.dtype))
        gc.collect()
        watch = LiveBytes()
        watch.see(
            *(
                x
                for x in gc.get_objects()
                if isinstance(x, Tensor) and x.device.type == "cpu" and not _is_beside(x)
            )
        )
        self.num_bytes = watch.live_bytes


def _is_beside(x: Tensor) -> bool:
    """Return whether a tensor wraps others, or is a generator's state: streams have some, and the
    point where a checkpoint resumes keeps those of the last update."""
    is_state = x.dtype == torch.uint8 and x.shape == torch.get_rng_state().shape
    return hasattr(x, "_local_tensor") or is_state


def _train(case: Case) -> tuple[int, int]:
    """Return the codes and bytes of this rank."""
    held = Held()
    recipe = FP8Recipe(fp8_param_gather=True, **case.recipe)
    fit = trainer(
        MegatronStrategy(data_parallel=case.data_parallel, micro_batch_size=1, **case.layout),
        max_steps=2,
        plugins=[MegatronFP8Precision(recipe, backend="emulation")],
        callbacks=[held],
    )
    config = tiny_config(**MODEL | case.model)
    fit.fit(GPTLightningModule(config), DataLoader(Rows(config.vocab_size), batch_size=2))
    return held.num_codes, held.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_the_planned_codes(name: str) -> None:
    case = CASES[name]
    config, layout = tiny_config(**MODEL | case.model), ParallelLayout(**case.layout)
    recipe = FP8Recipe(fp8_param_gather=True, **case.recipe)
    planned = memory(
        config, layout, world_size=case.world_size, num_microbatches=2, precision="bf16-mixed",
        fp8_recipe=recipe, data_parallel=case.data_parallel, device="cpu",
    )  # fmt: skip
    results = run_ranks(case.world_size, _train, case, timeout_s=120)
    units = [unit if isinstance(unit, str) else unit[0] for unit in pipeline_units(config)]
    in_units = [count_quantized(config, layout, unit, recipe) for unit in units]
    coded = sum(in_units, ParameterCount())
    ends = {rank: results[rank] for rank in (0, case.world_size - 1)}
    if case.data_parallel == "zero1":
        # Each pipeline rank has its own; tensor shards and experts are equally many on every rank.
        found = sum(ends[rank][0] for rank in (ends if layout.pp > 1 else (0,)))
        assert found == (coded.total if case.world_size > 1 else 0)
    for rank, (_, num_bytes) in ends.items():
        row = planned.ranks[rank * layout.pp // case.world_size]
        held = row.weights_bytes + row.gradients_bytes + row.optimizer_bytes
        if case.data_parallel == "fsdp":  # which has gathered nothing now
            count = count_rank(config, layout, [units])
            gathered = 4 * (count.total - coded.total) + coded.total
            own = 4 * _share(count, case) + _share(coded, case)
            assert row.weights_bytes == gathered + own
            held = own + row.optimizer_bytes + 4 * _share(count, case)
        # Beside them lie batches, counters, scales and the padding of buckets.
        assert num_bytes - 100_000 <= held <= num_bytes, (rank, row)


def _share(count: ParameterCount, case: Case) -> float:
    """Return what one of the ranks that share parameters has of them."""
    num_ranks = case.world_size
    num_expert_ranks = num_ranks // case.layout.get("expert_model_parallel_size", 1)
    return count.dense / num_ranks + count.experts / num_expert_ranks
