"""Lazy tensors: every box of every move equals torch's own result, and nothing is read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Box

Move = Callable[..., Any]
MOVES: dict[str, Move] = {
    "cat": lambda x, y: torch.cat([x, y, x], dim=1),
    "cat rows": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "transpose": lambda x, y: x.transpose(0, 2),
    "matrix transpose": lambda x, y: x[0].t(),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "chunk": lambda x, y: x.chunk(3, dim=1)[1],
    "split": lambda x, y: x.split([1, 3, 2], dim=1)[1],
    "slice": lambda x, y: x[1:, 2:5, :3],
    "select": lambda x, y: x[-1, 2],
    "unbind": lambda x, y: torch.stack(x.unbind(1)[::-1]),
    "flatten": lambda x, y: x.flatten(0, 1),
    "flatten all": lambda x, y: x.flatten(),
    "unflatten": lambda x, y: x.view(4, 2, 3, 4),
    "regroup": lambda x, y: x.reshape(6, 16),
    "regroup unevenly": lambda x, y: x.reshape(3, 32),
    "interleave": lambda x, y: torch.stack([x, y], dim=2).flatten(1, 2),
    "rows of groups": lambda x, y: torch.cat([z.view(4, 2, 3, 4) for z in (x, y)], 1).flatten(0, 2),
    "unsqueeze": lambda x, y: x.unsqueeze(1).squeeze(1),
    "cast": lambda x, y: x.to(torch.bfloat16),
    "arithmetic": lambda x, y: (x + 1) * y,
    "a part of a sum": lambda x, y: (x + y)[2:, 1],
    "second of two results": lambda x, y: torch.std_mean(x, 0, correction=0)[1],
    "no padding": lambda x, y: nn.functional.pad(x, (0, 0)),
    "padding": lambda x, y: nn.functional.pad(x, (0, 1, 2, 0)),
}  # fmt: skip


def tensor(seed: int) -> tuple[Tensor, Lazy, list[Box]]:
    """Return a real tensor, the same as a lazy one, and the boxes that are read from it."""
    real = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(seed))
    read: list[Box] = []

    def fill(box: Box, out: Tensor) -> None:
        read.append(box)
        out.copy_(real[box.slices])

    return real, Lazy(real.shape, real.dtype, fill), read


def random_box(shape: torch.Size, generator: torch.Generator) -> Box:
    """Return a box of a tensor that is not empty."""
    offset, extent = [], []
    for size in shape:
        low, high = torch.randint(0, size + 1, (2,), generator=generator).sort().values.tolist()
        low = min(low, size - 1)
        offset.append(low)
        extent.append(max(1, high - low))
    return Box(tuple(offset), tuple(extent))


@pytest.mark.parametrize("name", MOVES)
def test_boxes_of_a_move_are_those_of_torch(name: str) -> None:
    (real, lazy, read), (other, lazy_other, read_other) = tensor(0), tensor(1)
    expected, moved = MOVES[name](real, other), MOVES[name](lazy, lazy_other)
    assert isinstance(moved, Lazy)
    assert (moved.shape, moved.dtype) == (expected.shape, expected.dtype)
    assert not read
    assert not read_other
    assert torch.equal(moved.read(), expected)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        box = random_box(expected.shape, generator)
        assert torch.equal(moved.read(box), expected[box.slices]), box
        target = torch.zeros(*box.shape, 2)[..., 0]  # with strides
        moved.fill(box, target)
        assert torch.equal(target, expected[box.slices].float()), box


def test_a_move_reads_the_box_alone() -> None:
    _, lazy, read = tensor(0)
    lazy.permute(2, 0, 1).reshape(4, 24).read(Box((1, 0), (2, 24)))
    assert sum(box.shape[0] * box.shape[1] * box.shape[2] for box in read) == 48


def test_initial_values_do_not_replace_those_of_a_file() -> None:
    real, lazy, _ = tensor(0)
    parameter = nn.Parameter(lazy, requires_grad=False)
    nn.init.normal_(parameter)
    nn.init.zeros_(parameter.data[0])
    assert torch.equal(parameter.read(), real)  # type: ignore[operator]
    assert torch.zeros_like(lazy).eq(0).all()
    target = torch.empty(4, 6, 4)
    target.copy_(lazy)
    assert torch.equal(target, real)


def test_what_is_computed_has_no_way_back() -> None:
    _, lazy, _ = tensor(0)
    with pytest.raises(CheckpointError, match="no way back is known"):
        (lazy + 1).fill(Box.full((4, 6, 4)), torch.empty(4, 6, 4, device="meta"))


def test_tensors_that_do_not_fit_are_refused_as_by_torch() -> None:
    _, lazy, _ = tensor(0)
    with pytest.raises(RuntimeError, match="cannot be joined"):
        torch.cat([lazy, lazy[:3]], dim=1)
    with pytest.raises(RuntimeError):
        torch.stack([lazy, lazy[:3]])
    with pytest.raises(IndexError):
        lazy.select(0, 4)
    with pytest.raises(IndexError):
        lazy.transpose(0, 3)
    with pytest.raises(IndexError):
        torch.cat([lazy, lazy], dim=3)
    with pytest.raises(RuntimeError):
        lazy.split([1, 2], dim=0)
    target = torch.zeros(2, 4, 6, 4)
    target.copy_(lazy)
    assert torch.equal(target[1], lazy.read())
