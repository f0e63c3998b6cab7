"""Quantized tensors of the fake ``transformer_engine.pytorch``: e4m3 with one scale, by torch.

What the real package does silently wrong is an error here: transposed codes of other codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.helpers.te_contract import STATE, bind

_LARGEST = 448.0


class Float8Tensor(torch.Tensor):
    """Codes, and the reciprocal of their scale; operations get its values."""

    _data: Tensor
    _transpose: Tensor | None
    _scale_inv: Tensor
    recipe: Any

    @staticmethod
    def __new__(
        cls, data: Tensor, scale_inv: Tensor, dtype: torch.dtype, recipe: Any = None
    ) -> Float8Tensor:
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=dtype, device=data.device
        )
        self._data, self._scale_inv, self._transpose = data, scale_inv, None
        self.recipe = recipe
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (own,) = args
            other = cls(own._data, own._scale_inv, own.dtype, own.recipe)
            other._transpose = own._transpose
            return other
        args, kwargs = tree_map_only(Float8Tensor, Float8Tensor.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> Tensor:
        """Return what the codes stand for."""
        if self._transpose is None or not torch.equal(self._transpose.t(), self._data):
            raise AssertionError("the transposed codes are not those of the codes")
        codes = self._data.view(torch.float8_e4m3fn)
        return codes.to(self.dtype) * self._scale_inv

    __torch_function__ = torch._C._disabled_torch_function_impl


def rounded(values: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes [...], uint8, and the reciprocal of their scale."""
    largest = values.detach().abs().amax() if largest is None else largest
    scale = torch.where(largest > 0, _LARGEST / largest, 1.0)
    codes = (values.detach() * scale).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale.reciprocal().reshape(1)


@contextmanager
def quantized_model_init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Make modules with quantized weights."""
    given = bind("quantized_model_init", args, kwargs)
    STATE.calls.append(("quantized_model_init", kwargs))
    before, STATE.weights_recipe = (
        STATE.weights_recipe,
        given["recipe"] if given["enabled"] else None,
    )
    try:
        yield
    finally:
        STATE.weights_recipe = before


def replace_raw_data(*args: Any, **kwargs: Any) -> None:
    """Move the codes."""
    tensor, data = bind("replace_raw_data", args, kwargs).values()
    assert data.dtype == tensor._data.dtype
    data.copy_(tensor._data)
    tensor._data = data


def quantize_master_weights(*args: Any, **kwargs: Any) -> None:
    """Make codes of flat ranges, by the largest values of all ranks."""
    given = bind("quantize_master_weights", args, kwargs)
    assert given["fsdp_shard_model_weights"] is None
    assert given["manual_post_all_gather_processing"] is True
    tensors, values = given["model_weights"], given["master_weights"]
    assert len({id(tensor.recipe) for tensor in tensors}) == 1
    STATE.calls.append(("quantize_master_weights", {"num_weights": len(tensors)}))
    largest = torch.stack([torch.zeros(()) if own is None else own.abs().amax() for own in values])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=given["group"])
    for tensor, own, start, bound in zip(
        tensors, values, given["start_offsets"], largest, strict=True
    ):
        codes, scale_inv = rounded(torch.zeros(1) if own is None else own, bound)
        tensor._scale_inv.copy_(scale_inv)
        if own is not None:
            assert own.ndim == 1 and start >= 0 and start + len(own) <= tensor.numel()
            tensor._data.view(-1)[start : start + len(own)] = codes


def post_all_gather_processing(*args: Any, **kwargs: Any) -> None:
    """Transpose the codes."""
    for tensor in bind("post_all_gather_processing", args, kwargs)["model_weights"]:
        tensor._transpose = tensor._data.t().contiguous()
