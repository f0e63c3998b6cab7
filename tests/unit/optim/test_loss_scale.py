"""The dynamic loss scale against Megatron-Core's rule, worked out by hand for a script of
overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lightning.config import LossScaleOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.loss_scale import DynamicLossScale, unscale_

SCRIPT = "oo.o...oo.ooo...o......"  # o: overflow
# growth after 3 clean steps in a row, 2 overflows of patience, refilled by growth only.
SCALES = [64, 32, 32, 16, 16, 16, 32, 32, 16, 16, 8, 4, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 16]


def _run(scale: DynamicLossScale, script: str) -> list[float]:
    seen = []
    for step in script:
        scale.update(step == "o")
        seen.append(scale.scale)
    return seen


def test_scale_follows_megatrons_rule() -> None:
    assert (
        _run(DynamicLossScale(LossScaleOptions(initial_scale=64, growth_interval=3)), SCRIPT)
        == SCALES
    )


@pytest.mark.parametrize("stop", range(len(SCRIPT)))
def test_scale_resumes_where_it_stopped(stop: int) -> None:
    options = LossScaleOptions(initial_scale=64, growth_interval=3)
    first, second = DynamicLossScale(options), DynamicLossScale(options)
    _run(first, SCRIPT[:stop])
    second.load_state_dict(first.state_dict())
    assert _run(second, SCRIPT[stop:]) == SCALES[stop:]


def test_a_shorter_interval_than_the_run_before_had_ends_at_once() -> None:
    scale = DynamicLossScale(LossScaleOptions(initial_scale=64, growth_interval=3))
    # Of torch's GradScaler, which counts to 2000.
    scale.load_state_dict({"scale": 8.0, "_growth_tracker": 1500})
    assert _run(scale, "....") == [16, 16, 16, 32]


def test_defaults_are_megatrons() -> None:
    scale = DynamicLossScale()
    assert scale.scale == 2.0**32
    assert _run(scale, "ooo") == [2.0**32, 2.0**31, 2.0**30]
    assert _run(scale, "." * 1000)[-2:] == [2.0**30, 2.0**31]
    assert _run(scale, "o" * 100)[-1] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_scale": 0.5}, "initial_scale is 0.5"),
        ({"hysteresis": 0}, "hysteresis 0"),
        ({"growth_interval": 0}, "growth_interval is 0"),
        ({"backoff_factor": 1.0}, "backoff_factor 1.0"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossScaleOptions(**options)


@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
def test_unscale_divides_and_finds(bad: float | None) -> None:
    gradients = [
        torch.full((3,), 8.0),
        torch.full((2, 2), 4.0, dtype=torch.bfloat16),
        torch.full((), 2.0, dtype=torch.float64),
    ]
    if bad is not None:
        gradients[1][1, 0] = bad
    found = unscale_(gradients, 4.0, torch.device("cpu"))
    assert bool(found.item()) == (bad is not None)
    assert torch.equal(gradients[0], torch.full((3,), 2.0))
    assert gradients[2] == 0.5
