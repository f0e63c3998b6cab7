"""Checks of the form of a checkpoint's untrusted state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.checkpoint.format.class_paths import check_instantiators
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.errors import CheckpointError

_LIGHTNING: Mapping[str, type] = {
    "state_dict": Mapping,
    "callbacks": Mapping,
    "loops": Mapping,
    "lr_schedulers": list,
    "hyper_parameters": Mapping,
    "optimizer_states": list,
}
_PROGRESS: Mapping[str, type] = {
    "consumed_samples": int,
    "samplers": list,
    "layout": Mapping,
    "random_states": Mapping,
    "loaders": Mapping,
    "layer_streams": Mapping,
}
_OWN: Mapping[str, type] = {
    **_PROGRESS,
    "skipped_steps": int,
    "run": Mapping,
    "tied": Mapping,
    "entries": list,
}


def check_structure(state: Mapping[Any, Any], origin: str) -> None:
    """Check the outer form of a checkpoint without tensors, but not the entries of plugins and
    callbacks.
    """
    for key in state:
        _require(isinstance(key, str), f"the key {key!r}", str, key, origin)
    _check_entries(state, _LIGHTNING, "", origin)
    check_instantiators(state, origin)
    # What this package itself indexes into. Plugins and callbacks check their own entries.
    for i, entry in enumerate(state.get("optimizer_states", ())):
        place = f"optimizer_states[{i}]"
        _require(isinstance(entry, Mapping), place, Mapping, entry, origin)
        _check_entries(entry, {"state": Mapping, "param_groups": list}, place, origin, needed=True)
        for j, group in enumerate(entry["param_groups"]):
            place = f"optimizer_states[{i}]['param_groups'][{j}]"
            _require(isinstance(group, Mapping), place, Mapping, group, origin)
            _check_entries(group, {"params": list}, place, origin, needed=True)
        for name, values in entry["state"].items():
            _require(
                isinstance(values, Mapping),
                f"optimizer_states[{i}]['state'][{name!r}]",
                Mapping,
                values,
                origin,
            )
    own_state = state.get(OWN)
    if own_state is not None:
        _require(isinstance(own_state, Mapping), f"[{OWN!r}]", Mapping, own_state, origin)
        _check_entries(own_state, _OWN, f"[{OWN!r}]", origin)


def check_progress(own: Mapping[str, Any]) -> None:
    """Check this package's entries of a checkpoint for the progress of training."""
    _check_entries(own, _PROGRESS, f"[{OWN!r}]", "the checkpoint", needed=True)


def _check_entries(
    values: Mapping[str, Any],
    kinds: Mapping[str, type],
    place: str,
    origin: str,
    *,
    needed: bool = False,
) -> None:
    for key, kind in kinds.items():
        if needed or key in values:
            _require(
                isinstance(values.get(key), kind),
                f"{place}[{key!r}]",
                kind,
                values.get(key),
                origin,
            )


def _require(condition: bool, place: str, kind: type, found: Any, origin: str) -> None:
    if not condition:
        raise CheckpointError(
            f"{origin} has not the form of a checkpoint: {place} should be a {kind.__name__} and "
            f"is {'missing' if found is None else f'a {type(found).__name__}'}. Use another "
            "checkpoint."
        )
