"""Who waits for parameters that are gathered beside the forward: whoever reads them, also without a
call of their module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.optim.gradients.param_gather import ParameterGather


class _Way:
    """A gather on its way: the parameter is NaN until somebody has waited."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._value = parameter, parameter.detach().clone()
        parameter.data.fill_(torch.nan)

    def wait(self) -> None:
        self._parameter.data.copy_(self._value)


class _Bucket:
    """One parameter, as the gather sees it."""

    sharded = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters, self.gathering = [parameter], None

    def record_gathered(self) -> None:
        """Nobody asks for it."""


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class _Reading(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight)


class _Borrowed(nn.Module):
    """Two modules read the weight of a third, which is never called; the one that owns it is called
    last."""

    def __init__(self) -> None:
        super().__init__()
        table = nn.Embedding(4, 4)
        self.first, self.second = _Reading(table), nn.Sequential(_Reading(table))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(x))


class _Sometimes(nn.Module):
    """Calls a layer in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.steps = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.first(x) if self.steps % 2 else self.second(x)


def _gather(module: nn.Module) -> tuple[ParameterGather, list[_Bucket]]:
    buckets = [_Bucket(parameter) for parameter in module.parameters()]
    reducer: Any = SimpleNamespace(buckets=buckets)
    return ParameterGather(reducer, module), buckets


def _start(gather: ParameterGather, buckets: list[_Bucket]) -> None:
    """Do what a step of the optimizer does, whose gathers complete at once until it is known who
    waits."""
    for bucket in buckets:
        bucket.gathering = _Way(bucket.parameters[0])
    if not gather._overlapped:
        gather.wait()


@pytest.mark.parametrize(
    "inner",
    [
        _Attention,
        _Borrowed,
        _Sometimes,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Identity,
    ],
    ids=["attention", "borrowed", "sometimes", "weight-norm", "nothing"],
)
def test_every_reader_waits(inner: Any) -> None:
    root = nn.Module()
    root.model = nn.Sequential(nn.Linear(4, 4), inner())
    root.scale = nn.Parameter(torch.ones(4))  # of a module that is entered without a call
    gather, buckets = _gather(root)
    x = torch.randn(2, 3, 4)
    for step in range(4):
        _start(gather, buckets)
        gather.begin_step()
        assert (root.model(x) * root.scale).isfinite().all()
        root.model.eval()
        with torch.no_grad():
            gather.wait()
            root.model(x)
        root.model.train()
        if step == 0:
            assert not gather._overlapped  # what is called is only known now
        else:
            assert gather._overlapped
    assert root.model[0]._forward_pre_hooks
    gather.detach()
    assert not any(module._forward_pre_hooks for module in root.modules())


def test_modules_wait_for_their_own_parameters_alone() -> None:
    root = nn.Module()
    root.model = nn.Sequential(nn.Linear(4, 4), _Attention(), nn.Linear(4, 4))
    gather, buckets = _gather(root)
    under_way: list[int] = []
    root.model[1].register_forward_pre_hook(
        lambda *_: under_way.append(sum(b.gathering is not None for b in buckets))
    )
    for _ in range(3):
        _start(gather, buckets)
        gather.begin_step()
        root.model(torch.randn(2, 3, 4))
    # In the third step, the four parameters of the attention and those of the last layer.
    assert under_way == [0, 0, 6]


def test_old_weight_norm_computes_its_weight_after_the_wait() -> None:
    root = nn.Module()
    with pytest.warns(FutureWarning):
        # By a hook before the forward, which was there first.
        root.model = nn.utils.weight_norm(nn.Linear(4, 4))
    gather, buckets = _gather(root)
    for _ in range(3):
        _start(gather, buckets)
        gather.begin_step()
        assert root.model(torch.randn(2, 4)).isfinite().all()


def test_without_a_known_reader_nothing_is_left_on_its_way() -> None:
    root = nn.Module()
    root.layer = nn.Linear(4, 4)
    gather, buckets = _gather(root)
    for _ in range(3):
        _start(gather, buckets)
        gather.begin_step()
        assert F.linear(torch.randn(2, 4), root.layer.weight).isfinite().all()


def test_a_weight_that_was_read_too_early_is_no_silent_mistake() -> None:
    root = nn.Module()
    root.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gather, buckets = _gather(root)
    for step in range(3):
        _start(gather, buckets)
        gather.begin_step()
        penalty = root.model[1].weight.square().sum()
        loss = root.model(torch.randn(2, 4)).sum() + penalty
        if step < 2:
            loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
