"""Split a Lightning checkpoint (a nested dict) into named tensors and the rest.

    state_dict[fqn]                              state_dict.<fqn>
    optimizer_states[i]["state"][fqn][key]       optimizer_states.<i>.state.<fqn>.<key>
    <key>[name], every value a tensor            <key>.<name>   (copies of weight averaging, say)

*fqn* is a parameter's name in the full model. Optimizer states exist in two forms: *named* (by fqn,
in a sharded checkpoint) and *numbered* (torch's own, by position in the concatenated parameter
groups, in a plain one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.nested_state import filled

OWN = "megatron_lightning"
"""Key of this package's entries in a Lightning checkpoint. The entry ``tied`` maps copies of
parameters to owners."""

FULL_STATE = (
    "optimizer_states",
    "lr_schedulers",
    "callbacks",
    "MixedPrecision",
    "MegatronMixedPrecision",
)
"""Keys of a Lightning checkpoint left out by a save of weights alone."""

_OPTIMIZERS = "optimizer_states"


def split_tensors(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a checkpoint with named optimizer states into (global name -> tensor, everything
    else).
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == _OPTIMIZERS:
            state[key] = [
                _split_optimizer(entry, f"{key}.{i}.state.", tensors)
                for i, entry in enumerate(value)
            ]
        elif isinstance(value, Mapping) and holds_tensors(key, value):
            tensors.update(
                {
                    f"{key}.{name}": tensor
                    for name, tensor in value.items()
                    if isinstance(tensor, Tensor)
                }
            )
            state[key] = {
                name: other for name, other in value.items() if not isinstance(other, Tensor)
            }
        else:
            state[key] = value
    return tensors, state


def join_tensors(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`split_tensors`."""
    checkpoint = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in state.items()
    }
    if _OPTIMIZERS in state:
        checkpoint[_OPTIMIZERS] = [
            {
                **entry,
                "state": {fqn: dict(values) for fqn, values in entry.get("state", {}).items()},
            }
            for entry in state[_OPTIMIZERS]
        ]
    for name, tensor in tensors.items():
        key, _, name_inside = name.partition(".")
        if key == _OPTIMIZERS:
            # A parameter's name has dots, and a key of a state has none: split at the last.
            index, _, path = name_inside.partition(".state.")
            fqn, _, entry = path.rpartition(".")
            if not index.isdecimal() or int(index) >= len(checkpoint.get(key, ())):
                raise CheckpointError(
                    f"{name} is in the checkpoint, whose state has no optimizer {index}. It is "
                    "incomplete."
                )
            checkpoint[key][int(index)]["state"].setdefault(fqn, {})[entry] = tensor
        else:
            checkpoint.setdefault(key, {})[name_inside] = tensor
    for entry in checkpoint.get(_OPTIMIZERS, ()):
        for values in entry["state"].values():
            for key in [key for key, value in values.items() if not isinstance(value, Tensor)]:
                values[key] = filled(key, values[key], values.pop)
    return checkpoint


def name_optimizer_state(numbered: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Turn torch's optimizer state into the named form."""
    numbers = [number for group in numbered["param_groups"] for number in group["params"]]
    count = len(numbers)
    if not {*numbers, *numbered["state"]} <= {*range(count)} or len({*numbers}) < count:
        raise CheckpointError(
            f"the checkpoint's optimizer does not number its {count} parameters from 0, as "
            "torch.optim does; another strategy saved it. Save it again under one device, or load "
            "the weights alone."
        )
    if count != len(names):
        raise CheckpointError(
            f"the checkpoint's optimizer has {count} parameters, and this model's optimizer has "
            f"{len(names)}. Resume with the model and parameter groups that it was saved with, or "
            "load the weights alone."
        )
    return {
        **numbered,
        "state": {names[index]: values for index, values in numbered["state"].items()},
        "param_groups": [
            {**g, "params": [names[index] for index in g["params"]]}
            for g in numbered["param_groups"]
        ],
    }


def number_optimizer_state(named: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the named form into torch's own form, for ``optimizer.load_state_dict``."""
    order = [fqn for group in named["param_groups"] for fqn in group["params"]]
    numbers = {fqn: index for index, fqn in enumerate(order)}
    return {
        **named,
        "state": {numbers[fqn]: named["state"][fqn] for fqn in order if fqn in named["state"]},
        "param_groups": [
            {**g, "params": [numbers[fqn] for fqn in g["params"]]} for g in named["param_groups"]
        ],
    }


def _split_optimizer(
    entry: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    rest: dict[str, dict[str, Any]] = {}
    for fqn, values in entry.get("state", {}).items():
        tensors.update(
            {
                f"{prefix}{fqn}.{key}": value
                for key, value in values.items()
                if isinstance(value, Tensor)
            }
        )
        rest[fqn] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    return {**entry, "state": {fqn: values for fqn, values in rest.items() if values}}


def holds_tensors(key: str, value: Mapping[Any, Any]) -> bool:
    """Return whether the entry ``key`` of a checkpoint is a dict of tensors by name, as in the
    table at the top.
    """
    if key == "state_dict":
        return True
    return (
        "." not in key
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )
