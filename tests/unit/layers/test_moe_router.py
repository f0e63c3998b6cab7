"""Routing against megatron-core's recorded values (``tests/oracles/moe_router.json``) and a dense
reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe import (
    Router,
    auxiliary_loss,
    choose_experts,
    expert_capacity,
    route,
    updated_expert_bias,
    z_loss,
)
from tests.helpers.moe import EARLY, KINDS, SIGMOID, best_scores, config, dense_route

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "moe_router.json").read_text())[
    "facts"
]
LOGITS, BIAS = torch.tensor(ORACLE["logits"]), torch.tensor(ORACLE["expert_bias"])
# Six or seven recorded digits.
RECORDED = {"rtol": 1e-5, "atol": 1e-6}
NAMES = {
    "topk": "router_topk", "use_pre_softmax": "router_pre_softmax",
    "score_function": "router_score_function", "num_groups": "router_num_groups",
    "group_topk": "router_group_topk",
}  # fmt: skip


# --- values of megatron-core -----------------------------------------------------------------


@pytest.mark.parametrize("case", ORACLE["routing"], ids=lambda c: str(c["args"]))
def test_routing_equals_megatron_core(case: dict[str, Any]) -> None:
    args = dict(case["args"])
    bias = BIAS if args.pop("expert_bias", False) else None
    options = {NAMES[name]: given for name, given in args.items()}
    # The softmax over one expert is recorded as 1; configurations refuse it.
    late_top1 = options == {"router_topk": 1}
    probs, chosen = route(LOGITS, config(**options, **(EARLY if late_top1 else {})), bias)
    if late_top1:
        probs = chosen.float()
    torch.testing.assert_close(probs, torch.tensor(case["probs"]), **RECORDED)
    assert torch.equal(chosen, torch.tensor(case["map"]).bool())
    assert chosen.sum(0).tolist() == case["tokens_per_expert"]


@pytest.mark.parametrize("case", ORACLE["aux_loss"], ids=lambda c: c["score_function"])
def test_auxiliary_loss_equals_megatron_core(case: dict[str, Any]) -> None:
    moe = config(
        router_topk=case["topk"], router_score_function=case["score_function"],
        router_pre_softmax=True, aux_loss_coeff=0.01,
    )  # fmt: skip
    scores, counts = best_scores(LOGITS, moe)
    torch.testing.assert_close(scores[:1], torch.tensor(case["scores_row0"]), **RECORDED)
    assert counts.tolist() == case["tokens_per_expert"]
    expected = torch.tensor(case["aux_loss_coeff_0.01"])
    torch.testing.assert_close(auxiliary_loss(scores, counts, moe), expected, **RECORDED)
    layer = Router(8, moe)  # with the oracle's logits as its outputs
    layer.weight.data = torch.eye(8)
    (loss,) = layer(LOGITS[:, None]).losses
    torch.testing.assert_close(loss.weighted, expected, **RECORDED)


def test_z_loss_equals_megatron_core() -> None:
    moe = config(z_loss_coeff=1e-3)
    expected = torch.tensor(ORACLE["z_loss_coeff_1e-3"])
    torch.testing.assert_close(z_loss(LOGITS, moe), expected, **RECORDED)
    layer = Router(8, moe)
    layer.weight.data = torch.eye(8)
    (loss,) = layer(LOGITS[:, None]).losses
    assert loss.name == "z_loss" and loss.coefficient == 1e-3
    torch.testing.assert_close(loss.weighted, expected, **RECORDED)


@pytest.mark.parametrize("case", ORACLE["capacity"], ids=str)
def test_capacity_equals_megatron_core(case: list[Any]) -> None:
    num_tokens, num_experts, factor, _, expected = case
    moe = MoEConfig(
        num_experts=num_experts, router_topk=1, router_pre_softmax=True,
        expert_capacity_factor=factor,
    )  # fmt: skip
    assert expert_capacity(num_tokens, moe) == expected


@pytest.mark.parametrize(
    "case", ORACLE["token_dropping_topk2"], ids=lambda c: f"{c['policy']}-{c['capacity_factor']}"
)
def test_dropping_equals_megatron_core(case: dict[str, Any]) -> None:
    moe = config(
        expert_capacity_factor=case["capacity_factor"], token_drop_policy=case["policy"],
        pad_expert_input_to_capacity=case["pad"],
    )  # fmt: skip
    probs, chosen = route(LOGITS, moe)
    expected = torch.tensor(case["map"]).bool()
    if case["policy"] == "position" and case["capacity_factor"] < 1.5:
        # megatron-core takes the topk of ones, so any tokens may stay (for expert 6 the 1st and
        # 3rd of four); here the last are dropped, as its documentation says.
        assert torch.equal(chosen.sum(0), expected.sum(0))
        return
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(probs, torch.tensor(case["probs"]), **RECORDED)


def test_bias_update_equals_megatron_core() -> None:
    before = BIAS.clone()
    counts = torch.tensor(ORACLE["routing"][1]["tokens_per_expert"])
    moe = config(**SIGMOID, router_enable_expert_bias=True)
    expected = torch.tensor(ORACLE["expert_bias_update_1e-3"])
    torch.testing.assert_close(updated_expert_bias(BIAS, counts, moe), expected, **RECORDED)
    assert torch.equal(BIAS, before), "the bias was changed in place"
    # All layers at once; and counts of which fp32 knows no neighbors.
    both = updated_expert_bias(torch.stack((BIAS, BIAS)), torch.stack((counts, counts)), moe)
    torch.testing.assert_close(both, torch.stack((expected, expected)), **RECORDED)
    many = torch.full((8,), 2**40)
    many[0] += 1
    moved = updated_expert_bias(torch.zeros(8), many, moe).sign()
    assert moved.tolist() == [-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


# --- values and gradients of a dense reference ---------------------------------------------------


@pytest.mark.parametrize(
    ("options", "with_bias"),
    [(options, False) for options in KINDS]
    + [(o, True) for o in KINDS if SIGMOID.items() <= o.items()],
    ids=str,
)
def test_values_and_gradients_equal_the_dense_reference(
    options: dict[str, Any], with_bias: bool
) -> None:
    moe = config(**options)
    bias = BIAS.double() if with_bias else None
    weights = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, gradients = [], []
    for function in (route, dense_route):
        logits = LOGITS.double().requires_grad_()
        probs, chosen = function(logits, moe, bias)
        (probs * weights).sum().backward()
        found.append((probs.detach(), chosen))
        gradients.append(logits.grad)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-14)
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].sum(1).eq(moe.router_topk).all()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_gradients_equal_differences(options: dict[str, Any]) -> None:
    logits = LOGITS[:4].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route(x, config(**options))[0], logits)


# --- capacity --------------------------------------------------------------------------------


def capacity_config(**options: Any) -> MoEConfig:
    return MoEConfig(
        **{"num_experts": 2, "router_topk": 1, "router_pre_softmax": True, **options}
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "kept"), [("probs", [1, 3, 4]), ("position", [0, 1, 2])])
def test_the_policy_says_who_is_dropped(policy: Any, kept: list[int]) -> None:
    moe = capacity_config(expert_capacity_factor=1.2, token_drop_policy=policy)
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0, 5.0]).requires_grad_()
    probs, chosen = route(torch.stack((logits, torch.zeros(5)), 1), moe)
    assert expert_capacity(5, moe) == 3
    assert chosen[:, 0].nonzero().flatten().tolist() == kept and not chosen[:, 1].any()
    assert torch.equal(probs > 0, chosen)
    probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.nonzero().flatten().tolist() == kept  # a dropped token has no gradient


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("num_tokens", [5, 200])  # topk has other algorithms for more
def test_of_equal_tokens_the_last_are_dropped(policy: Any, num_tokens: int) -> None:
    moe = capacity_config(expert_capacity_factor=0.8, token_drop_policy=policy)
    _, chosen = route(torch.tensor([[90.0, 0.0]]).expand(num_tokens, 2), moe)
    capacity = expert_capacity(num_tokens, moe)
    assert chosen[:, 0].nonzero().flatten().tolist() == list(range(capacity or 0))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 100.0])
def test_padding_fills_every_expert_with_tokens_of_probability_zero(
    policy: Any, factor: float
) -> None:
    options: dict[str, Any] = {"expert_capacity_factor": factor, "token_drop_policy": policy}
    probs, chosen = route(LOGITS, config(**options))
    padded_probs, padded = route(LOGITS, config(**options, pad_expert_input_to_capacity=True))
    assert padded.sum(0).tolist() == [min(expert_capacity(12, config(**options)) or 0, 12)] * 8
    assert torch.equal(padded_probs, probs) and (padded | ~chosen).all()


# --- edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("capacity", [{}, {"expert_capacity_factor": 1.0}])
def test_no_tokens(options: dict[str, Any], capacity: dict[str, Any]) -> None:
    moe = config(**options, **capacity)
    probs, chosen = route(torch.zeros(0, 8), moe)
    assert probs.shape == chosen.shape == (0, 8)
    assert expert_capacity(0, moe) == (0 if capacity else None)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_one_expert(function: Any) -> None:
    moe = MoEConfig(
        num_experts=1, router_topk=1, router_pre_softmax=True, router_score_function=function,
        aux_loss_coeff=1.0,
    )  # fmt: skip
    probs, chosen = route(LOGITS[:, :1], moe)
    torch.testing.assert_close(probs, dense_route(LOGITS[:, :1], moe)[0])
    assert chosen.all()
    assert auxiliary_loss(torch.ones(12, 1), torch.tensor([12]), moe).item() == pytest.approx(1.0)


def test_ties_choose_different_experts_and_equal_rows_the_same_ones() -> None:
    for options in KINDS:
        moe = config(**options)
        _, chosen = route(torch.zeros(300, 8), moe)
        assert chosen.sum(1).eq(moe.router_topk).all() and chosen.eq(chosen[0]).all()
        assert torch.equal(route(torch.zeros(1, 8), moe)[1], chosen[:1])


def test_experts_without_tokens_get_no_probability_and_no_gradient() -> None:
    logits = torch.cat((LOGITS[:, :6], torch.full((12, 2), -30.0)), 1).requires_grad_()
    probs, chosen = route(logits, config(**SIGMOID))
    probs.square().sum().backward()
    assert logits.grad is not None
    assert not chosen[:, 6:].any() and not probs[:, 6:].any() and not logits.grad[:, 6:].any()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_bf16_logits_are_scored_in_fp32(options: dict[str, Any]) -> None:
    moe, logits = config(**options), LOGITS.bfloat16()
    probs, chosen = route(logits, moe)
    expected, expected_chosen = route(logits.float(), moe)
    assert probs.dtype == torch.bfloat16 and torch.equal(chosen, expected_chosen)
    assert torch.equal(probs, expected.bfloat16())


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[-200.0, 200.0, 0.0, -150.0, 150.0, 1.0, 2.0, -300.0]])
    for options in KINDS:
        x = logits.clone().requires_grad_()
        probs, _ = route(x, config(**options))
        probs.square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and probs.isfinite().all()


def test_the_decision_is_replaceable() -> None:
    def two_first(scores: Tensor, moe: MoEConfig) -> Tensor:
        assert not scores.requires_grad
        return torch.arange(moe.router_topk).expand(len(scores), -1)

    logits = LOGITS.clone().requires_grad_()
    probs, chosen = route(logits, config(), choose=two_first)
    torch.testing.assert_close(probs[:, :2], logits[:, :2].softmax(-1))
    assert chosen[:, :2].all() and not chosen[:, 2:].any() and probs.requires_grad
    out = Router(6, config(), choose=two_first)(torch.randn(4, 1, 6))
    assert out.tokens_per_expert.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    recorded = choose_experts(LOGITS, config())
    replayed = route(LOGITS.flip(0), config(), choose=lambda *_: recorded)[1]
    assert torch.equal(replayed, route(LOGITS, config())[1])


def test_wrong_arguments_name_value_and_fix() -> None:
    with pytest.raises(ConfigError, match=r"\[12, 8\], and moe.num_experts is 4.*\[tokens, 4\]"):
        route(LOGITS, config(num_experts=4))
    with pytest.raises(ConfigError, match=r"logits have the shape \[3, 4, 8\]"):
        route(LOGITS.view(3, 4, 8), config())
    with pytest.raises(ConfigError, match=r"expert_bias with.*softmax.*Set router_score_function"):
        route(LOGITS, config(), BIAS)
    with pytest.raises(ConfigError, match=r"shape \[5\], and moe.num_experts is 8.*Pass \[8\]"):
        route(LOGITS, config(router_score_function="sigmoid"), BIAS[:5])
    several = config(
        router_load_balancing_type=["aux_loss", "seq_aux_loss"], aux_loss_coeff=[0.1, 0.2]
    )
    with pytest.raises(ConfigError, match="Pass kind"):
        auxiliary_loss(LOGITS.softmax(-1), torch.ones(8), several)
    scores = LOGITS.softmax(-1), torch.full((8,), 3)
    one = auxiliary_loss(*scores, several, kind="aux_loss")
    torch.testing.assert_close(auxiliary_loss(*scores, several, kind="seq_aux_loss"), 2 * one)
