"""Whether a recipe fits into a device, and what makes it fit."""

from __future__ import annotations

import json

import pytest

from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.plan_command import plan

RECIPE = "configs/llama3_8b.yaml"


def test_a_plan_says_whether_every_rank_fits() -> None:
    text, fits = plan(config=RECIPE, device="b200")
    assert fits and "b200: fits; the fullest rank takes" in text
    text, fits = plan(config=RECIPE, device="cpu:4")
    assert not fits and "cpu with 4 GiB: does not fit; pp rank 0" in text
    assert "set a larger tensor_model_parallel_size" in text


def test_advice_is_what_the_changed_recipe_needs() -> None:
    described = json.loads(plan(config=RECIPE, json=True)[0])
    total = described["bytes"]["fullest_rank"]["total"] / 2**30
    output, fits = plan(config=RECIPE, device=f"cpu:{total * 0.99:.2f}", json=True)
    found = json.loads(output)["device"]
    assert not fits and found["pp_ranks_too_full"] and found["advice"]
    changed = plan(
        config=RECIPE,
        overrides=["trainer.strategy.init_args.micro_batch_size=1"],
        json=True,
    )
    smaller = json.loads(changed[0])["bytes"]["fullest_rank"]["total"] / 2**30
    shown = [line for line in found["advice"] if line.startswith("  micro_batch_size: 1")]
    assert shown in ([], [f"  micro_batch_size: 1: {smaller:.1f} GiB"])


def test_advice_for_fsdp_is_to_shard_more() -> None:
    fsdp = ["data_parallel=fsdp", "tensor_model_parallel_size=1", "micro_batch_size=1"]
    overrides = [f"trainer.strategy.init_args.{each}" for each in fsdp]
    output, fits = plan(config=RECIPE, overrides=overrides, device="cpu:55", json=True)
    advice = "".join(json.loads(output)["device"]["advice"])
    assert not fits and "reshard_after_forward: true, reduce_every_microbatch: true}: " in advice
    assert "micro_batch_size: 1" not in advice  # as it is


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device is 'h900'; it must be one of a100, h100"):
        plan(config=RECIPE, device="h900")
    with pytest.raises(ConfigError, match=r"device is 'cpu'; it must be"):
        plan(config=RECIPE, device="cpu")
