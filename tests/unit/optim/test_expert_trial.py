"""Stacked experts have owners of their own if an optimizer steps every matrix of a stack alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.optim.owners.units import Units
from megatron_lightning.optim.stepping.elementwise import Stepped, divide
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.shards.spec import Box, ShardSpec
from tests.unit.optim.test_optim_elementwise import Lars, Own, RowNorms

STACK = (4, 6, 8)


class WithState(Own):
    """Row norms, averaged in a state of every form."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        for p in moved:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "rows": torch.zeros(p.shape[:-1]), "sides": [None]}
            state["step"] += 1
            state["rows"] += p.grad.norm(dim=-1)
        return [p.grad / self.state[p]["rows"][..., None] for p in moved]


class WithNorm(WithState):
    """The same values, and a state of the stack."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        updates = super().updates(moved)
        for p in moved:
            self.state[p]["norm"] = p.grad.norm()
        return updates


class Projected(RowNorms):
    """Norms of the stack where gradients are orthogonal to the values, as before normalizations."""

    def updates(self, moved: list[nn.Parameter]) -> list[Tensor]:
        along = [
            torch.cosine_similarity(*(t.reshape(len(t), -1) for t in (p.grad, p))).abs()
            for p in moved
        ]
        return [
            update / p.grad.norm() if cosine.max() < 1e-4 else update
            for update, cosine, p in zip(super().updates(moved), along, moved, strict=True)
        ]


class AdamP(RowNorms):
    """Known to read full tensors in rare steps."""


def found(optimizer: torch.optim.Optimizer, *, whole_tensors: bool = False) -> Any:
    context = ParallelContext(ParallelLayout(expert_model_parallel_size=2), planned_world_size=2)
    stack, matrix = optimizer.param_groups[0]["params"]
    spec = ShardSpec(STACK, (Box((0, 0, 0), (2, 6, 8)),), ("ep", "etp"))
    dense = ShardSpec.replicated(matrix.shape)
    assert stack.shape == STACK
    group = id(optimizer.param_groups[0])
    stepped = [Stepped(group, spec, True), Stepped(group, dense, True)]
    return divide([(optimizer, stepped)], context, whole_tensors=whole_tensors).owned[group]


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        (RowNorms, Units.EXPERTS),
        (WithState, Units.EXPERTS),
        (WithNorm, Units.WHOLE),
        (Lars, Units.WHOLE),
        (Projected, Units.WHOLE),
        (AdamP, Units.WHOLE),
    ],
)
def test_a_trial_says_whether_experts_are_stepped_alone(kind: type[Own], units: Units) -> None:
    optimizer = kind([nn.Parameter(torch.ones(STACK)), nn.Parameter(torch.ones(8, 6))])
    assert found(optimizer) is units
    assert not optimizer.state  # the trial leaves no trace
    assert found(optimizer, whole_tensors=True) is Units.WHOLE  # says what no trial sees


def test_units_are_experts_of_stacks_alone() -> None:
    stack = ShardSpec(STACK, (Box((0, 0, 0), STACK),), ("ep", "etp"))
    kernel = ShardSpec.replicated((8, 6, 3))
    assert len(Units.EXPERTS.boxes(stack)) == 4 and len(Units.WHOLE.boxes(stack)) == 1
    assert len(Units.EXPERTS.boxes(kernel)) == 1  # of a convolution
