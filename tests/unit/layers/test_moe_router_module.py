"""The router's module: losses, counts, dtypes, random streams and its saved bias."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.layers.moe import (
    Router,
    Routing,
    auxiliary_loss,
    route,
)
from megatron_lightning.parallel.random.rng import RngStreams
from tests.helpers.moe import EARLY, SIGMOID, config, dense_loss, dense_route


def value(routing: Routing, name: str) -> Tensor:
    (found,) = [loss.value for loss in routing.losses if loss.name == name]
    return found


def router(hidden_size: int = 6, dtype: torch.dtype = torch.float32, **options: Any) -> Router:
    torch.manual_seed(3)
    return Router(hidden_size, config(**options), init_method_std=1.0).to(dtype)


@pytest.mark.parametrize("options", [{}, EARLY, SIGMOID, {"router_score_function": "sqrtsoftplus"}])
def test_the_router_s_gradients_equal_the_dense_reference(options: dict[str, Any]) -> None:
    layer = router(
        dtype=torch.float64, router_dtype="fp64", z_loss_coeff=1e-2, aux_loss_coeff=[0.1, 0.2, 0.3],
        router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"], **options,
    )  # fmt: skip
    hidden = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(15, 8, dtype=torch.float64)
    out = layer(hidden)
    total = (out.probs * weights).sum() + sum(loss.weighted for loss in out.losses)
    ours = torch.autograd.grad(total, (hidden, layer.weight))

    logits = hidden @ layer.weight.t()
    flat = logits.flatten(0, 1)
    sequences = torch.stack([dense_loss(logits[:, i], layer.moe) for i in range(3)])
    losses = {
        "aux_loss": dense_loss(flat, layer.moe), "seq_aux_loss": sequences.mean(),
        "global_aux_loss": dense_loss(flat, layer.moe),
        "z_loss": flat.logsumexp(-1).square().mean(),
    }  # fmt: skip
    assert [loss.name for loss in out.losses] == list(losses)
    for name, expected in losses.items():
        torch.testing.assert_close(value(out, name), expected, rtol=1e-12, atol=0.0)
    expected = (
        (dense_route(flat, layer.moe)[0] * weights).sum() + 0.1 * losses["aux_loss"]
        + 0.2 * losses["seq_aux_loss"] + 0.3 * losses["global_aux_loss"] + 0.01 * losses["z_loss"]
    )  # fmt: skip
    theirs = torch.autograd.grad(expected, (hidden, layer.weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_balanced_experts_have_a_loss_of_one_and_a_gradient_away_from_the_full_ones() -> None:
    moe = MoEConfig(num_experts=4, router_topk=1, router_pre_softmax=True, aux_loss_coeff=1.0)
    scores = torch.full((8, 4), 0.25, requires_grad=True)
    assert auxiliary_loss(scores, torch.tensor([2, 2, 2, 2]), moe).item() == pytest.approx(1.0)
    auxiliary_loss(scores, torch.tensor([8, 0, 0, 0]), moe).backward()
    assert scores.grad is not None and (scores.grad[:, 0] > scores.grad[:, 1]).all()


# --- parts of a loss on several ranks ------------------------------------------------------------


def test_parts_of_the_losses_add_up_to_the_losses_of_all_tokens() -> None:
    """Sequences divided over ranks: a rank sums counts over all, and its own scores."""
    options = {
        "z_loss_coeff": 0.1, "aux_loss_coeff": [1.0, 1.0],
        "router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    }  # fmt: skip
    layer = router(dtype=torch.float64, router_dtype="fp64", **options)
    hidden = torch.randn(6, 2, 6, dtype=torch.float64)
    is_padding = torch.zeros(6, 2, dtype=torch.bool)
    is_padding[3:, 1] = True  # ranks count different numbers of tokens
    full = layer(hidden, is_padding)
    full_gradient = torch.autograd.grad(sum(x.weighted for x in full.losses), layer.weight)[0]

    parts = [slice(0, 4), slice(4, 6)]
    local: list[Tensor] = []
    layer.sum_counts = lambda counts: local.append(counts) or counts
    for part in parts:
        layer(hidden[part], is_padding[part])
    total = sum(local)
    # In place, as some collectives do.
    layer.sum_counts = lambda counts: counts.copy_(total)
    found = [layer(hidden[part], is_padding[part]) for part in parts]
    for name in ("aux_loss", "seq_aux_loss", "z_loss"):
        added = sum(value(routing, name) for routing in found)
        torch.testing.assert_close(added, value(full, name), rtol=1e-12, atol=0.0)
    gradient = sum(
        torch.autograd.grad(sum(x.weighted for x in routing.losses), layer.weight)[0]
        for routing in found
    )
    torch.testing.assert_close(gradient, full_gradient, rtol=1e-11, atol=1e-14)
    # The reduced count does not replace the rank's own.
    assert [int(r.tokens_per_expert.sum()) for r in found] == [2 * 7, 2 * 2]
    assert torch.equal(sum(r.tokens_per_expert for r in found), full.tokens_per_expert)


def test_the_loss_of_a_global_batch_uses_its_counts() -> None:
    layer = router(router_load_balancing_type="global_aux_loss", aux_loss_coeff=0.5)
    hidden = torch.randn(4, 2, 6)
    alone = value(layer(hidden), "global_aux_loss")
    layer.global_counts = lambda counts: torch.full_like(counts, 2)
    (loss,) = layer(hidden).losses
    assert alone > 1.0 and loss.coefficient == 0.5
    # Of equal fractions, the sum of the scores remains: 8 tokens over 8 counted ones.
    assert loss.value.item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_padding_counts_in_no_loss_and_no_number(kind: Any) -> None:
    layer = router(router_load_balancing_type=kind, aux_loss_coeff=1.0, z_loss_coeff=1.0)
    hidden = torch.randn(5, 2, 6)
    padded = torch.cat((hidden, 10.0 * torch.randn(3, 2, 6)))
    is_padding = torch.arange(8)[:, None].expand(8, 2) >= 5
    with_padding, without = layer(padded, is_padding), layer(hidden)
    for one, other in zip(with_padding.losses, without.losses, strict=True):
        torch.testing.assert_close(one.value, other.value, rtol=1e-6, atol=0.0)
    assert torch.equal(with_padding.tokens_per_expert, without.tokens_per_expert)
    assert with_padding.chosen.sum() == 8 * 2 * 2  # they are computed all the same
    torch.testing.assert_close(with_padding.probs[:10], without.probs)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_takes_no_capacity(policy: str) -> None:
    """Both have a capacity of 1; the padding comes first, and some of it is more probable."""
    layer = router(expert_capacity_factor=0.5, token_drop_policy=policy)
    hidden = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(5)) * 0.1
    padded = torch.cat([hidden.new_zeros(2, 1, 6), hidden[:1] * 50, hidden])
    is_padding = (torch.arange(8) < 3)[:, None]
    with_padding, without = layer(padded, is_padding), layer(hidden)
    assert torch.equal(with_padding.chosen[3:], without.chosen)
    torch.testing.assert_close(with_padding.probs[3:], without.probs)
    assert torch.equal(with_padding.num_dropped, without.num_dropped)


def test_a_token_has_all_experts_of_a_route_or_none() -> None:
    layer, hidden = router(), torch.randn(1, 6).expand(4, 1, 6)
    chosen = layer(hidden).chosen
    free = (~chosen[0]).nonzero()[:2, 0].tolist()
    one, other = chosen[0].nonzero()[:, 0].tolist()
    given = torch.tensor([free, [one, -1], [other, -1], [-1, -1]])
    out = layer(hidden, given=given)
    assert out.chosen[0].nonzero()[:, 0].tolist() == free
    assert torch.equal(out.chosen[1:], chosen[1:])


def test_losses_ignore_bias_groups_and_dropping() -> None:
    plain = router(**SIGMOID, aux_loss_coeff=1.0)
    other = router(
        **SIGMOID, aux_loss_coeff=1.0, router_num_groups=4, router_group_topk=1,
        router_enable_expert_bias=True, expert_capacity_factor=0.5,
    )  # fmt: skip
    assert other.expert_bias is not None
    other.expert_bias.copy_(torch.linspace(-0.5, 0.5, 8))
    hidden = torch.randn(9, 2, 6)
    assert not torch.equal(plain(hidden).chosen, other(hidden).chosen)
    torch.testing.assert_close(value(plain(hidden), "aux_loss"), value(other(hidden), "aux_loss"))


def test_the_router_counts_what_is_wanted_and_what_is_dropped() -> None:
    hidden = torch.randn(12, 1, 6)
    free = router()(hidden)
    for pad in (False, True):
        out = router(expert_capacity_factor=0.5, pad_expert_input_to_capacity=pad)(hidden)
        assert torch.equal(out.tokens_per_expert, free.tokens_per_expert)
        assert out.num_dropped == (free.tokens_per_expert - 2).clamp(min=0).sum() > 0
    assert free.num_dropped == 0


@pytest.mark.parametrize("options", [{}, SIGMOID, {"expert_capacity_factor": 1.0}], ids=str)
def test_no_tokens_have_no_loss_and_a_gradient_of_zeros(options: dict[str, Any]) -> None:
    layer = router(
        **options, z_loss_coeff=1.0, aux_loss_coeff=[1.0, 1.0],
        router_load_balancing_type=["aux_loss", "seq_aux_loss"],
    )  # fmt: skip
    out = layer(torch.zeros(0, 2, 6))
    assert all(loss.value == 0.0 for loss in out.losses) and len(out.losses) == 3
    (out.probs.sum() + sum(loss.weighted for loss in out.losses)).backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_all_padding_has_no_loss() -> None:
    layer = router(router_load_balancing_type="seq_aux_loss", aux_loss_coeff=1.0, z_loss_coeff=1.0)
    out = layer(torch.randn(3, 2, 6), torch.ones(3, 2, dtype=torch.bool))
    assert all(loss.value == 0.0 for loss in out.losses) and not out.tokens_per_expert.any()


# --- the module ------------------------------------------------------------------------------


def test_the_product_is_fp32_or_fp64_under_autocast_as_well() -> None:
    hidden = torch.randn(7, 2, 6).bfloat16()
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        layer = router(dtype=torch.bfloat16, router_dtype=name, aux_loss_coeff=1.0)
        plain = layer(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            inside = layer(hidden)
        expected = route(hidden.flatten(0, 1).to(dtype) @ layer.weight.to(dtype).t(), layer.moe)
        for out in (plain, inside):
            assert out.probs.dtype == dtype == value(out, "aux_loss").dtype
            torch.testing.assert_close(out.probs, expected[0])
            assert torch.equal(out.chosen, expected[1])
        inside.probs.square().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16


def test_evaluation_has_no_losses_and_no_jitter() -> None:
    layer = router(input_jitter_eps=0.1, aux_loss_coeff=1.0, z_loss_coeff=1.0).eval()
    hidden = torch.randn(7, 2, 6)
    assert layer(hidden).losses == ()
    expected, _ = route(hidden.flatten(0, 1) @ layer.weight.t(), layer.moe)
    torch.testing.assert_close(layer(hidden).probs, expected)


def test_jitter_multiplies_the_input_by_draws_of_the_set_stream() -> None:
    layer = router(hidden_size=8, input_jitter_eps=0.1, router_topk=8)
    layer.weight.data = torch.eye(8)
    layer.streams = RngStreams(5, device=torch.device("cpu"))
    outside = torch.get_rng_state()
    logs = layer(torch.ones(400, 1, 8)).probs.log()
    assert torch.equal(torch.get_rng_state(), outside)
    # Differences within a row are those of two factors from 0.9 to 1.1.
    assert 0.18 < (logs.amax(1) - logs.amin(1)).max() < 0.2 + 1e-6
    layer.streams = RngStreams(5, device=torch.device("cpu"), tp_rank=1)
    assert not torch.equal(layer(torch.ones(400, 1, 8)).probs.log(), logs)


def test_forced_balance_uses_random_logits_with_the_gradient_of_the_real_ones() -> None:
    layer = router(router_force_load_balancing=True, input_jitter_eps=0.1)
    layer.streams = RngStreams(5, device=torch.device("cpu"))
    hidden = torch.ones(4000, 1, 6)  # all alike
    out = layer(hidden)
    assert out.tokens_per_expert.sub(1000).abs().max() < 120
    out.probs[:, 0].sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.any()


def test_the_bias_moves_choices_only_and_has_no_gradient() -> None:
    layer = router(**SIGMOID, router_enable_expert_bias=True)
    assert layer.expert_bias is not None and not layer.expert_bias.any()
    layer.expert_bias[3] = 10.0
    out = layer(torch.randn(9, 1, 6))
    assert out.tokens_per_expert[3] == 9
    assert out.probs[:, 3].max() < 1.0 and out.probs.sum(1).allclose(torch.ones(9))
    before = layer.expert_bias.clone()
    for _ in range(2):  # as in training and recomputation
        again = layer(torch.randn(9, 1, 6))
        assert again.tokens_per_expert.sum() == 18
    assert torch.equal(layer.expert_bias, before)


def test_the_bias_is_saved_and_stays_fp32() -> None:
    layer = router(**SIGMOID, router_enable_expert_bias=True)
    assert layer.expert_bias is not None
    layer.expert_bias.copy_(torch.arange(8) + 1e-4)
    expected = layer.expert_bias.clone()
    for cast in (torch.bfloat16, torch.float16, torch.float64):
        moved = copy.deepcopy(layer).to(cast)
        assert moved.weight.dtype == cast
        assert moved.expert_bias is not None and moved.expert_bias.dtype == torch.float32
        assert torch.equal(moved.expert_bias, expected)
    layer = layer.bfloat16()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = router(**SIGMOID, router_enable_expert_bias=True).bfloat16()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    assert loaded.expert_bias is not None and torch.equal(loaded.expert_bias, expected)
    assert set(layer.state_dict()) == {"weight", "expert_bias"}
    assert set(router().state_dict()) == {"weight"}


def test_a_router_on_meta_gets_a_bias_of_zeros() -> None:
    with torch.device("meta"):
        layer = Router(6, config(**SIGMOID, router_enable_expert_bias=True))
    assert layer.weight.is_meta and layer.weight.shape == (8, 6)
    layer.to_empty(device="cpu")
    assert layer.expert_bias is not None and not layer.expert_bias.any()


def test_initial_weights_are_normal() -> None:
    torch.manual_seed(0)
    layer = Router(4000, config(), init_method_std=0.03)
    assert layer.weight.std().item() == pytest.approx(0.03, rel=0.02)
    assert abs(layer.weight.mean().item()) < 1e-3
    assert "hidden_size=4000, num_experts=8" in str(layer)
