"""Optimizer states of parameters that ``on_load_checkpoint`` renames.

A checkpoint has optimizer states under the parameters' names. A hook renames entries of
``state_dict``. Their states follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.checkpoint.reading.memory_source import MemorySource
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.checkpoint.reading.stored_tensor import StoredTensor

_MODULE = "state_dict."


def renamed_tensors(given: Mapping[str, Any]) -> dict[str, str]:
    """Return saved name -> new name of the entries that a hook has renamed.

    Args:
        given: ``state_dict`` as left by hooks. An entry without a copy under the saved name, and
            with the value as saved, is renamed.
    """
    return {
        saved: name
        for name, value in given.items()
        if isinstance(value, StoredTensor)
        and value.stored.startswith(_MODULE)
        and (saved := value.stored.removeprefix(_MODULE)) not in given
    }


def renamed_state(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an entry of ``optimizer_states`` under the new names."""
    return {
        **state,
        "state": {names.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names.get(name, name) for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def renamed_source(
    source: CheckpointSource, prefix: str, names: Mapping[str, str]
) -> CheckpointSource:
    """Return a checkpoint with the states of an optimizer, under ``prefix``, by the new names."""
    tensors = {}
    for full in source.tensors():
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            tensors[f"{prefix}{names.get(name, name)}.{key}"] = StoredTensor.of(source, full)
    return MemorySource(source, tensors, replaced=prefix)
