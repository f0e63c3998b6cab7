"""Untouched models of ``transformers`` from a folder: the only importer of ``transformers`` here.

:func:`lazy_model` runs ``from_pretrained`` on lazy tensors and reads nothing. ``transformers``
itself handles renamed, merged, tied and missing tensors. :func:`defer_weights` moves the parameters
to ``meta``. A :class:`PendingWeights` beside the model remembers the boxes of the folder behind the
parameters. :func:`read_weights` fills a rank's part after the module is sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.hf_models.meta_models import PENDING
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.stored_weights import read_stored
from megatron_lightning.errors import CheckpointError
from megatron_lightning.optional import HF_FOLDER, require
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.materialize import leave_empty
from megatron_lightning.parallel.shards.spec import Shape
from megatron_lightning.parallel.shards.stored_weight import stored_part
from megatron_lightning.parallel.shards.ties import shared_names


class Change(NamedTuple):
    """Intended differences between a model and the model saved in a folder."""

    architecture: str | None = None
    """Class of ``transformers``. None: the folder's."""
    new_tensors: tuple[str, ...] = ()
    """Patterns of parameters missing from the folder."""
    left_out: tuple[str, ...] = ()
    """Patterns of tensors missing from the model."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Entries of the configuration with other values."""


UNCHANGED = Change()
"""The folder's own model."""


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name fits any of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class TensorTable(Protocol):
    """Lazy tensors by their names in a folder."""

    @property
    def path(self) -> Path:
        """The folder, for messages."""

    @property
    def tensors(self) -> Mapping[str, Lazy]:
        """Name in the folder -> tensor."""


class PendingWeights:
    """Values of a model's parameters still in a folder.

    Copies and pickles of a model hold no values: values already read are in the parameters.

    Args:
        tensors: Name in the model -> lazy tensor.
    """

    def __init__(self, tensors: Mapping[str, Lazy]) -> None:
        self.tensors = dict(tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingWeights, ({},)


# ------------------------------------------------------------------------------------------- models


def lazy_parameters(model: nn.Module) -> dict[str, Lazy]:
    """Return the lazy parameters and saved buffers of a model, each once, by the first name."""
    parameters = {n: p for n, p in model.named_parameters() if isinstance(p, Lazy)}
    saved = model.state_dict()
    buffers = {n: b for n, b in model.named_buffers() if n in saved and isinstance(b, Lazy)}
    return {**parameters, **buffers}


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return further names of a lazy model's parameters -> their first names."""
    first = {id(tensor): name for name, tensor in lazy_parameters(model).items()}
    state = model.state_dict(keep_vars=True)
    names = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    return {name: owner for name, owner in names.items() if owner != name}


def ties_of_class(model_class: Any, config: Any) -> dict[str, str]:
    """Return further name -> first name of the parameters that a class ties by a configuration."""
    with torch.device("meta"), quiet():
        model: nn.Module = model_class(config)
    return {name: owner for owner, *names in shared_names(model) for name in names}


def set_copies(model: nn.Module, copies: Mapping[str, str]) -> None:
    """Give parameters of a lazy model, new to the model's folder, the values of other parameters.

    Args:
        model: The model.
        copies: Name -> name of the parameter to copy. A name in the folder keeps its values.
    """
    for name, owner in copies.items():
        if not isinstance(model.get_parameter(name), Lazy):
            lazy: Any = model.get_parameter(owner)
            path, _, last = name.rpartition(".")
            copied: Any = Lazy(lazy.shape, lazy.dtype, lazy.fill)
            copied.requires_grad = lazy.requires_grad
            model.get_submodule(path)._parameters[last] = copied


def lazy_model(
    folder: TensorTable, model_class: Any, config: Any, change: Change = UNCHANGED, **options: Any
) -> nn.Module:
    """Return a model with the lazy tensors of a folder as parameters.

    Args:
        folder: The folder.
        model_class: The class of ``transformers``.
        config: Configuration of the class.
        change: Parameters missing from the folder, and tensors missing from the model, on purpose.
        options: Further arguments of ``from_pretrained``, such as ``dtype``.

    Raises:
        CheckpointError: If the folder's tensors are not exactly the tensors read by the class.
    """
    options |= {"config": config, "state_dict": dict(folder.tensors), "output_loading_info": True}
    # Other shapes are an error below, with names.
    options["ignore_mismatched_sizes"] = True
    # transformers itself maps names and converts tensors, and takes lazy tensors for values.
    try:
        with quiet():
            model, info = model_class.from_pretrained(None, **options)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        info = {"error_msgs": [f"{type(error).__name__}: {str(error).splitlines()[0]}"]}
        _check(folder, model_class, config, info, change)
        raise
    _check(folder, model_class, config, info, change)
    result: nn.Module = model
    return result


def defer_weights(model: nn.Module, *, reads: bool = True) -> nn.Module:
    """Move a lazy model to ``meta``. :func:`read_weights` reads the values later.

    Args:
        model: The model.
        reads: Whether values are read at all. False if a checkpoint brings all values.
    """
    state = model.state_dict() if reads else {}
    tensors = {name: x for name, x in state.items() if isinstance(x, Lazy)}
    _replace(model, lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"))
    defer_values(model, tensors)
    return model


def defer_values(model: nn.Module, tensors: Mapping[str, Lazy]) -> None:
    """Leave the values of a model on ``meta`` to a later :func:`read_weights`.

    Args:
        model: The model.
        tensors: Name in the model, tied names included -> lazy tensor.
    """
    leave_empty(model)
    model.__dict__[PENDING] = PendingWeights(tensors)


def pending_tensors(model: nn.Module) -> dict[str, Lazy]:
    """Return the values that :func:`read_weights` reads later, by name. Changes of the dict
    count. Empty if there are none.
    """
    pending: PendingWeights | None = model.__dict__.get(PENDING)
    return {} if pending is None else pending.tensors


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bar of loaded weights, since none are read. Hide the report of missing
    weights, since missing weights are errors here.
    """
    require("transformers", HF_FOLDER)
    from transformers.utils import logging

    enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check(
    folder: TensorTable, model_class: Any, config: Any, info: Mapping[str, Any], change: Change
) -> None:
    problems = {
        "missing_keys": "are missing",
        "unexpected_keys": "are unexpected",
        "mismatched_keys": "have other shapes",
        "error_msgs": "cannot be converted",
    }
    expected_patterns = {"missing_keys": change.new_tensors, "unexpected_keys": change.left_out}
    texts = []
    for key, text in problems.items():
        patterns = expected_patterns.get(key, ())
        names = [n for n in sorted(map(str, info.get(key) or ())) if not fits(n, patterns)]
        if names:
            texts.append(f"{len(names)} tensors {text} ({', '.join(names[:5])})")
    if texts:
        # Of a stack of experts, transformers names the parameter only.
        for text, names in _differences(folder, model_class, config).items():
            unnamed = [name for name in names if name.split(" ")[0] not in " ".join(texts)]
            if unnamed:
                texts.append(f"the folder {text} {', '.join(unnamed[:5])}")
        raise CheckpointError(
            f"{folder.path} does not fit {model_class.__name__}: {'; '.join(texts)}. Restore the "
            "folder, or load it with the class that saved it, which config.json names under "
            "architectures. If the model differs on purpose (a new head), name what differs: "
            "new_tensors and left_out of AutoBridge.from_hf_pretrained."
        )


def saved_table(model: nn.Module) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the tensors written by ``save_pretrained`` of a model, by the names in the file."""
    require("transformers", HF_FOLDER)
    from transformers.core_model_loading import revert_weight_conversion

    seen_ids: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen_ids:  # tied tensors once
            seen_ids.add(id(value))
            state[name] = Lazy(value.shape, value.dtype, lambda box, out: None)
    pretrained: Any = model
    saved_state = revert_weight_conversion(pretrained, state)
    return {name: (tuple(value.shape), value.dtype) for name, value in saved_state.items()}


def _differences(folder: TensorTable, model_class: Any, config: Any) -> dict[str, list[str]]:
    """Return the folder's differences to the tensors written by ``save_pretrained``, by the verb of
    the message. Empty if the folder has names of another version.
    """
    try:
        with torch.device("meta"):
            table = saved_table(model_class(config))
    except Exception:  # only a better message is missing
        return {}
    absent = [name for name in table if name not in folder.tensors]
    if len(absent) >= len(table) // 2:
        return {}
    misshapen = [
        f"{name} {list(folder.tensors[name].shape)} instead of {list(shape)}"
        for name, (shape, _) in table.items()
        if name in folder.tensors and tuple(folder.tensors[name].shape) != shape
    ]
    ignored = model_class._keys_to_ignore_on_load_unexpected or ()
    extra = [
        name
        for name in folder.tensors
        if name not in table and not any(re.search(pattern, name) for pattern in ignored)
    ]
    return {"lacks": absent, "has": misshapen, "also has": extra}


def fill_weights(model: nn.Module) -> nn.Module:
    """Read all values of a lazy model."""
    _replace(model, Lazy.read)
    return model


def _replace(model: nn.Module, make: Callable[[Lazy], Tensor]) -> None:
    """Replace lazy parameters and buffers. Tied parameters stay tied."""
    new_tensors: dict[int, nn.Parameter | Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Lazy):
                if id(parameter) not in new_tensors:
                    new_tensors[id(parameter)] = nn.Parameter(
                        make(parameter), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = new_tensors[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Lazy):
                module._buffers[name] = make(buffer)


# -------------------------------------------------------------------------------------------- read


def read_weights(module: nn.Module, part: Part, context: ParallelContext) -> int:
    """Fill this rank's parameters and buffers from folders.

    Returns:
        Number of bytes read.
    """
    state, num_bytes = ModuleState(module, part, context), 0
    for path, child in module.named_modules():
        pending: PendingWeights | None = child.__dict__.pop(PENDING, None)
        if pending is None:
            continue
        prefix = f"{path}." if path else ""
        local_tensors = child.state_dict(prefix=prefix)
        for name, tensor in local_tensors.items():
            lazy = pending.tensors.get(name.removeprefix(prefix))
            is_copy = part.tied.get(name) in local_tensors
            if lazy is not None and not is_copy:
                num_bytes += _read(state, name, tensor, lazy)
    return num_bytes


def _read(state: ModuleState, name: str, tensor: Tensor, lazy: Lazy) -> int:
    if stored_part(tensor) is not None:
        return read_stored(state, name, tensor, lazy)
    shards = [shard for shard in state.shards(name, name, tensor).shards if shard.data.numel()]
    for shard in shards:
        lazy.fill(shard.box, shard.data)
    return sum(shard.data.nbytes for shard in shards)
