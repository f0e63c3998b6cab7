"""Pattern strings are read as Megatron-Core reads ``hybrid_layer_pattern``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron_lightning.assembly.preludes import Outside
from megatron_lightning.config import (
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.config.hybrid_pattern import parse_hybrid_pattern, pattern_from_ratios
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.models.costs import multiply_adds, pipeline_units
from megatron_lightning.models.teacher_student import FrozenPair, ReferencePair
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.stage_layouts import split_units
from megatron_lightning.planning.ledger.rank_parameters import count_rank, layer_of
from tests.helpers.layouts import tiny_config

FACTS = json.loads(
    (Path(__file__).parents[2] / "oracles/families/hybrid_patterns.json").read_text()
)["facts"]


@pytest.mark.parametrize("fact", FACTS["patterns"], ids=lambda fact: repr(fact["pattern"]))
def test_patterns_are_parsed_or_refused_as_by_megatron(fact: dict[str, Any]) -> None:
    expected = fact["parsed"]
    if "error" in expected:
        with pytest.raises(ConfigError, match="layer_pattern"):
            parse_hybrid_pattern(fact["pattern"])
        return
    parsed = parse_hybrid_pattern(fact["pattern"])
    assert {"main": parsed.main, "mtp": parsed.mtp, "depths": parsed.depths} == expected
    assert len(parsed.letters) == fact["layers"]
    assert len(parsed.segments) == fact["segments"]
    assert parsed.counts() == fact["counts"]


def test_ratios_mean_a_pattern() -> None:
    for fact in FACTS["from_ratios"]:
        assert pattern_from_ratios(*fact["args"]) == fact["pattern"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M*/M|M", r"has '\|' behind /, which ends a stage"),
        ("M /M", "has ' ', which is no layer"),
        ("M+/*", r"has \* and \+"),
        ("M*/MM/", "all depths have equal layers"),
    ],
)
def test_patterns_that_mean_nothing(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hybrid_pattern(pattern)


def test_a_pattern_may_end_with_a_separator() -> None:
    assert parse_hybrid_pattern("M*/") == parse_hybrid_pattern("M*")


# ----------------------------------------------------------------------------------------- options

SIZES: dict[str, Any] = {"vocab_size": 30}
LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)


def test_a_pattern_sets_layers_depths_and_positions() -> None:
    config = tiny_config(layer_pattern="*-|*-/*/*", **SIZES)
    assert (config.num_layers, config.mtp_num_layers) == (4, 2)
    assert config.layer_kinds == ("attention", "mlp", "attention", "mlp")
    assert config.position_embedding_type == "none"
    assert TransformerConfig(**config.to_dict()) == config  # type: ignore[arg-type]
    rotary = tiny_config(layer_pattern="*-", position_embedding_type="rope", **SIZES)
    assert rotary.position_embedding_type == "rope"
    latent = tiny_config(layer_pattern="+-", mla=LATENT, **SIZES)
    assert latent.position_embedding_type == "rope"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_pattern": "D-"}, r"has D, latent attention with selected keys.*Write \+"),
        ({"layer_pattern": ""}, "has no layer"),
        ({"layer_pattern": "*-", "num_layers": 3}, "has 2 layers, and num_layers is 3"),
        ({"layer_pattern": "*-/*", "mtp_num_layers": 2}, "has 1 depths.*mtp_num_layers is 2"),
        ({"layer_pattern": "+-"}, r"has \+, and mla is not set. Write \*"),
        ({"layer_pattern": "*-", "mla": LATENT}, r"has \*, and mla is set. Write \+"),
        ({"layer_pattern": "*E"}, "no moe describes experts"),
        ({"layer_pattern": "*-", "moe": MoEConfig(num_experts=4)}, "moe describes experts"),
        ({"layer_pattern": "*-", "norm_placement": "post"}, "norm_placement=post"),
        (
            {"num_layers": 8, "hybrid_attention_ratio": 0.25},
            'With 8 layers they mean layer_pattern: "MM\\*MM\\*MM"',
        ),
        (
            {"num_layers": 24, "hybrid_attention_ratio": 0.08, "hybrid_mlp_ratio": 0.5},
            "M-M-M--\\*M-M-M-M-\\*M--M-M-",
        ),
        ({"num_layers": 0, "hybrid_mlp_ratio": 0.5}, "shares of num_layers, which is not set"),
        ({"num_layers": 8, "hybrid_mlp_ratio": 1.5}, "are shares of the layers"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**SIZES | options)


# ------------------------------------------------------------------------------------------ stages


def _segments(fact: dict[str, Any]) -> list[str]:
    """Return the letters of the layers on each stage."""
    pattern = fact["pattern"].replace("M", "*")  # the kind of a mixer does not matter here
    config = tiny_config(layer_pattern=pattern, **SIZES)
    options = PipelineOptions(
        num_layers_in_first_pipeline_stage=fact["first"],
        num_layers_in_last_pipeline_stage=fact["last"],
    )
    placement = Placement.loop(fact["pp"], fact["vp"] or 1)
    letters = fact["pattern"].replace("|", "")
    layers = [
        [number for unit in stage if (number := layer_of(unit)) is not None]
        for stage in split_units(pipeline_units(config), placement, options)
    ]
    return ["".join(letters[number] for number in stage) for stage in layers]


@pytest.mark.parametrize("fact", FACTS["segments"], ids=lambda fact: repr(fact["pattern"]))
def test_stages_are_divided_or_refused_as_by_megatron(fact: dict[str, Any]) -> None:
    rows = fact["rows"]
    if "layers" in rows[0]:
        expected = {(row["vp"], row["pp"]): row["layers"] for row in rows}
        found = _segments(fact)
        assert {divmod(i, fact["pp"]): letters for i, letters in enumerate(found)} == expected
    elif "|" in fact["pattern"]:
        with pytest.raises(ConfigError, match=r"states its stages|pattern of layers has 3 stages"):
            _segments(fact)
    else:  # Megatron divides by count alone
        assert [len(letters) for letters in _segments(fact)] == [4, 3]


def test_a_single_stage_takes_all_segments() -> None:
    fact = {"pattern": "M-|M*", "pp": 1, "vp": None, "first": None, "last": None}
    assert _segments(fact) == ["M-M*"]


def test_segments_may_be_empty() -> None:
    fact = {"pattern": "M-||M*|", "pp": 2, "vp": 2, "first": None, "last": None}
    assert _segments(fact) == ["M-", "", "M*", ""]


def test_stages_of_a_pattern_are_divided_by_cost() -> None:
    """A feed-forward of 8 hidden sizes costs as much as 8 layers of attention at length 1."""
    pattern = "*" * 16 + "-" * 2
    config = tiny_config(
        layer_pattern=pattern,
        ffn_hidden_size=16 * 32,
        activation="gelu",
        max_sequence_length=1,
        **SIZES,
    )
    units = pipeline_units(config)
    costs = dict(unit for unit in units if isinstance(unit, tuple))
    ratio = costs["decoder.layers.17"] / costs["decoder.layers.0"]
    assert ratio == pytest.approx(8, rel=0.02)
    stages = split_units(units, Placement.loop(2), PipelineOptions())
    assert [len([u for u in stage if layer_of(u) is not None]) for stage in stages] == [16, 2]


NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


@pytest.mark.parametrize(("pp", "dearest", "parameters"), [(4, 1.02, 1.19), (8, 1.07, 1.49)])
def test_cost_of_nemotron_h_is_balanced(pp: int, dearest: float, parameters: float) -> None:
    """Divided by count, the dearest stage costs 1.21 (PP 4) and 1.44 (PP 8) x the mean."""
    config = TransformerConfig(
        layer_pattern=NEMOTRON_H_8B, hidden_size=4096, ffn_hidden_size=21504, kv_channels=128,
        activation="squared_relu", num_attention_heads=32, num_query_groups=8, vocab_size=131072,
        max_sequence_length=8192, mamba=MambaConfig(num_heads=128),
    )  # fmt: skip
    stages = split_units(pipeline_units(config), Placement.loop(pp), PipelineOptions())
    costs = [sum(multiply_adds(config, unit, [8192]) for unit in stage) for stage in stages]
    assert max(costs) * pp / sum(costs) == pytest.approx(dearest, abs=0.005)
    counts = [count_rank(config, ParallelLayout(), [stage]).total for stage in stages]
    assert max(counts) * pp / sum(counts) == pytest.approx(parameters, abs=0.006)


def test_pairs_keep_the_stages_of_both_patterns() -> None:
    """A pair has the frozen model's stages, then the trained model's stages."""
    frozen, trained = "*-|*-", "*|*-*"
    models = [GPTModel(tiny_config(layer_pattern=p, **SIZES)) for p in (frozen, trained)]
    units = ReferencePair(*models).pipeline_units()
    ranks = frozen.count("|") + 1
    stages = split_units(units, Placement.loop(ranks, 2), PipelineOptions())
    names = [{unit.partition(".")[0] for unit in stage} for stage in stages]
    assert all(name <= {"frozen", "frozen_output"} for name in names[:ranks])
    assert names[ranks:] == [{"trained"}] * ranks
    counts = [sum("layers" in unit for unit in stage) for stage in stages]
    patterns = (*frozen.split("|"), *trained.split("|"))
    assert counts == [len(pattern) for pattern in patterns]


def test_pairs_with_different_numbers_of_stages_are_refused() -> None:
    models = [GPTModel(tiny_config(layer_pattern=p, **SIZES)) for p in ("*-", "*|-")]
    with pytest.raises(ConfigError, match=r"frozen model states 1 stages.* trained model 2.*Write"):
        FrozenPair(*models).pipeline_units()


def test_modules_outside_of_the_units_keep_the_stages() -> None:
    """The cost of a tower before the units is added to the first unit alone."""
    names = ("tower", "first", "second")
    module = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    units = Outside(module, ("tower",)).weighted(["first", "|", "second"], lambda: None)
    assert units == (("first", 2.0), "|", ("second", 1.0))
