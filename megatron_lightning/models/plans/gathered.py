"""A sharding plan for a model without a table.

Every linear layer is split by its output, and the output is gathered at once. The rest of the model
sees full tensors, so the plan is right for any model. The plan saves memory like a table (weights,
gradients and optimizer state are split) and shares the GEMMs. But the plan gathers once a layer,
while a table communicates once for several layers. Embeddings are split by rows.

Some layers stay full: a layer whose weight is read by code outside of the layer's forward, a layer
with a custom forward or a computed weight, and a layer with gradient hooks on parameters.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction, unwrap
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from megatron_lightning.compat import GradientHooks
from megatron_lightning.layers.linear.parallel_linear import LINEAR
from megatron_lightning.layers.linear.replaceable import has_computed_weight, has_own_forward
from megatron_lightning.layers.styles import ColumnParallel
from megatron_lightning.models.plans.hf_rows import VOCABULARY, as_patterns, split_both_ends
from megatron_lightning.parallel.shards.attachments import base_layer, without_attachments
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style
from megatron_lightning.parallel.shards.ties import shared_names

_TENSORS = ("weight", "bias")
_HARMLESS = ("dtype", "device")
"""Attributes of a weight that stay correct on a shard."""
_NOT_IN_FORWARD = ("_init", "__init__", "tie_", "resize_", "get_", "set_", "configure_")
_INITIALIZES = ("init_weight", "init_param", "reset_param")  # also timm's fix_init_weight
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "peft.")
BY_INDEX = "[]"
"""Name of layers read by index."""


def gathered_plan(model: nn.Module, tensor_size: int) -> ShardingPlan:
    """Return the plan of a model of ``transformers``, by the linear layers and the word
    embedding.
    """
    return _Gathered(model, _input_embedding(model), everywhere=False).plan(tensor_size)


def auto_plan(module: nn.Module, tensor_size: int) -> ShardingPlan:
    """Return the plan of any module, by linear layers and embeddings."""
    return _Gathered(module, None, everywhere=True).plan(tensor_size)


class _Gathered:
    """The plan of a model.

    Args:
        model: The full model.
        words: The embedding to split, even with a custom forward. None: there is none.
        everywhere: Whether all plain embeddings are, and any class may read weights.
    """

    def __init__(self, model: nn.Module, words: nn.Module | None, *, everywhere: bool) -> None:
        self._model = model
        self._words = words
        self._everywhere = everywhere
        weights_read = _weights_read(model, everywhere=everywhere)
        self._whole = {
            id(base_layer(module))
            for path, module in without_attachments(model)
            if _name(path) in weights_read or self._stays_whole(base_layer(module))
        }
        for names in shared_names(model):  # all who share a weight, or none
            owners = {id(model.get_submodule(name.rpartition(".")[0])) for name in names}
            self._whole |= owners if owners & self._whole else set()

    def plan(self, tensor_size: int) -> ShardingPlan:
        """Return the plan."""
        modules = dict(without_attachments(self._model))
        styles = {
            path: self._style(base_layer(module), tensor_size) for path, module in modules.items()
        }
        rows = {path: style for path, style in styles.items() if style is not None}
        rows = split_both_ends(self._model, rows)
        return ShardingPlan(
            modules=as_patterns(rows, modules),
            sequence_dim=1,
            why_full_sequence="every layer gathers its output",
        )

    def _style(self, module: nn.Module, tensor_size: int) -> Style | None:
        if id(module) in self._whole:
            return None
        if isinstance(module, nn.Linear) and module.out_features % tensor_size == 0:
            return ColumnParallel(gather_output=True)
        if isinstance(module, nn.Embedding) and (self._everywhere or module is self._words):
            return VOCABULARY if _has_rows(module.num_embeddings, tensor_size) else None
        return None

    def _stays_whole(self, module: nn.Module) -> bool:
        """Return whether a module cannot be split, or would lose behavior."""
        parameters = [
            parameter for parameter in module._parameters.values() if parameter is not None
        ]
        kind = type(module)
        if isinstance(module, nn.Linear):
            # Torch's attention reads the linear layers inside of it.
            is_plain = not has_own_forward(module, LINEAR) and (
                kind is nn.Linear or not kind.__module__.startswith("torch.")
            )
        elif isinstance(module, nn.Embedding):
            is_plain = module is self._words or not has_own_forward(module, (nn.Embedding,))
            is_plain &= module.max_norm is None
            is_plain &= not (module.scale_grad_by_freq or module.sparse)
        else:  # rows of split_both_ends decide in models of transformers
            return self._everywhere
        return (
            not is_plain
            or has_computed_weight(module)
            or any(is_lazy(parameter) or bool(GradientHooks(parameter)) for parameter in parameters)
        )


def _has_rows(num_rows: int, num_ranks: int) -> bool:
    """Return whether every rank gets rows, if the last ranks hold fewer rows."""
    return (num_ranks - 1) * -(-num_rows // num_ranks) < num_rows


def _name(path: str) -> str:
    own_name = path.rpartition(".")[2]
    return BY_INDEX if own_name.isdecimal() else own_name


def _input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the word embedding, or None if the model does not name an embedding."""
    find: Callable[[], nn.Module] | None = getattr(model, "get_input_embeddings", None)
    try:
        return None if find is None else find()
    except (AttributeError, NotImplementedError):
        return None


def _weights_read(model: nn.Module, *, everywhere: bool = False) -> set[str]:
    """Return the names of layers whose weight or bias is read by a module's code
    (``self.name.weight``). ``everywhere``: include classes without a forward, such as a
    LightningModule.
    """
    kinds = {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if "forward" in vars(kind) or everywhere
    }
    return weights_read(kinds)


def weights_read(kinds: Iterable[type[Any]]) -> set[str]:
    """Return the names of layers whose weight or bias is read by the code of classes, without the
    code of base classes. A layer in a list is :data:`BY_INDEX`.
    """
    return {
        name
        for kind in kinds
        if not kind.__module__.startswith(_LIBRARIES)
        for code in _codes(kind)
        for name in _reads(code)
    }


def _codes(kind: type[Any]) -> Iterator[CodeType]:
    for name, value in vars(kind).items():
        function = unwrap(value) if callable(value) else None
        initializes = any(part in name for part in _INITIALIZES)
        if isfunction(function) and not (initializes or name.startswith(_NOT_IN_FORWARD)):
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _reads(code: CodeType) -> Iterator[str]:
    """Yield the names of layers in ``x.name.weight`` and ``x[index].weight``."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP")]
    for step_before, step, step_after in zip(steps, steps[1:], [*steps[2:], None], strict=False):
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or step.argval not in _TENSORS:
            continue
        if (
            step_after is not None
            and step_after.opname == "LOAD_ATTR"
            and step_after.argval in _HARMLESS
        ):
            continue
        if step_before.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(step_before.argval)
        elif step_before.opname.startswith("BINARY_"):
            yield BY_INDEX
