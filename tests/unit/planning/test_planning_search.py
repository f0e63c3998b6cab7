"""``plan --search``: published layouts are in the best class, and what is listed is what a plan of
the listed options says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_lightning.config import (
    ContextOptions,
    DataParallelOptions,
    LatentAttentionConfig,
    MoEConfig,
    PipelineOptions,
    RecomputeOptions,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import make_schedule
from megatron_lightning.pipeline.schedules.replay import Replay
from megatron_lightning.pipeline.schedules.simulate import Costs, simulate
from megatron_lightning.planning.memory import memory
from megatron_lightning.planning.planned_run import Recipe
from megatron_lightning.planning.search.devices import planned_device
from megatron_lightning.planning.search.layout_search import BEST, LayoutSearch, SearchResult
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.recipe_reading.plan_command import plan

LLAMA: dict[str, Any] = {
    "num_query_groups": 8, "vocab_size": 128256, "max_sequence_length": 8192,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "num_query_groups": 4, "kv_channels": 128, "vocab_size": 151936, "max_sequence_length": 4096,
    "qk_layernorm": True,
}  # fmt: skip
MODELS = {
    "llama 8b": TransformerConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336, **LLAMA
    ),
    "llama 70b": TransformerConfig(
        num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, **LLAMA
    ),
    "llama 405b": TransformerConfig(
        num_layers=126, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248, **LLAMA
    ),
    "qwen3 30b": TransformerConfig(
        num_layers=48, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=6144, **QWEN,
        moe=MoEConfig(num_experts=128, router_topk=8, ffn_hidden_size=768),
    ),
    "qwen3 235b": TransformerConfig(
        num_layers=94, hidden_size=4096, num_attention_heads=64, ffn_hidden_size=12288, **QWEN,
        moe=MoEConfig(num_experts=128, router_topk=8, ffn_hidden_size=1536),
    ),
    "deepseek v3": TransformerConfig(
        num_layers=61, hidden_size=7168, num_attention_heads=128, ffn_hidden_size=18432,
        vocab_size=129280, max_sequence_length=4096,
        mla=LatentAttentionConfig(
            q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(
            num_experts=256, router_topk=8, router_score_function="sigmoid", ffn_hidden_size=2048,
            shared_expert_intermediate_size=2048, layer_freq=[0] * 3 + [1] * 58,
        ),
    ),
}  # fmt: skip
BOTH = PipelineOptions(
    account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
)


def published(
    model: str, ranks: int, sizes: tuple[int, int, int, int, int], batch: int, **changes: Any
) -> Recipe:
    """Return a layout of NVIDIA's performance summary: FP8 on H100s. Sizes: tp, pp, vp, cp, ep."""
    tp, pp, vp, cp, ep = sizes
    config = MODELS[model]
    layout = ParallelLayout(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp, context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=None if config.moe is None else 1,
    )  # fmt: skip
    recipe = Recipe(
        model=config, layout=layout, world_size=ranks, node_size=8, precision="bf16-mixed",
        fp8_recipe=FP8Recipe(scaling="current", fp8_param_gather=True), adapters=None,
        device="cuda", batch_size=batch // layout.data_parallel_size(ranks), accumulated=1,
        sequence_length=config.max_sequence_length, micro_batch_size=1, data_parallel="zero1",
        data=DataParallelOptions(), context=ContextOptions(), pipeline=PipelineOptions(),
        recompute=RecomputeOptions(), schedule="auto", compile=None,
    )  # fmt: skip
    return replace(recipe, **changes)


def search(recipe: Recipe) -> SearchResult:
    return LayoutSearch(recipe, planned_device("h100")).run()


FSDP: dict[str, Any] = {
    "data_parallel": "fsdp", "data": DataParallelOptions(reduce_every_microbatch=True),
}  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        published("llama 8b", 8, (1, 1, 1, 1, 1), 128, **FSDP),
        pytest.param(published("llama 70b", 64, (4, 8, 5, 1, 1), 256), marks=pytest.mark.slow),
        pytest.param(
            published("llama 405b", 1024, (8, 8, 8, 2, 1), 1536, pipeline=BOTH),
            marks=pytest.mark.slow,
        ),
        pytest.param(published("qwen3 30b", 16, (1, 2, 12, 1, 8), 1024), marks=pytest.mark.slow),
    ],
    ids=["8b", "70b", "405b", "30b"],
)
def test_published_layouts_are_in_the_best_class(recipe: Recipe) -> None:
    result = search(recipe)
    assert result.own is not None and result.fitting is result.own
    assert result.ratio(result.own) <= BEST
    sizes = [(one.recipe.layout, one.recipe.micro_batch_size) for one in result.layouts]
    assert (recipe.layout, 1) in sizes
    ratios = list(map(result.ratio, result.layouts))
    assert ratios[0] == 1 and ratios == sorted(ratios)
    usable = planned_device("h100").usable_bytes
    assert all(one.memory.total_bytes <= usable for one in result.layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        published("qwen3 235b", 256, (2, 8, 4, 1, 32), 8192, pipeline=BOTH),
        published(
            "deepseek v3", 1024, (2, 8, 4, 1, 64), 8192,
            pipeline=PipelineOptions(pipeline_model_parallel_layout="Et|(tt|)*30L"),
        ),
    ],
    ids=["235b", "deepseek"],
)  # fmt: skip
def test_a_layout_too_large_is_shown_with_the_recomputation_that_fits(recipe: Recipe) -> None:
    result = search(recipe)
    assert result.own is not None and result.fitting is not None
    usable = planned_device("h100").usable_bytes
    assert result.own.memory.total_bytes > usable >= result.fitting.memory.total_bytes
    assert result.fitting.recipe.recompute.recompute_modules == ("mlp",)
    assert result.fitting.recipe.layout == recipe.layout


def test_embedding_and_loss_may_take_the_places_of_layers() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=4, pipeline_model_parallel_size=16,
        virtual_pipeline_model_parallel_size=8,
    )  # fmt: skip
    needed = memory(MODELS["llama 405b"], layout, num_microbatches=16, pipeline_options=BOTH)
    assert len(needed.ranks) == 16
    with pytest.raises(ConfigError, match="num_layers=126 are fewer than the 128"):
        memory(MODELS["llama 405b"], layout, num_microbatches=16)
    config = replace(MODELS["llama 405b"], num_layers=125)
    with pytest.raises(ConfigError, match=r"num_layers=125 and 2 places of .*num_layers to 126"):
        memory(config, layout, num_microbatches=16, pipeline_options=BOTH)


@pytest.mark.parametrize(("pp", "vp", "count"), [(1, 1, 3), (4, 1, 9), (4, 3, 8), (3, 2, 6)])
def test_a_replay_is_a_simulation(pp: int, vp: int, count: int) -> None:
    table = make_schedule("auto", num_ranks=pp, num_microbatches=count, num_chunks=vp)
    forward = tuple(1 + 0.3 * (stage % 3) for stage in range(pp * vp))
    backward = tuple(2 + 0.7 * (stage % 2) for stage in range(pp * vp))
    costs = Costs(forward=forward, input_gradient=backward, weight_gradient=0.0, communication=0.4)
    expected = simulate(table, costs).step_time
    assert Replay(table).run_time(forward, backward, 0.4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_search_lists_what_a_plan_of_its_options_says() -> None:
    recipe = "configs/llama3_8b.yaml"
    text, fits = plan(config=recipe, device="h100", search=True, json=True)
    found = json.loads(text)
    assert fits and found["errors"] == []
    layouts = found["search"]["layouts"]
    for one in (layouts[0], next(one for one in layouts if one["recompute"] == "nothing"
                                 and one["virtual_pipeline_model_parallel_size"] > 1)):  # fmt: skip
        overrides = [option.removeprefix("--") for option in one["options"]]
        assert overrides[:2] == ["trainer.num_nodes=4", "trainer.devices=8"]
        count = one["data_parallel_size"]
        overrides.append(f"data.init_args.batch_size={128 // count}")
        described = json.loads(plan(config=recipe, overrides=overrides, json=True)[0])
        assert described["errors"] == []
        assert described["bytes"]["fullest_rank"]["total"] == one["bytes"]
        assert described["flops"]["global_batch_size"] == 128


def test_a_search_needs_a_device_and_the_ordinary_schedules() -> None:
    with pytest.raises(ConfigError, match="a search lists layouts that fit into a device"):
        plan(config="configs/llama3_8b.yaml", search=True)
    text, fits = plan(
        config="configs/llama3_8b.yaml", search=True, device="h100",
        overrides=["trainer.strategy.init_args.pipeline_schedule=zb-h1"],
    )  # fmt: skip
    assert not fits and text.startswith("error: pipeline_schedule is 'zb-h1'")
    text, fits = plan(config="configs/llama3_8b.yaml", search=True, device="cpu:0.01")
    assert not fits and text.startswith("none of ")
