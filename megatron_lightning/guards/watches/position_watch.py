"""Find steps that select positions in a rank's part of a sequence, or reduce over the part.

``logits[:, :-1]`` and ``tokens[:, 1:]`` shift a part against itself: the label for the last token
of each part is on another rank, and is lost. This is an error. ``hidden.mean(1)`` pools a part, and
``log_p.sum(1)`` adds up a part. This is a warning, since the step may exchange the result between
ranks. The functions of the step are watched in the first run, outside of the model's call. Tensors
are followed as long as the dims up to the sequence stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_lightning.compat import pop_function_mode, push_function_mode
from megatron_lightning.errors import ConfigError
from megatron_lightning.step.judge import Judge

_BY_DIM: Mapping[str, int] = {
    **dict.fromkeys(("narrow", "select", "index_select", "cumsum", "cumprod", "flip"), 1),
    **dict.fromkeys(("gather", "unbind", "unfold"), 1),
    **dict.fromkeys(("diff", "roll", "take_along_dim", "split"), 2),
}
"""Function that selects or mixes positions -> place of the argument ``dim``."""
_REDUCE: Mapping[str, int] = {
    **dict.fromkeys(("sum", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "median"), 1),
    **dict.fromkeys(("logsumexp", "softmax", "log_softmax", "std", "var", "sort", "argsort"), 1),
    **dict.fromkeys(("mean", "any", "all", "count_nonzero"), 1),
    **dict.fromkeys(("topk", "norm"), 2),
}
"""Function that reduces or normalizes over a dim -> place of the argument ``dim``."""
_RETURN_LOSSES = frozenset({"cross_entropy", "nll_loss", "view", "view_as", "reshape", "unflatten"})
"""Functions that return losses of tokens from tensors of other dims, as [b x s] or [b, v, s]."""
_NAMES: Mapping[str, str] = {"flip": "dims", "roll": "dims", "unfold": "dimension"}
"""Function -> keyword of the dim, if not ``dim``."""


class PositionWatch(TorchFunctionMode):
    """Follows the tensors with a rank's part of the sequences through a step.

    Args:
        hook: The step, for the message.
        num_ranks: Number of ranks sharing each sequence.
        parts: Tensors of the batch, with the sequence dim of each tensor.
        judge: Verdict on findings.
    """

    def __init__(
        self, hook: str, num_ranks: int, parts: list[tuple[Tensor, int]], judge: Judge
    ) -> None:
        super().__init__()
        self._judge = judge
        self._hook = hook
        self._num_ranks = num_ranks
        self._length = min(tensor.shape[dim] for tensor, dim in parts)
        self._dims = {dim for _, dim in parts}
        self._parts = {id(tensor): (tensor, dim) for tensor, dim in parts}
        first, dim = parts[0]
        self._shape = first.shape[: dim + 1]
        self._depth = 0  # of model calls, without a watch on functions
        self._has_left = False  # torch.compile may refuse modes
        self._has_warned = False

    @contextmanager
    def watching(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Enter around the step. Calls of the models are left out, and return tensors to be
        followed.
        """
        with ExitStack() as during:
            for model in models.values():
                pre = model.register_forward_pre_hook(self._enter, prepend=True)
                post = model.register_forward_hook(self._leave, always_call=True)
                during.callback(pre.remove)
                during.callback(post.remove)
            during.enter_context(self)
            during.callback(self._resume)
            yield

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self._has_left = pop_function_mode(self)  # a mode of the user's may be further inside
        self._depth += 1

    def _resume(self) -> None:
        """Watch again. A pipeline stage unwinds the step without the hooks after a call."""
        if self._has_left:
            push_function_mode(self)
        self._depth, self._has_left = 0, False

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._resume()
        values = list(output.values()) if isinstance(output, Mapping) else output
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._follow(leaf, self._dims)

    def _follow(self, tensor: Tensor, dims: set[int]) -> None:
        for dim in dims:
            if tensor.dim() > dim and tensor.shape[dim] == self._length:
                self._parts[id(tensor)] = (tensor, dim)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        """Call a function of the step.

        Raises:
            ConfigError: If the function selects positions.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        if not self._depth and name in _RETURN_LOSSES and result.shape == self._shape:
            self._parts[id(result)] = (result, result.dim() - 1)
        if self._depth or not args or id(args[0]) not in self._parts:
            return result
        tensor, dim = self._parts[id(args[0])]
        by_index = name == "__getitem__" and _selects(tensor, dim, args[1])
        by_dim = name in _BY_DIM and _dim_of(tensor, name, args, kwargs) == dim
        # Pieces of one size are for losses in chunks, and lose nothing.
        keeps_all = (name == "narrow" and result.shape == tensor.shape) or (
            name == "split" and not isinstance(args[1:2] and args[1], list | tuple)
        )
        if by_index or (by_dim and not keeps_all):
            self._refuse(name, dim)
        # Samples have equal parts, so that means of token losses are right.
        is_mean_loss = name == "mean" and tensor.dim() == dim + 1
        if name in _REDUCE and not is_mean_loss and _reduced(tensor, name, args, kwargs) == {dim}:
            self._warn(name, dim)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[: dim + 1] == tensor.shape[: dim + 1]:
                self._parts[id(leaf)] = (leaf, dim)
        return result

    def _refuse(self, name: str, dim: int) -> None:
        what = "slices or indexes" if name == "__getitem__" else f"calls {name} on"
        self._judge.refuse(
            ConfigError(
                f"{self._hook} {what} a sequence along dim {dim}, of which each of "
                f"{self._num_ranks} ranks holds a part (context_parallel_size): a shift such as "
                "logits[:, :-1] against labels[:, 1:] would lose the tokens at the ends of the "
                "parts, and a position such as [:, 0] would be one of each part. Shift in the "
                "Dataset or collate function, so that tokens and labels have equal lengths (tokens "
                "= text[:-1], labels = text[1:], with -100 where nothing counts), or set "
                "context_parallel_size=1."
            )
        )

    def _warn(self, name: str, dim: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        self._judge.warn(
            f"{self._hook} calls {name} over dim {dim} of a sequence, of which each of "
            f"{self._num_ranks} ranks holds a part (context_parallel_size): the result is of the "
            "part. Compute losses of tokens and average over all tokens, exchange the result "
            "between the ranks of strategy.context.cp, or set context_parallel_size=1."
        )


def _reduced(tensor: Tensor, name: str, args: Any, kwargs: Any) -> set[int]:
    """Return the dims that a function reduces. Empty: all dims, or the function is of two
    tensors.
    """
    place = _REDUCE[name]
    dims = kwargs.get("dim", args[place] if len(args) > place else None)
    if dims is None and name in ("sort", "argsort", "topk"):
        dims = -1
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return {dim % tensor.dim() for dim in dims if type(dim) is int}


def _dim_of(tensor: Tensor, name: str, args: Any, kwargs: Any) -> int | None:
    place, key = _BY_DIM[name], _NAMES.get(name, "dim")
    dim_argument = kwargs.get(
        key, args[place] if len(args) > place else (-1 if name == "diff" else None)
    )
    dim_argument = (
        dim_argument[0] if isinstance(dim_argument, list | tuple) and dim_argument else dim_argument
    )
    return dim_argument % tensor.dim() if isinstance(dim_argument, int) else None


def _selects(tensor: Tensor, dim: int, index: Any) -> bool:
    """Whether an index selects among the positions of ``dim``. Masks select tokens, and are
    allowed.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts):
        return False
    consumed = [part for part in parts if part is not None and part is not Ellipsis]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        num_before = sum(part is not None for part in parts[:at])
        fill = [slice(None)] * (tensor.dim() - len(consumed))
        consumed = [*consumed[:num_before], *fill, *consumed[num_before:]]
    if len(consumed) <= dim:
        return False
    part = consumed[dim]
    size = tensor.shape[dim]
    return not isinstance(part, slice) or part.indices(size) != (0, size, 1)
