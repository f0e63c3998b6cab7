"""Names of classes and functions among the hyper-parameters of a checkpoint.

Lightning calls ``_instantiator``, and the instantiator of LightningCLI has jsonargparse import
``_class_path`` and every ``class_path`` below. A checkpoint of plain values could run any code that
way. Only LightningCLI's instantiator is accepted, and only classes that are imported already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lightning.config.class_paths import imported_class, is_known
from megatron_lightning.errors import CheckpointError

_INSTANTIATORS = (
    "lightning.pytorch.cli.instantiate_module",
    "pytorch_lightning.cli.instantiate_module",
)
"""The values that LightningCLI writes."""
_HYPER_PARAMETERS = (
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams",
    "module_arguments",
)
"""Entries that Lightning reads as arguments of a module, old names included."""


def check_instantiators(state: Mapping[Any, Any], origin: str) -> None:
    """Check that hyper-parameters name no function but LightningCLI's to make a module.

    Raises:
        CheckpointError: Naming the function.
    """
    for key in _HYPER_PARAMETERS:
        entry = state.get(key)
        found = entry.get("_instantiator") if isinstance(entry, Mapping) else None
        if found is not None and not (isinstance(found, str) and found in _INSTANTIATORS):
            raise CheckpointError(
                f"{origin} names {found!r} as the function that makes the module "
                f"({key}['_instantiator']), and reading the checkpoint would run it. LightningCLI "
                f"writes {_INSTANTIATORS[0]} there. Use another checkpoint, or remove the key from "
                "a checkpoint that you trust."
            )


def check_classes(
    state: Mapping[Any, Any], kind: type, origin: str, *, parsed: bool = False
) -> None:
    """Check the class paths that ``kind.load_from_checkpoint`` would import.

    Args:
        state: The checkpoint.
        kind: The class of the module or data module.
        origin: The checkpoint's name, for messages.
        parsed: Whether the command line parses the hyper-parameters, whoever wrote them.

    Raises:
        CheckpointError: If a class is not imported yet, or the module's class is no subclass of
            ``kind``.
    """
    for key in (getattr(kind, "CHECKPOINT_HYPER_PARAMS_KEY", ""), *_HYPER_PARAMETERS[2:]):
        entry = state.get(key)
        if not isinstance(entry, Mapping) or not (parsed or entry.get("_instantiator")):
            continue
        path = entry.get("_class_path")
        found = imported_class(path)
        if path is not None and not (isinstance(found, type) and issubclass(found, kind)):
            raise CheckpointError(
                f"{origin} was written by {path}, which is no subclass of {kind.__name__} in a "
                "module imported so far, and importing it would run code that the checkpoint "
                f"chooses. If you trust the checkpoint, import the module of {path} before "
                "load_from_checkpoint."
            )
        for place, name in _class_paths(entry, key):
            if not is_known(name):
                raise CheckpointError(
                    f"{origin} names the class {name} ({place}), which no module imported so far "
                    "has, and importing it would run code that the checkpoint chooses. If you "
                    f"trust the checkpoint, import the module of {name} before "
                    "load_from_checkpoint."
                )


def _class_paths(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield place and value of every ``class_path`` in nested values."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key == "class_path" and isinstance(entry, str):
                yield f"{place}[{key!r}]", entry
            yield from _class_paths(entry, f"{place}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, entry in enumerate(value):
            yield from _class_paths(entry, f"{place}[{index}]")
