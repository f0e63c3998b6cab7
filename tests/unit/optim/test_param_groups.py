"""The table of parameter groups: the same groups on every pipeline stage, and what each of them has
of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.optim import (
    NO_DECAY,
    LRSchedule,
    ParamGroup,
    ScheduledLR,
    make_param_groups,
)
from megatron_lightning.optim.param_groups import check_options
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.parallel.shards.ties import record_ties
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.step import group_lines
from tests.helpers.layouts import tiny_config

CONFIG = tiny_config(
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=20,
    share_embeddings_and_output_weights=True,
    add_bias_linear=True,
)
EMBEDDINGS = ParamGroup(
    name="embeddings", params=["**word_embeddings.weight"], lr=1e-4, min_lr=1e-5
)
TABLE = (
    EMBEDDINGS,
    NO_DECAY,
    ParamGroup(name="out", params=["**.linear_fc2.*"], lr_mult=0.5, options={"betas": (0.8, 0.9)}),
)


def _groups(module: nn.Module, table: Any = TABLE) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = make_param_groups(module, table, lr=1e-3, weight_decay=0.1)
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups
    ]


def _stage(model: nn.Module, stage: int) -> nn.Module:
    units = model.pipeline_units()
    record_ties(model)
    StagePartition(model, [units[:2], units[2:]], [stage])
    return model


def test_the_first_matching_row_takes_a_parameter() -> None:
    default, embeddings, no_decay, out = _groups(GPTModel(CONFIG))
    assert [group["name"] for group in (default, embeddings, no_decay, out)] == [
        "default",
        "embeddings",
        "no_decay",
        "out",
    ]
    assert embeddings == {
        "params": ["embedding.word_embeddings.weight"], "name": "embeddings", "lr": 1e-4,
        "min_lr": 1e-5,
        "weight_decay": 0.1, "wd_mult": 1.0,
    }  # fmt: skip
    assert all(name.endswith(("bias", "norm.weight")) for name in no_decay["params"])
    assert len(no_decay["params"]) == 2 * 6 + 1
    assert (no_decay["weight_decay"], no_decay["wd_mult"]) == (0.0, 0.0)
    assert out["params"] == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(2)]
    assert (out["lr"], out["lr_mult"], out["betas"]) == (5e-4, 0.5, (0.8, 0.9))
    assert len(default["params"]) == 2 * 3


def test_every_stage_has_the_same_groups_and_a_tied_copy_is_in_its_owners() -> None:
    whole = _groups(GPTModel(CONFIG))
    stages = [_groups(_stage(GPTModel(CONFIG), stage)) for stage in range(2)]
    for groups in stages:
        assert [{**g, "params": 0} for g in groups] == [{**g, "params": 0} for g in whole]
    assert stages[1][1]["params"] == ["output_layer.weight"]
    rows = _groups(
        _stage(GPTModel(CONFIG), 1), (ParamGroup(name="first", params=["embedding.position*"]),)
    )
    assert rows[1]["params"] == []


def test_optimizers_and_schedules_take_them() -> None:
    model = GPTModel(CONFIG)
    table = (*TABLE, ParamGroup(name="nothing", params=["nothing"]))
    optimizer = torch.optim.AdamW(make_param_groups(model, table, lr=1e-3, weight_decay=0.1))
    schedule = LRSchedule(
        lr_decay_style="linear", lr_decay_steps=2, min_lr=1e-4, start_wd=0.2, end_wd=0.2
    )
    scheduler = ScheduledLR(optimizer, schedule)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).sum().backward()
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([1e-4, 1e-5, 1e-4, 5e-5, 1e-4])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0, 0.2, 0.2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ParamGroup(name="a", lr_mult=-1.0),
            "lr_mult=-1.0 of parameter group 'a' is negative",
        ),
        (lambda: ParamGroup(name="a", lr=1.0, lr_mult=2.0), "both lr=1.0 and lr_mult=2.0"),
        (lambda: ParamGroup(name="a", params="x"), "params='x' of parameter group 'a' is no list"),
        (
            lambda: make_param_groups(nn.Linear(1, 1), (NO_DECAY, NO_DECAY), lr=1.0),
            "one name occurs twice",
        ),
    ],
)
def test_contradictions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**", ["norm", "prenorm", "a.norm", "a.b.norm"]),
        ("**norm", ["norm", "prenorm", "a.norm", "a.b.norm"]),
        ("**.norm", ["norm", "a.norm", "a.b.norm"]),
        ("a.**", ["a.norm", "a.b.norm"]),
        ("a.**.norm", ["a.norm", "a.b.norm"]),
        ("*.norm", ["a.norm"]),
        ("*norm", ["prenorm"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    """Two stars match any number of segments, none included."""
    assert [
        name
        for name in ("", "norm", "prenorm", "a.norm", "a.b.norm")
        if compile_pattern(pattern).fullmatch(name)
    ] == names


def test_options_that_the_optimizer_does_not_read_are_refused() -> None:
    table = (ParamGroup(name="all", options={"betas": [0.8, 0.9], "epsilon": 1e-6}),)
    optimizer = torch.optim.AdamW(make_param_groups(nn.Linear(2, 2), table, lr=1e-3))
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    with pytest.raises(ConfigError, match=r"'all' has the option 'epsilon', which AdamW does not"):
        check_options(table, optimizer)
    check_options((ParamGroup(name="all", options={"eps": 1e-6}),), optimizer)


def test_the_start_line_counts_the_parameters_of_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(group_lines, "rank_zero_info", printed.append)
    other_stage = [{"layers.1/0": (0, 6), "layers.1/1": (1, 3)}]
    pp = SimpleNamespace(all_gather_object=lambda own: [own, other_stage])
    view = _view("layers.0", nn.Linear(4, 2))
    group_lines.print_groups([view], pp)  # type: ignore[arg-type]
    assert printed == [
        "MegatronStrategy: AdamW steps 19 parameters in 2 groups: default 14 (lr 0.001, "
        "weight_decay 0.1, betas (0.9, 0.999)), no_decay 5 (lr 0.001, weight_decay 0, betas "
        "(0.8, 0.9))."
    ]


def _view(path: str, module: nn.Module) -> Any:
    row = replace(NO_DECAY, options={"betas": (0.8, 0.9)})
    groups = make_param_groups(module, (row,), lr=1e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    entries = [
        SimpleNamespace(
            global_name=f"{path}/{index}",
            group=group,
            spec=SimpleNamespace(global_shape=tuple(parameter.shape)),
        )
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    return SimpleNamespace(optimizer=optimizer, entries=entries)
