"""Stand-ins for torch's scaled kernels, on a CPU.

Each call is checked by torch itself: its function is called once more with fake CUDA tensors of the
same dtypes, shapes and strides, for which torch checks what its kernels take. The result is
computed from the definition, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from megatron_lightning import compat

BLOCK = 128


@cache
def multiplies_rows() -> bool:
    """Return whether torch's CPU kernel takes a scale for each row. torch 2.11's takes one."""
    codes = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.t(), torch.ones(16, 1), torch.ones(1, 16))
    except RuntimeError:
        return False
    return True


@contextmanager
def stand_ins(*, exact: bool = False) -> Iterator[list[str]]:
    """Replace the kernels of blocks and experts, check the calls of all, and list these.

    Args:
        exact: Whether to replace the CPU's kernel of tensors and rows, too, which does not always
            round to the nearest. Replaced as well where torch has no kernel of rows on the CPU.
    """
    calls: list[str] = []
    exact |= not multiplies_rows()

    def checked(function: Callable[..., Tensor], compute: Callable[..., Tensor]) -> Any:
        @wraps(function)  # inductor knows kernels by their names
        def call(*args: Any, **options: Any) -> Tensor:
            calls.append(function.__name__)
            _check(function, *args, **options)
            return compute(*args, **options)

        return call

    scaled, grouped = torch._scaled_mm, torch._scaled_grouped_mm
    with (
        patch.object(torch, "_scaled_mm", checked(scaled, _tensors_or_rows if exact else scaled)),
        patch.object(torch, "_scaled_grouped_mm", checked(grouped, _experts)),
        patch.object(F, "scaled_mm", checked(F.scaled_mm, _blocks)),
        patch.object(compat, "takes_scaled_grouped_mm", _takes),
    ):
        yield calls


def _takes(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype is torch.float8_e4m3fn


def _check(function: Callable[..., Tensor], *args: Any, **options: Any) -> None:
    """Call ``function`` with fake CUDA tensors."""
    with FakeTensorMode():

        def fake(x: Tensor) -> Tensor:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")

        args, options = tree_map_only(Tensor, fake, (args, options))
        function(*args, **options)


def _tensors_or_rows(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any
) -> Tensor:
    """Compute ``torch._scaled_mm``."""
    y = (a.double() * scale_a) @ (b.double() * scale_b)
    bias = options["bias"]
    return (y if bias is None else y + bias).to(options["out_dtype"])


def _blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, **options: Any
) -> Tensor:
    """Compute ``F.scaled_mm`` of blocks."""
    assert kind_a is F.ScalingType.BlockWise1x128
    size = a.shape[1]
    left = a.double() * scale_a.double().repeat_interleave(BLOCK, dim=1)[:, :size]
    if kind_b is F.ScalingType.BlockWise128x128:
        scale_b = scale_b.repeat_interleave(BLOCK, dim=1)[:, : b.shape[1]].t()
    right = b.double() * scale_b.double().repeat_interleave(BLOCK, dim=1)[:, :size].t()
    return (left @ right).to(options["output_dtype"])


def _experts(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, **options: Any
) -> Tensor:
    """Compute ``torch._scaled_grouped_mm``; what its kernel does not write is NaN."""
    ends = [0, *offs.tolist()]
    assert ends[-1] == (a.shape[1] if b.ndim == 2 else a.shape[0])
    parts = [slice(*pair) for pair in pairwise(ends)]
    if b.ndim == 3:
        pairs = [
            (a[part].double() * scale_a[part, None], b[i].double() * scale_b[i])
            for i, part in enumerate(parts)
        ]
        return torch.cat([x @ w for x, w in pairs]).to(options["out_dtype"])
    # TMA reads 16 bytes at multiples of 16.
    assert all(end % 16 == 0 for end in ends)
    of_a, of_b = scale_a.view(len(parts), -1), scale_b.view(len(parts), -1)
    result = a.new_full((len(parts), a.shape[0], b.shape[1]), torch.nan, dtype=options["out_dtype"])
    for i, part in enumerate(parts):
        if part.start < part.stop:
            left, right = a[:, part].double() * of_a[i, :, None], b[part].double() * of_b[i]
            result[i] = (left @ right).to(result.dtype)
    return result
