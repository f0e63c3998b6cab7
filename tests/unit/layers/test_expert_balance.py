"""Balance of experts on one process: counts of a step, biases, what a layer logs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe import balance_experts, updated_expert_bias
from megatron_lightning.layers.moe.balance import ExpertBalance
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.step_report import Key, StepReport, add_up, reduced
from tests.helpers.layouts import tiny_config

HIDDEN, EXPERTS, K = 8, 4, 2
GLOBAL: dict[str, Any] = {"router_load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.5}
BIAS: dict[str, Any] = {"router_enable_expert_bias": True, "router_score_function": "sigmoid"}


def _layer(**moe: Any) -> MoELayer:
    torch.manual_seed(0)
    config = tiny_config(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, vocab_size=8,
        max_sequence_length=8, ffn_hidden_size=16,
        moe=MoEConfig(num_experts=EXPERTS, router_topk=K, **moe),
    )  # fmt: skip
    assert config.moe is not None
    layer = MoELayer(config, config.moe)
    nn.init.normal_(layer.router.weight)
    return layer


def _batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 2, HIDDEN, generator=generator) for _ in range(number)]


def _expected(layer: MoELayer, batches: list[Tensor]) -> list[float]:
    """Return the loss of every micro-batch, with the counts of those before it."""
    losses, counts = [], torch.zeros(EXPERTS)
    for batch in batches:
        logits = batch.flatten(0, 1) @ layer.router.weight.t()
        chosen = logits >= logits.sort(-1, True).values[:, K - 1, None]
        counts += chosen.sum(0)
        means = logits.detach().softmax(-1).mean(0)
        losses.append(0.5 * EXPERTS * float((counts / counts.sum() * means).sum()))
    return losses


def _logged(layer: MoELayer, name: str) -> float:
    found = reduced(add_up({"mlp.report": layer.report}, [1.0]), 1.0)
    return float(next(value for key, value in found.items() if key.label == name))


def test_counts_of_the_global_batch_grow_within_a_step() -> None:
    layer, batches = _layer(**GLOBAL), _batches(3)
    balance = ExpertBalance(layer, lambda counts: counts)
    for _ in range(2):  # a step begins anew
        found = []
        for batch in batches:
            layer(batch)
            found.append(_logged(layer, "global_aux_loss"))
        assert found == pytest.approx(_expected(layer, batches), rel=1e-6)
        balance.end_step(stepped=True)


def test_biases_of_frozen_routers_stay() -> None:
    """Adapters and ``freeze`` leave the base's own choice of experts as it is."""
    layer = _layer(router_enable_expert_bias=True, router_score_function="sigmoid")
    balance = ExpertBalance(layer, lambda counts: counts)
    for frozen in (True, False):
        layer.requires_grad_(not frozen)
        for batch in _batches(2):
            layer(batch)
        balance.end_step(stepped=True)
        assert layer.router.expert_bias is not None
        assert bool(layer.router.expert_bias.any()) is not frozen


def test_a_recomputation_gets_what_the_first_forward_of_its_micro_batch_got() -> None:
    gradients = []
    for recompute in (False, True):
        layer = _layer(**GLOBAL)
        outputs = []
        for index, batch in enumerate(_batches(3)):
            layer.report.microbatch.index = index
            outputs.append(
                checkpoint(layer, batch, use_reentrant=False) if recompute else layer(batch)
            )
        for index in (0, 2, 1):
            layer.report.microbatch.index = index
            outputs[index].square().sum().backward()
        gradients.append(layer.router.weight.grad)
        assert layer.global_counts._sum is not None
        assert int(layer.global_counts._sum.sum()) == 3 * 12 * K
        assert int(layer.report.counts["tokens_per_expert"].sum()) == 3 * 12 * K
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0.0)


def test_a_layer_that_runs_twice_in_a_micro_batch_is_not_recomputed() -> None:
    layer, (batch,) = _layer(**GLOBAL), _batches(1)
    layer(layer(batch)).sum().backward()
    out = checkpoint(layer, checkpoint(layer, batch, use_reentrant=False), use_reentrant=False)
    with pytest.raises(ConfigError, match="ran 4 times in one micro-batch and is recomputed"):
        out.sum().backward()


def test_copies_count_for_themselves() -> None:
    layer = _layer(**GLOBAL)
    copied = copy.deepcopy(layer)
    assert copied.router.global_counts is copied.global_counts is not layer.global_counts
    for batch in _batches(2):
        layer(batch)
    copied(_batches(1)[0])
    assert _logged(copied, "global_aux_loss") == pytest.approx(
        _expected(layer, _batches(1))[0], rel=1e-6
    )


# ------------------------------------------------------------------------------------------- biases


class _Module(nn.Module):
    """As much of a LightningModule as :func:`balance_experts` asks for."""

    def __init__(self, **moe: Any) -> None:
        super().__init__()
        self.mlp = _layer(**moe)
        strategy = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
        self.trainer = SimpleNamespace(strategy=strategy, world_size=1)


def test_biases_follow_the_tokens_of_a_step_that_was_taken() -> None:
    module = _Module(**BIAS)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    bias = module.mlp.router.expert_bias
    assert bias is not None
    routed = [module.mlp.router(batch).tokens_per_expert for batch in _batches(3)]
    for batch in _batches(2):
        module.mlp(batch)
    with balance_experts(module, optimizer):
        optimizer.step()
    expected = updated_expert_bias(
        torch.zeros(EXPERTS), routed[0] + routed[1], module.mlp.router.moe
    )
    assert torch.equal(bias, expected) and bias.any()
    # A scaler skips the step: neither now nor later do its tokens count.
    module.mlp(_batches(3)[2])
    with balance_experts(module, optimizer):
        pass
    with balance_experts(module, optimizer):
        optimizer.step()
    assert torch.equal(bias, expected)
    assert module.mlp.router.expert_bias is bias and "mlp.router.expert_bias" in module.state_dict()


def test_evaluation_does_not_count() -> None:
    module = _Module(**BIAS)
    module.eval()
    module.mlp(_batches(1)[0])
    assert not module.mlp.report.counts


# ------------------------------------------------------------------------------------------- logged


def test_load_and_drops_of_a_layer() -> None:
    layer, (batch,) = _layer(expert_capacity_factor=1.0), _batches(1)
    routing = layer.router(batch)
    counts = routing.tokens_per_expert.tolist()
    layer(batch)
    found = reduced(add_up({"mlp.report": layer.report}, [1.0]), 1.0)
    assert {key.label: float(value) for key, value in found.items()} == {
        "expert_load": pytest.approx(max(counts) / 6),
        "expert_load/mlp": pytest.approx(max(counts) / 6),
        "drop_rate": pytest.approx(sum(max(count - 6, 0) for count in counts) / 24),
        "drop_rate/mlp": pytest.approx(sum(max(count - 6, 0) for count in counts) / 24),
    }


def test_a_peak_is_of_sums_and_the_largest_of_the_layers() -> None:
    reports = {"a.report": StepReport(), "b.report": StepReport()}
    for index in range(2):
        for report in reports.values():
            report.microbatch.index = index
        reports["a.report"].value("load", torch.tensor([3 * index, 3, 0]), "peak")
        reports["b.report"].value("load", torch.tensor([4 - 4 * index, 4 * index]), "peak")
    found = reduced(add_up(reports, [0.3, 0.7]), 1.0)
    # [3, 6, 0] and [4, 4]
    expected = {"load": 2.0, "load/a": 2.0, "load/b": 1.0}
    assert {key.label: float(value) for key, value in found.items()} == expected
    nothing = {Key("load", "peak", "a", 2): torch.tensor([0.0, 0.0, 1.0])}
    assert [float(value) for value in reduced(nothing, 1.0).values()] == [0.0, 0.0]


def test_all_layers_share_one_collective() -> None:
    layers = nn.ModuleList([_layer(**BIAS), _layer(), _layer(**BIAS)])
    sent: list[Tensor] = []
    balance = ExpertBalance(layers, lambda counts: sent.append(counts) or 2 * counts)
    for layer, batch in zip(layers, _batches(3), strict=True):
        layer(batch)
    balance.end_step(stepped=True)
    assert [len(counts) for counts in sent] == [2 * EXPERTS]
    assert layers[0].router.expert_bias.any() and layers[2].router.expert_bias.any()
    before = layers[0].router.expert_bias.clone()
    balance.end_step(stepped=False)  # nothing to send
    balance.end_step(stepped=True)  # of another optimizer, without tokens since
    assert len(sent) == 2 and torch.equal(layers[0].router.expert_bias, before)
