"""A sharding plan for a model that nobody has written a table for.

Every linear layer is split by its output, which is gathered at once, and so the rest of the model
sees what it always saw: the plan is right for any model. It saves memory as a table does (weights,
gradients and optimizer state are split) and its matrix products are shared; it gathers once a
layer, where a table communicates once for several layers.

A layer whose weight other code reads, beside its own forward, stays full.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from inspect import isfunction, unwrap
from types import CodeType
from typing import Any

from torch import nn

from megatron_lightning.layers.styles import ColumnParallel
from megatron_lightning.models.hf_rows import VOCABULARY, as_patterns, split_both_ends
from megatron_lightning.parallel.sharding import ShardingPlan, Style

_TENSORS = ("weight", "bias")
_HARMLESS = ("dtype", "device")
"""Attributes of a weight that a shard shares with it."""
_NOT_IN_FORWARD = ("_init", "__init__", "tie_", "resize_", "get_", "set_")
_BY_INDEX = "[]"
"""Name of layers that are read by their index."""


def gathered_plan(model: nn.Module, tensor_size: int) -> ShardingPlan:
    """Return the plan of a model of ``transformers``, by its linear layers and its words'
    embedding.
    """
    read, modules = _weights_read(model), dict(model.named_modules())
    rows: dict[str, Style] = {
        path: ColumnParallel(gather_output=True)
        for path, module in modules.items()
        if type(module) is nn.Linear
        and module.out_features % tensor_size == 0
        and _name(path) not in read
    }
    words = _input_embedding(model)
    for path, module in modules.items():
        if module is words and isinstance(module, nn.Embedding) and _name(path) not in read:
            rows[path] = VOCABULARY
    return ShardingPlan(modules=as_patterns(split_both_ends(model, rows), modules), sequence_dim=1)


def _name(path: str) -> str:
    own = path.rpartition(".")[2]
    return _BY_INDEX if own.isdecimal() else own


def _input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the embedding of the words; None: the model does not name it."""
    find: Callable[[], nn.Module] | None = getattr(model, "get_input_embeddings", None)
    try:
        return None if find is None else find()
    except (AttributeError, NotImplementedError):
        return None


def _weights_read(model: nn.Module) -> set[str]:
    """Return the names of layers whose weight or bias the code of a module reads
    (``self.name.weight``).
    """
    kinds = {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if "forward" in vars(kind) and not kind.__module__.startswith("torch.")
    }
    return {name for kind in kinds for code in _codes(kind) for name in _reads(code)}


def _codes(kind: type[Any]) -> Iterator[CodeType]:
    for name, value in vars(kind).items():
        function = unwrap(value) if callable(value) else None
        if isfunction(function) and not name.startswith(_NOT_IN_FORWARD):
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _reads(code: CodeType) -> Iterator[str]:
    """Yield the names of layers in ``x.name.weight`` and ``x[index].weight``."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP")]
    for before, step, after in zip(steps, steps[1:], [*steps[2:], None], strict=False):
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or step.argval not in _TENSORS:
            continue
        if after is not None and after.opname == "LOAD_ATTR" and after.argval in _HARMLESS:
            continue
        if before.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(before.argval)
        elif before.opname.startswith("BINARY_"):
            yield _BY_INDEX
