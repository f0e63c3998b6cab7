"""Forwards that a pipeline cannot divide are refused with the unit and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import PP2, SINGLE, Layout, make_layout, run
from tests.lightning.vectors import VectorModule, loader


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Chain(nn.Module):
    """Four blocks and a head; what it does between them is ``call``'s."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.call(index, block, x)
        return self.head(x)

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Backwards(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Again(Chain):
    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(block(x)) if index == 1 else block(x)


class Dropped(Chain):
    """Skips a layer."""

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return x if index == 2 else block(x)


class Reentrant(Chain):
    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x.requires_grad_(), use_reentrant=True)


class Pair(NamedTuple):
    x: Tensor
    residual: Tensor


@dataclass
class State:
    x: Tensor
    past: list[Pair]
    scale: float = 1.0


class _Pairs(Block):
    def forward(self, x: Tensor) -> Any:
        return Pair(super().forward(x), x)


class Named(Chain):
    """The blocks return named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Pairs() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = pair = self.blocks[0](x)
        for block in self.blocks[1:]:
            pair = block(pair.x + 0.1 * first.residual)
        return self.head(pair.x)


class _States(Block):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.fills = fills

    def forward(self, state: State) -> Any:
        past = [*state.past, Pair(state.x, state.x.square())][-2:]
        x = super().forward(state.x + sum(pair.residual for pair in past)) * state.scale
        if not self.fills:
            return State(x, past, 0.5)
        state.x, state.past, state.scale = x, past, 0.5
        return state


class Stated(Chain):
    """The blocks hand on a dataclass, a new one or the one that they were given."""

    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_States(fills) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            state = block(state)
        return self.head(state.x * state.scale)


class _Fills(Block):
    def forward(self, state: State) -> Tensor:
        state.x = super().forward(state.x)
        return state.x


class Filled(Chain):
    """The blocks hand on a dataclass that they do not return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Fills() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            block(state)
        return self.head(state.x)


class _Local(Block):
    def forward(self, x: Tensor) -> Any:
        kind = dataclass(type("Hidden", (), {"__annotations__": {"x": Tensor}}))
        return kind(super().forward(x))


class OfLocalType(Chain):
    """The blocks return objects of types that have no name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Local() for _ in range(4))

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).x


class HeadFirst(Chain):
    """Registers the head before the blocks, as litgpt does."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


class _Appends(Block):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(super().forward(x + 0.1 * kept[-1] if kept else x))
        return kept[-1]


class Listed(Chain):
    """The blocks hand each other state in a list that the forward gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Appends() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return self.head(x)


class _Both(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Aliases(Chain):
    """The blocks return their input as well, into which the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Both() for _ in range(4))

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        out, given = block(x)
        given += 0.25
        return out + x


class Recurrent(Chain):
    """Has weights that torch keeps in lists as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])[:, 0]

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)[0] + x


class Hidden(Chain):
    """Hands a value around torch, where nothing can follow it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + torch.from_numpy(first.detach().numpy().copy()))


class Reads(Chain):
    """The last block reads a weight of the first."""

    def call(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x @ self.blocks[0].linear.weight if index == 3 else x)


class Leaks(Chain):
    """The last two blocks hand each other a tensor by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for index in range(4):
            self.blocks[index].register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, given: Any, output: Tensor) -> None:
        self.seen.append(output.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) + torch.stack(self.seen).sum()


class LeaksWithExample(VectorModule):
    def __init__(self) -> None:
        super().__init__(Leaks())
        self.example_input_array = torch.ones(2, 8)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "backwards": (
        lambda: VectorModule(Backwards()),
        r"called unit 'blocks.3' of the pipelined module in the place of 'blocks.0'",
    ),
    "again": (
        lambda: VectorModule(Again()),
        r"called unit 'blocks.1' .* in the place of 'blocks.2'.*Layers that are called again",
    ),
    "dropped": (
        lambda: VectorModule(Dropped()),
        r"called unit 'blocks.3' .* in the place of 'blocks.2'",
    ),
    "reentrant": (
        lambda: VectorModule(Reentrant()),
        r"'blocks.\d' runs without a graph .* use_reentrant=False",
    ),
    "of a local type": (
        lambda: VectorModule(OfLocalType()),
        r"unit 'blocks.\d' returns a Hidden, and only .* tuples and dataclasses that a module",
    ),
    "filled": (
        lambda: VectorModule(Filled()),
        r"unit 'blocks.\d' changes a State that it was given",
    ),
    "head first": (
        lambda: VectorModule(HeadFirst()),
        r"called unit 'blocks.0' .* in the place of 'head'.* an example_input_array, or name",
    ),
    "listed": (
        lambda: VectorModule(Listed()),
        r"unit 'blocks.\d' changes a list that it was given",
    ),
    "aliases": (
        lambda: VectorModule(Aliases()),
        r"unit 'blocks.\d' returns memory that it was given, .* in place",
    ),
    "hidden": (
        lambda: VectorModule(Hidden()),
        r"the result of stage 1 depends on the output of a pipeline unit that was not sent",
    ),
    "reads": (
        lambda: VectorModule(Reads()),
        r"blocks.0.linear.weight belongs to a unit on another .* example_input_array",
    ),
    "leaks-example": (
        LeaksWithExample,
        r"unit 'blocks.0' hands state to .* by a list, an attribute or a hook",
    ),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    module, _ = CASES[case]
    try:
        layout.trainer(folder, max_epochs=1).fit(module(), loader(layout))
    except MegatronLightningError as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:  # the other rank is gone
        return f"peer: {error}"
    return None


SLOW = {"again", "dropped"}  # found in the same place as "backwards"


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
def test_forwards_that_cannot_be_divided(case: str, tmp_path: Path) -> None:
    errors = run(PP2, _refused, tmp_path, case)
    said = [error for error in errors if error and not error.startswith("peer: ")]
    assert None not in errors and said
    for error in said:
        assert re.search(CASES[case][1], error, re.DOTALL), error


FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


def test_fsdp_refuses_parameters_that_are_read_outside_of_their_unit(tmp_path: Path) -> None:
    for error in run(FSDP2, _refused, tmp_path, "reads"):
        assert error and "net reads a parameter of a unit" in error and "zero1" in error


def test_fsdp_refuses_lists_that_units_change(tmp_path: Path) -> None:
    for error in run(FSDP2, _refused, tmp_path, "listed"):
        assert error and "changes a list or dict that it was given" in error


class WritesInCheckpoints(Chain):
    """Checkpoints of ``span`` blocks; code between the blocks writes into their outputs."""

    def __init__(self, span: int) -> None:
        super().__init__()
        self.span = span

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, 4, self.span):
            blocks = self.blocks[first : first + self.span]
            x = checkpoint(self._run, blocks, x, use_reentrant=False)
        return self.head(x)

    def _run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
            x += 1.0
        return x


class WritesInOne(WritesInCheckpoints):
    """The checkpoint is given what a unit has returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._run, self.blocks[1:], self.blocks[0](x), use_reentrant=False)
        return self.head(x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "over all": lambda: WritesInCheckpoints(4),
    "over two": lambda: WritesInCheckpoints(2),
    "of an output": lambda: WritesInOne(3),
    "recurrent": Recurrent,
    "named tuples": Named,
    "dataclasses": lambda: Stated(False),
    "dataclasses filled": lambda: Stated(True),
}


def _losses(layout: Layout, folder: str, net: str) -> list[float]:
    module, losses = VectorModule(NETS[net]()), []
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    layout.trainer(folder, max_epochs=1).fit(module, loader(layout))
    return losses


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "net", [pytest.param(n, marks=[pytest.mark.slow] if n == "over two" else []) for n in NETS]
)
def test_forwards_that_equal_one_process(net: str, tmp_path: Path) -> None:
    """Writes between units inside of checkpoints: a recomputation starts from what was received,
    not from what was written. Recurrent layers.
    """
    expected = run(SINGLE, _losses, tmp_path, net)[0]
    found = run(PP2, _losses, tmp_path, net)[0]
    assert found == pytest.approx(expected, rel=1e-5)  # fp32
