"""Losses of policies and advantages, against trl."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.advantages import (
    advantages,
    check_advantage,
    without_signal,
)
from megatron_lightning.layers.losses.policy_loss import BY_TOKENS, PolicyLoss

ROWS, LONGEST = 8, 11
LENGTHS = torch.tensor([11, 3, 7, 1, 9, 2, 5, 10])
NAN = float("nan")
SEQUENCE = {"importance_sampling_level": "sequence"}

# Options of a loss, and what trl 1.16.0 computes of :func:`_batch`.
CASES: Mapping[str, tuple[dict[str, Any], float]] = {
    "grpo": ({"loss_type": "grpo"}, 0.0438108),
    "dapo": ({}, 0.3101055),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": LONGEST}, 0.140957),
    "gspo": ({"loss_type": "grpo", "epsilon": 3e-4, **SEQUENCE}, 0.0426939),
    "gspo of tokens": (SEQUENCE, 0.2691051),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.4}, -0.396713),
    "sapo": ({"loss_type": "sapo"}, -0.0878167),
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, 1.3455257),
    "luspo by tokens": ({"loss_type": "luspo"}, 1.5505275),
    "vespo": ({"loss_type": "vespo"}, -0.0010738),
    "two limits": ({"epsilon_high": 0.28, "delta": 1.4}, 0.2979664),
    "divergence": ({"beta": 0.04}, 0.3122276),
    "plain divergence": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        0.0456612,
    ),
    "divergence of rows": ({"loss_type": "grpo", "beta": 0.04, **SEQUENCE}, 0.0017216),
    "far rows": ({"off_policy_mask_threshold": -0.05}, -0.1844876),
    "token_truncate": ({"importance_sampling_correction": "token_truncate"}, 0.2971449),
    "token_mask": ({"importance_sampling_correction": "token_mask"}, 0.2793348),
    "sequence_truncate": ({"importance_sampling_correction": "sequence_truncate"}, 0.1780408),
    "sequence_mask": ({"importance_sampling_correction": "sequence_mask"}, 0.0436694),
    "vespo of another sampler": (
        {"loss_type": "vespo", "importance_sampling_correction": "token_truncate"},
        -0.0913022,
    ),
    "some tokens": ({"trains": 0.2}, 0.0831667),
}


def _loss(options: dict[str, Any]) -> PolicyLoss:
    own = {name: value for name, value in options.items() if name != "trains"}
    return PolicyLoss(importance_sampling_clip_max=1.3, **own)


def _batch(options: dict[str, Any]) -> dict[str, Tensor]:
    """Return rows of uneven lengths, with a tool's tokens, an empty row, and rows without signal;
    ratios are far from 1."""
    draws = torch.Generator().manual_seed(3)
    mask = (torch.arange(LONGEST) < LENGTHS[:, None]).float()
    mask[4, 3:6] = 0  # a tool's answer
    mask[6] = 0  # a masked text
    now = -torch.rand(ROWS, LONGEST, generator=draws) * 3
    noise = [torch.randn(ROWS, LONGEST, generator=draws) for _ in range(3)]
    given = torch.randn(ROWS, generator=draws)
    given[2:4] = 0.0
    batch = {
        "now": now, "mask": mask, "advantages": given, "old_logprobs": now + 0.4 * noise[0],
        "ref_logprobs": now + 0.3 * noise[1], "logprobs": now + 0.2 * noise[2],
    }  # fmt: skip
    if "trains" in options:
        entropies = torch.rand(ROWS, LONGEST, generator=draws) * 2
        limit = torch.quantile(entropies[mask.bool()], 1 - options["trains"])
        batch |= {"entropies": entropies, "trains": entropies >= limit}
    return batch


def _gradient(loss: PolicyLoss, batch: dict[str, Tensor], parts: list[slice]) -> list[Tensor]:
    """Return loss and gradient by sums and weights of parts, as micro-batches and ranks do."""
    logprobs = batch["now"].clone().requires_grad_()
    sums, weights = zip(
        *(loss(logprobs[rows], {k: v[rows] for k, v in batch.items()}) for rows in parts),
        strict=True,
    )
    mean = torch.stack(sums).sum() / torch.stack(weights).sum()
    mean.backward()
    assert logprobs.grad is not None
    return [mean.detach(), logprobs.grad]


def _of_trl(options: dict[str, Any], batch: dict[str, Tensor]) -> list[Tensor]:
    """Return loss and gradient of trl's GRPO trainer, whose model returns these
    log-probabilities."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    loss, kind = _loss(options), trl.GRPOTrainer
    logprobs, mask = batch["now"].clone().requires_grad_(), batch["mask"]
    entropies = batch.get("entropies", torch.zeros_like(logprobs))
    mode = loss.importance_sampling_correction
    args = SimpleNamespace(
        steps_per_generation=1, delta=loss.delta,
        **{n: v for n, v in vars(loss).items() if n.startswith(("use_bias", "sapo", "vespo"))},
    )  # fmt: skip
    trainer = SimpleNamespace(
        loss_type=loss.loss_type, importance_sampling_level=loss.importance_sampling_level,
        beta=loss.beta, use_vllm=mode is not None, args=args, aux_loss_enabled=False,
        vllm_importance_sampling_correction=True, epsilon_low=loss.epsilon,
        epsilon_high=loss.epsilon if loss.epsilon_high is None else loss.epsilon_high,
        off_policy_mask_threshold=loss.off_policy_mask_threshold,
        top_entropy_quantile=options.get("trains", 1.0),
        max_completion_length=loss.max_completion_length,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        get_off_policy_mask=kind.get_off_policy_mask, get_gamma_weights=kind.get_gamma_weights,
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *a: kind.get_high_entropy_mask(trainer, *a)
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask,
        "completion_mask": mask, "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"], "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": batch["ref_logprobs"],
        "sampling_per_token_logps": batch["logprobs"],
    }  # fmt: skip
    if mode is not None:
        # These lines are in the middle of a long method of trl.
        ratio = (batch["old_logprobs"] - batch["logprobs"]) * mask
        ratio = (ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else ratio).exp()
        high = loss.importance_sampling_clip_max
        cut = ratio.clamp(max=high) if "truncate" in mode else ratio.masked_fill(ratio > high, 0)
        inputs["importance_sampling_ratio"] = cut
    value = kind._compute_loss(trainer, None, inputs)
    value.backward()
    assert logprobs.grad is not None
    return [value.detach(), logprobs.grad]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl_for_any_parts(case: str) -> None:
    """Also by two ranks with two micro-batches each, of which one has no token, and of a loss by
    rows with other numbers of rows."""
    options, expected = CASES[case]
    batch, loss = _batch(options), _loss(options)
    whole = _gradient(loss, batch, [slice(None)])
    assert whole[0].item() == pytest.approx(expected, abs=1e-6)
    for ends in ((0, 2, 4, 6, 8), (0, 1, 4, 6, 7, 8)):
        parts = [slice(*pair) for pair in pairwise(ends)]
        # fp32, sums in another order
        torch.testing.assert_close(_gradient(loss, batch, parts), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_trl(case: str) -> None:
    options, expected = CASES[case]
    batch = _batch(options)
    theirs = _of_trl(options, batch)
    assert theirs[0].item() == pytest.approx(expected, abs=1e-6)
    own = _gradient(_loss(options), batch, [slice(None)])
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)


def test_places_without_a_sampled_token_may_hold_anything() -> None:
    """Also those of which another sampler knows no log-probability."""
    options = {"beta": 0.1, "importance_sampling_correction": "sequence_mask", "loss_type": "sapo"}
    batch, loss = _batch(options), _loss(options)
    expected = _gradient(loss, batch, [slice(None)])
    unknown = batch["mask"] == 0
    for name in ("old_logprobs", "ref_logprobs", "logprobs"):
        batch[name] = batch[name].masked_fill(unknown, NAN)
    torch.testing.assert_close(_gradient(loss, batch, [slice(None)]), expected)
    batch["logprobs"][0, 0] = NAN
    assert all(value.isfinite().all() for value in _gradient(loss, batch, [slice(None)]))


def test_without_old_scores_the_ratio_is_one() -> None:
    batch = _batch({})
    del batch["old_logprobs"]
    total, weight = PolicyLoss()(batch["now"], batch)
    by_row = (batch["mask"].sum(1) * batch["advantages"]).sum()
    assert total.item() == pytest.approx(-by_row.item(), rel=1e-6)
    assert weight.item() == batch["mask"].sum()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "luspo", "sapo", *BY_TOKENS])
def test_the_weight_counts_rows_or_tokens(name: Any) -> None:
    """Rows without a token count in a mean over rows."""
    loss = PolicyLoss(loss_type=name, epsilon_high=5.0)
    assert loss.weight(_batch({})["mask"]).item() == (40 if name in BY_TOKENS else ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "bnpo"}, "tokens of a micro-batch.*dapo"),
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; must be one of grpo, "),
        ({"loss_type": "cispo"}, "largest ratio itself.*Set epsilon_high to 5.0"),
        ({"importance_sampling_level": "row"}, "must be one of token, sequence"),
        ({"importance_sampling_correction": "mask"}, "must be one of token_truncate, "),
        (
            {"loss_type": "vespo", "importance_sampling_correction": "sequence_mask"},
            "Set it to token_truncate or token_mask",
        ),
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"max_completion_length": 0}, "max_completion_length is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(**options)


REWARDS = torch.tensor(
    [1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, NAN, 0.25, 1, -1, NAN, NAN, NAN, 2, NAN, NAN, NAN, NAN]
)
GROUPS = torch.arange(20) // 4


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale: Any) -> None:
    """With equal rewards, rows without a reward, groups with one reward and with none."""
    nanstd = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).nanstd
    rows = REWARDS.view(-1, 4)
    expected = REWARDS - torch.nanmean(rows, dim=1).repeat_interleave(4)
    if scale != "none":
        of_groups = nanstd(rows, dim=1).repeat_interleave(4)
        expected = expected / ((of_groups if scale == "group" else nanstd(REWARDS)) + 1e-4)
    own = advantages(REWARDS, GROUPS, scale=scale)
    torch.testing.assert_close(own, expected.nan_to_num(0.0), rtol=1e-6, atol=1e-7)


def test_advantages_by_hand() -> None:
    """Groups in any order and of any size."""
    rewards = torch.tensor([3.0, 10, 1, 20, 2, NAN])
    groups = torch.tensor([7, 2, 7, 2, 7, 7])
    expected = {
        ("grpo", "none"): [1.0, -5, -1, 5, 0, 0],
        ("grpo", "group"): [0.9999, -0.7071, -0.9999, 0.7071, 0, 0],
        ("grpo", "batch"): [0.1253, -0.6265, -0.1253, 0.6265, 0, 0],
        ("rloo", "group"): [1.5, -10, -1.5, 10, 0, 0],
        ("reinforce_pp", "group"): [0.2774, -1.3868, -0.2774, 1.3868, 0, 0],
    }
    for (kind, scale), values in expected.items():
        own: Any = advantages(rewards, groups, kind=kind, scale=scale)  # type: ignore[arg-type]
        assert own.tolist() == pytest.approx(values, abs=1e-4), kind
    assert without_signal(REWARDS, GROUPS).item() == pytest.approx(3 / 5)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
def test_equal_rewards_have_no_advantage(kind: Any) -> None:
    """Their mean in fp32 is another number, which a deviation of almost 0 would magnify."""
    own = advantages(torch.full((7,), 1000.1), torch.zeros(7, dtype=torch.int64), kind=kind)
    assert own.abs().max() < 1e-6


def test_names_of_advantages() -> None:
    assert check_advantage("rloo", True) == ("rloo", "group")
    assert check_advantage("grpo", False) == ("grpo", "none")
    with pytest.raises(ConfigError, match="must be one of grpo, rloo, reinforce_pp"):
        check_advantage("gae", True)
    with pytest.raises(ConfigError, match="for the advantage grpo alone"):
        check_advantage("rloo", "batch")


def test_trl_has_these_defaults() -> None:
    """Except for names that the module's text explains."""
    config = pytest.importorskip("trl.trainer.grpo_config", exc_type=ImportError)
    theirs = importlib.import_module("dataclasses").fields(config.GRPOConfig)
    defaults = {field.name.removeprefix("vllm_"): field.default for field in theirs}
    own = {n: v for n, v in vars(PolicyLoss()).items() if n != "importance_sampling_correction"}
    assert own.items() <= defaults.items()
