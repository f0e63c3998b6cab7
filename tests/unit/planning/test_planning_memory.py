"""Parameters, states and activations of a plan: counted on models that hold nothing, and against
closed formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning import planning
from megatron_lightning.assembly.plans import find_plans
from megatron_lightning.config import (
    DataParallelOptions,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    RecomputeOptions,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses import linear_loss
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import named_shard_specs, parallelize
from megatron_lightning.planning.ledger.layer_tapes import chunk_tokens
from megatron_lightning.planning.ledger.rank_parameters import count_rank
from megatron_lightning.planning.ledger.tape import Operation, Segment, profile
from megatron_lightning.planning.memory import Memory
from tests.helpers.layouts import tiny_config

SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 2,
    "vocab_size": 1001, "ffn_hidden_size": 160, "max_sequence_length": 2048,
}  # fmt: skip
LATENT = LatentAttentionConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)
DELTA = DeltaNetConfig(num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=8)
DIVIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp 2": ({}, {"tensor_model_parallel_size": 2}),
    "tp above the groups": (
        {"add_bias_linear": True, "normalization": "LayerNorm", "activation": "gelu",
         "position_embedding_type": "learned_absolute", "qk_layernorm": True,
         "attention_output_gate": True},
        {"tensor_model_parallel_size": 4},
    ),
    "norms over all heads": (
        {"qk_layernorm": True, "qk_layernorm_per_head": False},
        {"tensor_model_parallel_size": 2},
    ),
    "tied": (
        {"share_embeddings_and_output_weights": True, "add_qkv_bias": True},
        {"tensor_model_parallel_size": 2},
    ),
    "experts": (
        {"moe": MoEConfig(num_experts=4, ffn_hidden_size=96, shared_expert_intermediate_size=32,
                          shared_expert_gate=True, layer_freq=2)},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
    "experts in latents": (
        {"moe": MoEConfig(num_experts=4, latent_size=24, shared_expert_intermediate_size=32)},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
    "gated delta net": (
        {"delta_net": DELTA, "linear_attention_freq": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    ),
    "latent attention": (
        {"num_query_groups": None, "mla": LATENT, "qk_layernorm": True,
         "moe": MoEConfig(num_experts=4)},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4,
         "expert_tensor_parallel_size": 1},
    ),
    "Mamba-2": (
        {"layer_pattern": ["mamba"] * SIZES["num_layers"],
         "mamba": MambaConfig(num_groups=2, head_dim=8)},
        {"tensor_model_parallel_size": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_parameters_are_those_of_the_divided_model(name: str) -> None:
    options, sizes = DIVIDED[name]
    config, layout = tiny_config(**SIZES | options), ParallelLayout(**sizes)
    with torch.device("meta"):
        model = GPTModel(config)
    context = ParallelContext(layout, planned_world_size=8)
    for path, plan in find_plans(model, None, layout.tp, layout.cp).items():
        parallelize(model.get_submodule(path), context, plan, is_full=False)
    specs = named_shard_specs(model)
    sizes_of = {parameter_name: p.numel() for parameter_name, p in model.named_parameters()}
    count = count_rank(config, layout, [pipeline_units(config)])
    assert count.total == sum(sizes_of.values())
    assert count.experts == sum(n for key, n in sizes_of.items() if specs[key].is_expert)


def test_states_follow_the_table() -> None:
    config, layout = tiny_config(**SIZES), ParallelLayout()
    n = num_parameters(config)

    def states(mode: Any, precision: str = "bf16-true", **options: Any) -> list[float]:
        data = DataParallelOptions(**options)
        found = planning.memory(
            config, layout, world_size=4, num_microbatches=2, data_parallel=mode,
            data_parallel_options=data, precision=precision,
        )  # fmt: skip
        sizes = (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes)
        return [round(size / n, 3) for size in sizes]

    assert states("ddp") == [2, 4, 12]
    assert states("zero1") == [2, 4, 3]
    assert states("zero1", num_distributed_optimizer_instances=2) == [2, 4, 6]
    assert states("zero1", optimizer_cpu_offload=True) == [2, 4, 0]
    assert states("zero1", moments_dtype="bf16") == [2, 4, 2]
    assert states("zero1", "32-true") == states("zero1", "bf16-mixed") == [4, 4, 2]
    assert states("fsdp") == [1 + 2, 4, 2]
    largest = SIZES["vocab_size"] * SIZES["hidden_size"] / n
    resharding = states("fsdp", reshard_after_forward=True, reduce_every_microbatch=True)
    assert resharding == pytest.approx([1 + 4 * largest, 1 + 4 * largest, 2], abs=1e-3)


def test_experts_are_sharded_over_their_own_ranks() -> None:
    config = tiny_config(**SIZES, moe=MoEConfig(num_experts=4))
    layout = ParallelLayout(expert_model_parallel_size=2)
    count = count_rank(config, layout, [pipeline_units(config)])
    found = planning.memory(config, layout, world_size=4)
    assert found.optimizer_bytes == 12 * (count.dense / 4 + count.experts / 2)


def memory(**options: Any) -> Memory:
    names = [key for key in options if key in ParallelLayout.__dataclass_fields__]
    sizes = {name: options.pop(name) for name in names}
    return planning.memory(
        tiny_config(**SIZES), ParallelLayout(**sizes), sequence_length=2048,
        **{"world_size": 2, "num_microbatches": 8} | options,
    )  # fmt: skip


def test_a_rank_holds_the_micro_batches_that_its_schedule_has_in_flight() -> None:
    pipeline = {"pipeline_model_parallel_size": 2}
    held = {
        schedule: [rank.in_flight for rank in memory(pipeline_schedule=schedule, **pipeline).ranks]
        for schedule in ("gpipe", "1f1b", "zb-h1")
    }
    assert held == {"gpipe": [8, 8], "1f1b": [1, 2], "zb-h1": [2, 2]}
    first = {name: memory(pipeline_schedule=name, **pipeline).ranks[1] for name in held}
    assert first["gpipe"].activations_bytes > 3 * first["1f1b"].activations_bytes
    chunks = memory(virtual_pipeline_model_parallel_size=2, **pipeline)
    assert [rank.in_flight for rank in chunks.ranks] == [3, 5]


def test_recomputation_and_parallelism_keep_less() -> None:
    def kept(**options: Any) -> int:
        return memory(**{"world_size": 4, **options}).activations_bytes

    def again(**options: Any) -> RecomputeOptions:
        return RecomputeOptions(recompute_granularity="selective", **options)

    def layers(method: Any, count: int) -> RecomputeOptions:
        return RecomputeOptions(
            recompute_granularity="full", recompute_method=method, recompute_num_layers=count
        )

    everything = kept()
    sizes = [
        everything,
        kept(recompute=again(recompute_modules=["core_attn"])),
        kept(recompute=again(recompute_modules=["core_attn", "mlp"])),
        kept(recompute=layers("uniform", 1)),
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert sizes[0] > kept(recompute=layers("block", 2)) > sizes[-1]
    assert kept(recompute=layers("block", 4)) == kept(recompute=layers("uniform", 1))
    assert kept(recompute=RecomputeOptions(offload_modules=["mlp"], offload_min_bytes=1)) < sizes[0]
    assert kept(micro_batch_size=2) == pytest.approx(2 * everything, rel=0.15)
    assert kept(context_parallel_size=2) == pytest.approx(everything / 2, rel=0.15)
    assert kept(tensor_model_parallel_size=2) < 0.6 * everything
    assert kept(tensor_model_parallel_size=2, sequence_parallel=False) > kept(
        tensor_model_parallel_size=2
    )


def test_a_cpu_keeps_the_gathered_input_of_tensor_parallel_layers() -> None:
    for size, differs in ((1, False), (2, True)):
        # Two samples, since the attention of a GPU keeps less of one.
        cpu, cuda = (
            memory(
                tensor_model_parallel_size=size, device=device, micro_batch_size=2
            ).activations_bytes
            for device in ("cpu", "cuda")
        )
        assert (cpu > 1.05 * cuda) is differs  # norms of a CPU have a few more temporaries


def test_a_tape_counts_a_shared_tensor_once_and_recomputes_a_segment() -> None:
    first = Operation(path="a", keeps={"x": 8.0}, inputs={"x": 8.0}, makes=("y",), forward_bytes=2)
    second = Operation(
        path="b", keeps={"x": 8.0, "y": 4.0}, inputs={"y": 4.0}, backward_bytes=3,
        deferred={"y": 4.0},
    )  # fmt: skip
    plain = profile([Segment((first, second))])
    assert (plain.kept, plain.forward_peak, plain.backward_peak) == (12, 12, 15)
    again = profile([Segment((first, second), recomputed=True)])
    assert (again.kept, again.backward_peak) == (8, 15)
    split = profile([Segment((first, second))], split_backward=True)
    assert (split.deferred, split.backward_peak) == (4, 15)
    larger = replace(second, backward_bytes=0, weight_gradient_bytes=100)
    assert profile([Segment((first, larger))]).backward_peak == 112
    assert profile([Segment((first, larger))], split_backward=True).backward_peak == 12


def test_options_that_do_not_fit_are_errors() -> None:
    for options, message in (
        ({"world_size": 3, "pipeline_model_parallel_size": 2}, "3 ranks cannot be divided"),
        ({"tensor_model_parallel_size": 3, "world_size": 3}, "num_attention_heads=8 is not div"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"precision": "64-true"}, "precision is '64-true', whose memory is not known"),
        ({"pipeline_schedule": "fast"}, "'fast', which names no schedule"),
        ({"data_parallel": "ddp", "data_parallel_options":
          DataParallelOptions(reduce_every_microbatch=True)}, "options of fsdp"),
        ({"pipeline_schedule": None}, "pipeline_schedule is None, which is neither a name"),
        ({"data_parallel": "zero3"}, "data_parallel is 'zero3', which is unknown"),
        ({"device": "gpu"}, "device is 'gpu', which is unknown"),
        ({"world_size": 0}, "the number of ranks is 0; it must be a positive integer"),
        ({"recompute": "full"}, "recompute is 'full', and must be a RecomputeOptions"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            memory(**options)


def test_chunks_of_the_loss_are_those_of_the_layer() -> None:
    for hidden in (64, 300, 4096):
        for tokens in (1, 17, 100, 512, 5000, 8192):
            assert chunk_tokens(tokens, hidden) == linear_loss.chunk_tokens(tokens, hidden)


def test_without_a_world_it_is_the_smallest() -> None:
    moe = MoEConfig(num_experts=8, ffn_hidden_size=96)
    config = tiny_config(**SIZES | {"max_sequence_length": 64, "moe": moe})
    for sizes, world in (
        ({}, 1),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
        ({"context_parallel_size": 3, "expert_model_parallel_size": 2}, 6),
        (
            {
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
            },
            8,
        ),
    ):
        layout = ParallelLayout(**sizes)
        found = planning.memory(config, layout, sequence_length=60)
        assert found == planning.memory(config, layout, sequence_length=60, world_size=world)
