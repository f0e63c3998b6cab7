"""Slices of sharded parameters: those that are copies refuse writes, the others take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.stepping.reassigned_data import ShardedParameter
from tests.helpers.ranks import run_ranks

COPIES: list[Callable[[Any], object]] = [
    lambda w: w[2:].zero_(),
    lambda w: w[0].fill_(1.0),
    lambda w: w.data[2:].mul_(2.0),
    lambda w: w.narrow(0, 1, 2).add_(1.0),
    lambda w: w.chunk(2)[1].zero_(),
    lambda w: w[2:].t().zero_(),
    lambda w: w.view(-1)[:3].zero_(),
    lambda w: w.detach().diagonal().zero_(),
    lambda w: w[1].__setitem__(0, 1.0),
    lambda w: w[1].__iadd__(1.0),
]
VIEWS: list[Callable[[Any], object]] = [
    lambda w: w[:, 2:].zero_(),
    lambda w: w.t().mul_(2.0),
    lambda w: w.data.clamp_(max=3.0),
    lambda w: w.mul_(int(w[0, 1]) + 2),
    lambda w: w.add_(w[0].norm() + w[1:].sum().clamp_(max=1.0)),
]


def _write() -> tuple[list[bool], list[Any]]:
    mesh = init_device_mesh("cpu", (2,))

    def parameter() -> Any:
        made = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        made.__class__ = ShardedParameter
        return made

    refused, written = [], []
    for write in COPIES:
        with pytest.raises(ConfigError, match="into a slice or view of a parameter") as error:
            write(parameter())
        refused.append("load_state_dict" in str(error.value))
    for write in VIEWS:
        own = parameter()
        write(own)
        written.append(own.full_tensor().tolist())
    return refused, written


def test_writes_into_slices_reach_the_parameter_or_are_refused() -> None:
    expected = []
    for write in VIEWS:
        whole = torch.arange(16.0).view(4, 4)
        write(whole)
        expected.append(whole.tolist())
    for refused, written in run_ranks(2, _write):
        assert all(refused)
        assert written == expected
