"""The part of a checkpoint without sharded tensors: loops, callbacks, schedulers, hyper-parameters,
generator states.

The state is a nested dict, stored by ``torch.save``. Every save loads the stored bytes with
``weights_only=True`` as a proof: no checkpoint is ever written that could only be read by running
code from the checkpoint.

Stored unchanged: None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict,
Counter, set, tensors (moved to the CPU), torch.dtype, torch.device, torch.Size. Converted by a
save:

    Path                                  str              enum members                  their value
    numpy scalars                         Python scalars   numpy arrays                  tensors
    other mappings, Namespace, dataclass  dict             named tuples                  tuple
    other lists and deques                list             frozenset                     set
    subclasses of int, float, str …       the plain type   parameters                    tensors
    OmegaConf's hyper-parameters          dict             their class         AttributeDict's name
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableSequence
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lightning.checkpoint.format.storage import RemoteFolder, is_remote, local_path
from megatron_lightning.errors import CheckpointError

_ATOMS = (bool, int, float, complex, str, bytes)
_SAFE = (type(None), *_ATOMS, torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# Lightning's entries for OmegaConf. Lightning reads a name as AttributeDict.
_CLASS_ENTRIES = ("hparams_type", "datamodule_hparams_type")


def dump_state(state: Mapping[str, Any]) -> bytes:
    """Serialize a nested dict for ``torch.load(..., weights_only=True)``.

    Hyper-parameters without a plain form are left out with a warning, as Lightning leaves out
    values without a pickle.

    Raises:
        CheckpointError: If any other value has no plain form, naming path and type.
    """
    classes = {key: state[key] for key in _CLASS_ENTRIES if isinstance(state.get(key), type)}
    names = {key: f"{kind.__module__}.{kind.__qualname__}" for key, kind in classes.items()}
    values = {
        key: _storable(key, state[key])
        for key in _HYPER_PARAMETERS
        if isinstance(state.get(key), Mapping)
    }
    buffer = io.BytesIO()
    torch.save(plain({**state, **names, **values}), buffer)
    data = buffer.getvalue()
    load_state(data, "the state to be saved")
    return data


def _storable(name: str, hyper_parameters: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the hyper-parameters with a plain form."""
    stored = {}
    for key, value in hyper_parameters.items():
        try:
            stored[key] = plain(value, f"[{name!r}][{key!r}]")
        except CheckpointError as error:
            warnings.warn(
                f"checkpoints do without the hyper-parameter {key!r}: {error}", stacklevel=2
            )
    return stored


def load_state(data: bytes | bytearray, origin: str) -> dict[str, Any]:
    """Read the bytes of :func:`dump_state` without running any code. ``origin`` names the bytes in
    messages.
    """
    return _load_plain(io.BytesIO(data), origin)


def load_plain_file(path: str) -> dict[str, Any]:
    """Read a plain ``.ckpt`` file without running any code. A local file is memory-mapped."""
    if is_remote(path):
        remote = RemoteFolder(path)
        return _load_plain(io.BytesIO(remote.files.cat_file(remote.root)), path)
    return _load_plain(str(local_path(path)), path)


def _load_plain(file: io.BytesIO | str, origin: str) -> dict[str, Any]:
    try:
        _check_archive(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    # Torch raises many kinds, down to EOFError and AttributeError, for a damaged file.
    except Exception as error:
        raise CheckpointError(
            f"{origin} cannot be read as plain data: {error}. Objects of other classes are "
            "refused, because reading them would run code from the file. Use another checkpoint, "
            "or save this one again from a program you trust with plain values."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{origin} holds a {type(state).__name__}, and a checkpoint is a dict. Use another "
            "file."
        )
    return state


def _check_archive(file: io.BytesIO | str) -> None:
    """Refuse a compressed archive: ``torch.save`` does not compress, and ``torch.load`` would
    decompress.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    size_bytes = os.path.getsize(file) if isinstance(file, str) else file.getbuffer().nbytes
    if (
        any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        or sum(e.file_size for e in entries) > size_bytes
    ):
        raise ValueError(
            f"its {size_bytes} bytes are compressed, to hold {sum(e.file_size for e in entries)}"
        )
    if not isinstance(file, str):
        file.seek(0)


def plain(value: Any, path: str = "") -> Any:
    """Return a copy of ``value`` of plain types only (the table at the top). ``path`` is the place
    of the value, for messages.
    """
    kind = type(value)
    if kind in _SAFE:
        return value
    if kind in _TENSORS:
        # Clone: torch.save would write the full storage of a view.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Enum):
        return plain(value.value, path)
    if isinstance(value, (*_ATOMS, PurePath, np.generic, np.ndarray)):
        return _plain_leaf(value, path)
    return _plain_container(value, path)


def _plain_leaf(value: Any, path: str) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (np.generic, np.ndarray)):
        if value.dtype.kind not in "biufcUS" or (
            isinstance(value, np.ndarray) and value.dtype.kind in "US"
        ):
            _refuse(value, path)
        return value.item() if isinstance(value, np.generic) else torch.from_numpy(value.copy())
    kind: Any = next(atom for atom in _ATOMS if isinstance(value, atom))
    return kind(value)


def _plain_container(value: Any, path: str) -> Any:
    kind = type(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = {
            _plain_key(key, path): plain(entry, f"{path}[{key!r}]") for key, entry in value.items()
        }
        return kind(items) if kind in (OrderedDict, Counter) else items
    if isinstance(value, (tuple, MutableSequence)):
        entries = [plain(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, (set, frozenset)):
        return {_plain_key(entry, path) for entry in value}
    return _refuse(value, path)


def _plain_key(key: Any, path: str) -> Any:
    result = plain(key, f"{path}[key {key!r}]")
    try:
        hash(result)
    except TypeError:
        _refuse(key, f"{path}[key {key!r}]")
    return result


def _refuse(value: Any, path: str) -> Any:
    kind = type(value)
    raise CheckpointError(
        f"checkpoint{path} is a {kind.__module__}.{kind.__qualname__}, which could only be read "
        "back by running code from the checkpoint. Store plain values there (numbers, strings, "
        "lists, dicts, tensors), or leave it out: save_hyperparameters(ignore=[...]) for "
        "hyper-parameters, state_dict() for callbacks and data modules."
    )
