"""Learning rate and weight decay equal what megatron-core computed
(``tests/oracles/lr_schedules.json``), to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.optim import LRSchedule, ScheduledLR

FACTS = json.loads((Path(__file__).parents[2] / "oracles" / "lr_schedules.json").read_text())[
    "facts"
]


def _optimizer(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    groups = groups or ({"lr": 1.0},)
    return torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(2))], **group} for group in groups]
    )


def _schedule(**values: Any) -> LRSchedule:
    return LRSchedule(**{"lr_decay_steps": 20, "lr_warmup_steps": 2, **values})


@pytest.mark.parametrize(
    "fact", FACTS, ids=lambda fact: f"{fact['args']['lr_decay_style']}-{fact['increment']}"
)
def test_rates_are_megatron_cores(fact: dict[str, Any]) -> None:
    values = dict(fact["args"])
    optimizer = _optimizer(
        {"lr": values.pop("max_lr"), "weight_decay": 1.0},
        {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 1.0},
        {"lr": 1e-3, "weight_decay": 0.0},
    )
    unit = "samples" if fact["increment"] > 1 else "steps"
    scheduler = ScheduledLR(
        optimizer, LRSchedule(unit=unit, samples_per_step=fact["increment"], **values)
    )
    rows = {row[0]: row[1:] for row in fact["rows"]}
    for step in range(max(rows) + 1):
        if step in rows:
            plain, other, undecayed = optimizer.param_groups
            assert [plain["lr"], plain["weight_decay"], other["lr"]] == rows[step]
            assert undecayed["weight_decay"] == fact["wd_mult0"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_every_tail_of_wsd_goes_from_peak_to_minimum(style: Any) -> None:
    schedule = _schedule(
        lr_decay_style="WSD", wsd_decay_steps=8, lr_wsd_decay_style=style, min_lr=0.1
    )
    rates = [schedule.lr(n, 1.0, 0.0, 0.1) for n in range(23)]
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[3:13] == [1.0] * 10
    assert rates[20:] == pytest.approx([0.1, 0.1, 0.1])
    half = {
        "linear": 0.5,
        "cosine": 0.5,
        "exponential": 2 * 0.5**0.5 - 1,
        "minus_sqrt": 1 - 0.5**0.5,
    }[style]
    assert rates[16] == pytest.approx(0.1 + 0.9 * half)


def test_multiplied_groups_follow_the_whole_curve() -> None:
    optimizer = _optimizer({"lr": 1.0}, {"lr": 0.25, "lr_mult": 0.25})
    scheduler = ScheduledLR(optimizer, _schedule(init_lr=0.1, min_lr=0.2))
    for _ in range(25):
        first, second = scheduler.get_last_lr()
        assert second == pytest.approx(0.25 * first)
        optimizer.step()
        scheduler.step()


def test_weight_decay_grows_as_told() -> None:
    linear = _schedule(start_wd=0.0, end_wd=1.0, wd_incr_steps=4, wd_incr_style="linear")
    assert [linear.weight_decay(n) for n in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert _schedule().weight_decay(3) is None


def test_counted_samples_go_before_the_configured_number_and_skipped_ones_do_not_count() -> None:
    optimizer = _optimizer()
    scheduler = ScheduledLR(optimizer, _schedule(unit="samples", samples_per_step=1))
    scheduler.step()
    assert scheduler.num_steps == 1
    scheduler.count_samples(3)
    scheduler.count_samples(4)
    scheduler.step()
    assert scheduler.num_steps == 8
    scheduler.count_samples(5)
    scheduler.forget_samples()
    scheduler.count_samples(2)
    scheduler.step()
    assert scheduler.num_steps == 10
    with pytest.raises(ConfigError, match=r"does not count them\. Set samples_per_step"):
        ScheduledLR(_optimizer(), _schedule(unit="samples")).step()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_resume() -> None:
    def made(peak: float = 1.0, **values: Any) -> ScheduledLR:
        return ScheduledLR(
            _optimizer({"lr": peak, "weight_decay": 0.1}),
            _schedule(start_wd=0.0, end_wd=0.2, wd_incr_style="linear", **values),
        )

    def after(scheduler: ScheduledLR) -> tuple[int, float, float]:
        group = scheduler.optimizer.param_groups[0]
        assert scheduler.get_last_lr() == [group["lr"]]
        return scheduler.num_steps, group["lr"], group["weight_decay"]

    old = made()
    for _ in range(7):
        old.step()
    state = old.state_dict()
    same, configured, theirs = (
        made(),
        made(0.5, lr_decay_steps=40, on_resume="configured"),
        made(0.5, on_resume="checkpoint"),
    )
    for scheduler in (same, configured, theirs):
        scheduler.load_state_dict(state)
    assert after(same) == after(theirs) == after(old)
    assert after(configured) == (
        7,
        configured.schedule.lr(7, 0.5, 0.0, 0.0),
        pytest.approx(0.2 * 7 / 40),
    )
    same.step()
    old.step()
    assert after(same) == after(old)
    with pytest.raises(CheckpointError, match=r"lr_decay_steps: 40 here, 20 there.*on_resume"):
        made(lr_decay_steps=40).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"parameter groups: .*0\.5.* here"):
        made(0.5).load_state_dict(state)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lr_decay_style": "step"},
            "lr_decay_style is 'step', which is unknown. Set it to one of constant, linear",
        ),
        ({"lr_decay_steps": None}, "lr_decay_style=cosine ends somewhere. Set lr_decay_steps"),
        ({"lr_warmup_steps": 20}, "lr_decay_steps=20 ends before lr_warmup_steps=20"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps=-1 is a length"),
        (
            {"lr_decay_style": "WSD"},
            "wsd_decay_steps is None; the tail of WSD lies within lr_decay_steps=20",
        ),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 21}, "wsd_decay_steps is 21"),
        ({"min_lr": -1.0}, "min_lr=-1.0 are rates"),
        ({"start_wd": 0.1}, "start_wd=0.1 and end_wd=None; a change has two ends"),
        ({"start_wd": 0.2, "end_wd": 0.1}, "weight decay grows"),
        ({"start_wd": 0.0, "end_wd": 0.1}, "differ under wd_incr_style=constant"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _schedule(**values)


def test_a_minimum_above_the_peak_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"parameter group 0 has min_lr=2.0 above its learning rate 1.0"
    ):
        ScheduledLR(_optimizer(), _schedule(min_lr=2.0))
