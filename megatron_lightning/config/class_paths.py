"""Class paths in a checkpoint: of modules that are imported already. No torch here.

Importing a module runs it, and a checkpoint of somebody else's may name any, such as a file that
lies beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron_lightning.config.layer_kinds import LAYER_KINDS
from megatron_lightning.config.transformer import TransformerConfig
from megatron_lightning.errors import CheckpointError

_TRUSTED = ("torch", "megatron_lightning")
"""Packages whose classes may be named without an import."""


def imported_class(path: object) -> Any:
    """Return the object at a class path in a module that is imported already. None: there is no
    such module or object.
    """
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    return getattr(sys.modules.get(module), name, None) if module else None


def is_known(path: str) -> bool:
    """Return whether a class path runs no code that a checkpoint chooses."""
    return path.partition(".")[0] in _TRUSTED or imported_class(path) is not None


def check_known(path: str, name: str) -> None:
    """Check a class path of a checkpoint.

    Args:
        path: The class path.
        name: What the class is, for the message.

    Raises:
        CheckpointError: If the class's module is not imported yet.
    """
    if not is_known(path):
        raise CheckpointError(
            f"the checkpoint names {path!r} as {name}, which no module imported so far has, and "
            "importing it would run code that the checkpoint chooses. If you trust the "
            f"checkpoint, import {path.rpartition('.')[0]} in a Python program before you use it "
            "there."
        )


def config_of_checkpoint(values: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration in a checkpoint.

    Raises:
        CheckpointError: If a user's kind of layer is not imported yet.
    """
    pattern = values.get("layer_pattern")
    for kind in pattern if isinstance(pattern, list | tuple) else ():
        if isinstance(kind, str) and kind not in LAYER_KINDS:
            check_known(kind, "a kind of layer")
    return TransformerConfig(**values)
