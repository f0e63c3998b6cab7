"""Plans: patterns that match nothing, styles and functions that are none, and our own plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import styles
from megatron_lightning.layers.styles import ColumnParallel, RowParallel, SequenceParallel
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan, parallelize
from megatron_lightning.parallel.shards.patterns import describe_unused
from megatron_lightning.parallel.shards.sharding import check_plan
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.trainers import trainer

PATHS = [
    "model",
    "model.model.embed_tokens",
    "model.model.layers.0.self_attn.q_proj",
    "model.model.layers.1.self_attn.q_proj",
    "model.model.layers.1.mlp.gate_proj",
    "model.model.norm",
    "model.lm_head",
]


@pytest.mark.parametrize(
    ("patterns", "texts"),
    [
        (["model.model.layers.*.self_attn.q_proj", "**norm"], []),
        # A prefix is missing, or there is one too many.
        (
            ["model.layers.*.self_attn.q_proj"],
            ["(did you mean 'model.model.layers.*.self_attn.q_proj'?)"],
        ),
        (["lm_head"], ["(did you mean 'model.lm_head'?)"]),
        (["layers.*.self_attn.q_proj"], ["'model.model.layers.*.self_attn.q_proj'"]),
        (["net.model.lm_head"], ["(did you mean 'model.lm_head'?)"]),
        # A segment is misspelled.
        (
            ["model.model.layers.*.self_attention.q_proj"],
            ["(did you mean 'model.model.layers.*.self_attn.q_proj'?)"],
        ),
        (["model.model.layers.1.mlp.gate"], ["'model.model.layers.1.mlp.gate_proj'"]),
        (["experts.*.w1"], ["'experts.*.w1'"]),
        # The first match wins, so that the second row does nothing.
        (
            ["model.model.**", "model.model.norm", "model.lm_head"],
            ["'model.model.norm' ('model.model.**' precedes it"],
        ),
        (["model.model.norm", "**norm", "**"], ["'**norm' ('model.model.norm' precedes it"]),
    ],
)
def test_patterns_that_are_not_used(patterns: list[str], texts: list[str]) -> None:
    found = describe_unused(patterns, PATHS)
    assert len(found) == len(texts)
    for text, expected in zip(found, texts, strict=True):
        assert expected in text
    if patterns == ["experts.*.w1"]:
        assert "did you mean" not in found[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


PREFIXLESS = ShardingPlan(
    modules={"up": ColumnParallel(), "layers.*.down": RowParallel()},
    attributes={"layers.*.num_head": lambda value, context: value // context.tp.size},
)


def test_rows_and_attributes_that_match_nothing_are_refused() -> None:
    message = (
        r"2 of the 3 patterns of the sharding plan of Net \(model\) match no module or attribute: "
        r"row 'up' \(did you mean 'layers\.\*\.up'\?\); "
        r"attribute 'layers\.\*\.num_head' \(did you mean 'layers\.\*\.num_heads'\?\)\. .*"
        r"correct the patterns, or remove them"
    )
    with pytest.raises(ConfigError, match=message):
        check_plan(Net(), PREFIXLESS, "model")
    with pytest.raises(ConfigError, match=r"2 of the 3 patterns of the sharding plan of Net match"):
        parallelize(Net(), ParallelContext(ParallelLayout()), PREFIXLESS)


def test_a_plan_that_matches_nothing_is_refused_before_launch() -> None:
    """Two ranks would be started, and none is; paths begin at the LightningModule."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    plan = ShardingPlan(
        modules={"layers.*.up": ColumnParallel(), "net.layers.*.down": RowParallel()}
    )
    strategy = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan=plan)
    with pytest.raises(ConfigError, match=r"'layers\.\*\.up' \(did you mean 'net\.layers\.\*\.up'"):
        trainer(strategy, devices=2, max_steps=1).fit(Module(), [torch.zeros(2, 8)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"modules": {"up": ColumnParallel}},
            r"row 'up' of a sharding plan is ColumnParallel, .* an instance .* ColumnParallel\(\)",
        ),
        ({"modules": {"up": "colwise"}}, r"row 'up' of a sharding plan is 'colwise'"),
        (
            {"modules": {}, "attributes": {"heads": lambda value: value // 2}},
            r"attributes\['heads'\] of a sharding plan takes \(value\)\. Set it to a function of "
            r"\(value of the full model, ParallelContext\).* value // context.tp.size",
        ),
        ({"modules": {}, "attributes": {"heads": 2}}, r"attributes\['heads'\] .* is 2\. Set it"),
    ],
)
def test_what_is_no_style_and_no_function_of_an_attribute(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingPlan(**options)


def test_rows_of_the_second_of_two_plans_go_first() -> None:
    plan = ShardingPlan(
        modules={"layers.*.up": ColumnParallel(), "layers.*.down": RowParallel()},
        positions="positions",
        attributes={"heads": lambda value, context: value // context.tp.size},
    )
    gathered = ColumnParallel(gather_output=True)
    first = ShardingPlan(modules={"layers.0.down": gathered}, documents="documents")
    same = ShardingPlan(modules={"layers.*.up": gathered}, positions="")
    both = plan | first | same
    assert list(both.modules) == ["layers.*.up", "layers.0.down", "layers.*.down"]
    assert both.style_of("layers.0.up") == both.style_of("layers.0.down") == gathered
    assert both.style_of("layers.1.down") == RowParallel()
    assert both.attributes == plan.attributes
    assert (both.positions, both.documents) == ("", "documents")
    with pytest.raises(ConfigError, match=r"sequence_dim=0 and sequence_dim=1 .* Set both to"):
        plan | ShardingPlan(modules={}, sequence_dim=1)
    with pytest.raises(TypeError, match="unsupported operand"):
        plan | {"layers.0.down": gathered}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_every_row_of_our_own_plan_matches(learned: bool, qk_layernorm: bool) -> None:
    config = tiny_config(
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        qk_layernorm=qk_layernorm,
        position_embedding_type="learned_absolute" if learned else "rope",
    )
    with torch.device("meta"):
        model = GPTModel(config)
    check_plan(model, model.sharding_plan())


def test_every_row_of_the_llama_plan_matches() -> None:
    transformers = pytest.importorskip("transformers")
    from megatron_lightning.models import llama_hf_plan

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    check_plan(model, llama_hf_plan(config))


def test_the_llama_plan_without_the_prefix_of_the_lightning_module() -> None:
    """Of its rows ``**norm`` alone matches, and would have its gradients summed."""
    transformers = pytest.importorskip("transformers")
    from megatron_lightning.models import llama_hf_plan

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2
    )

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            self.model = transformers.LlamaForCausalLM(config)

    strategy = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan=llama_hf_plan(config))
    message = (
        r"13 of the 14 patterns .* of Module match no module or attribute: row "
        r"'model\.embed_tokens' \(did you mean 'model\.model\.embed_tokens'\?\)"
    )
    with pytest.raises(ConfigError, match=message):
        strategy.describe(Module())


def test_a_norm_row_alone_would_have_matched() -> None:
    """The table of a model without its prefix: one row matches by its leading ``**``."""
    net = Net()
    net.norm = nn.LayerNorm(8)
    plan = ShardingPlan(
        modules={"model.layers.*.up": ColumnParallel(), "**norm": SequenceParallel()}
    )
    with pytest.raises(ConfigError, match=r"1 of the 2 patterns .*did you mean 'layers\.\*\.up'"):
        check_plan(net, plan)


def test_the_page_lists_every_style_and_its_own_works() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()
    public = [
        name
        for name, member in vars(styles).items()
        if isinstance(member, type)
        and member.__module__.startswith(styles.__name__)
        and callable(getattr(member, "apply", None))
        and not name.startswith("_")
    ]
    assert len(public) > 10
    for name in public:
        assert f"`{name}(" in page, f"docs/plans.md does not describe {name}"
    *_, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(program, names)  # dataclasses look their module up
    net = parallelize(
        Net(),
        ParallelContext(ParallelLayout(tensor_model_parallel_size=2), planned_world_size=2),
        ShardingPlan(modules={"layers.*.up": names["GatheredColumn"]()}),
    )
    assert net.get_parameter("layers.0.up.weight").shape == (8, 8)
    assert net.get_submodule("layers.0.up").gather_output
