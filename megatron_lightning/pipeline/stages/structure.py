"""Structure of what a module returns, as plain data that can be sent to another stage.

A unit returns a tensor, or tensors in nested containers with plain values beside them. A stage that
does not run the unit rebuilds its output from the structure and the tensors that it has received.
Nothing is pickled: a structure travels as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.stages.fields import closed, opened

_PLAIN = (type(None), bool, int, float, str)


class Like(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Structure(NamedTuple):
    """Containers and leaves of an output."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """:class:`Like` for a tensor, else the plain value itself."""

    @property
    def num_tensors(self) -> int:
        """Return how many tensors the output holds."""
        return sum(isinstance(leaf, Like) for leaf in self.leaves)

    def build(self, tensors: Iterator[Tensor]) -> Any:
        """Return an output of this structure that holds the next of ``tensors``."""
        leaves = [next(tensors) if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        return closed(pytree.tree_unflatten(leaves, self.spec))


def flatten(output: Any, name: str) -> tuple[tuple[Tensor, ...], Structure]:
    """Return the tensors of what the unit ``name`` returned, and its structure.

    Raises:
        PipelineError: If it holds something that cannot travel.
    """
    leaves, spec = pytree.tree_flatten(opened(output))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise PipelineError(
                f"pipeline unit {name!r} returns a {type(leaf).__name__}, and only tensors, plain "
                "values and containers of them travel between stages: lists, dicts, and tuples and "
                "dataclasses that a module defines. Return those (a model of transformers: set "
                "use_cache=False)."
            )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    described = tuple(
        Like(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )
    return tensors, Structure(spec, described)


def dump(structures: Mapping[int, Structure], units: Sequence[str]) -> str:
    """Return the structures of the outputs of several of ``units`` as JSON.

    Raises:
        PipelineError: If a container's type is not known by name.
    """
    entries = {}
    for index, (spec, leaves) in structures.items():
        try:
            text = pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError) as error:
            raise PipelineError(
                f"pipeline unit {units[index]!r} returns a {_name(spec)}, a type that other stages "
                "cannot build. Return a tensor, or tensors in tuples, lists, dicts, or in named "
                "tuples and dataclasses that are defined at the top of a module."
            ) from error
        entries[index] = [text, *map(_dump_leaf, leaves)]
    return json.dumps(entries)


def _name(spec: pytree.TreeSpec) -> str:
    kind = spec.context if isinstance(spec.context, type) else spec.type
    return str(kind.__name__)


def load(text: str) -> dict[int, Structure]:
    """Return the structures that :func:`dump` wrote."""
    return {
        int(index): Structure(pytree.treespec_loads(spec), tuple(map(_load_leaf, leaves)))
        for index, (spec, *leaves) in json.loads(text).items()
    }


def _dump_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Like):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return leaf


def _load_leaf(leaf: Any) -> Any:
    return Like(tuple(leaf[1]), getattr(torch, leaf[0])) if isinstance(leaf, list) else leaf
