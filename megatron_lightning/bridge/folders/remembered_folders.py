"""Folders remembered by models, and texts remembered by modules, on their way into checkpoints. A
run without folders imports this file alone of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_lightning.checkpoint.kept_files import KEPT
from megatron_lightning.checkpoint.text_record import TEXTS
from megatron_lightning.models.teacher_student import FrozenPair

if TYPE_CHECKING:
    from megatron_lightning.bridge.folders.folder_record import KeptFolder
    from megatron_lightning.checkpoint.text_record import TextRecord

ATTRIBUTE = "_kept_folder"
"""Attribute of a model with the record of its folder."""
_TEXT_RECORD = "_text_record"
"""Attribute of a LightningModule with the record of its texts."""

_NEW = "_new_parameters"


def remember_new(model: nn.Module, names: Iterable[str]) -> None:
    """Make a model remember the names of its parameters that the folder lacks."""
    model.__dict__[_NEW] = tuple(names)


def new_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's parameters that the model's folder lacks."""
    names: tuple[str, ...] = model.__dict__.get(_NEW, ())
    return names


def kept_folders(module: nn.Module) -> dict[str, KeptFolder]:
    """Return path -> folder of a module's models with remembered folders. Frozen models beside
    trained ones are left out, since their folders hold what is trained nowhere.
    """
    frozen = tuple(
        f"{path}.frozen." if path else "frozen."
        for path, child in module.named_modules()
        if isinstance(child, FrozenPair)
    )
    return {
        path: child.__dict__[ATTRIBUTE]
        for path, child in module.named_modules()
        if ATTRIBUTE in child.__dict__ and not f"{path}.".startswith(frozen)
    }


def remember_texts(module: nn.Module, record: TextRecord) -> None:
    """Make a LightningModule remember what training taught about texts."""
    module.__dict__[_TEXT_RECORD] = record


def text_record(module: nn.Module) -> TextRecord | None:
    """Return what training taught a LightningModule about texts. None: nothing is known."""
    record: TextRecord | None = module.__dict__.get(_TEXT_RECORD)
    return record


def write_kept(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Add the folders of a module's models, and the record of texts, to a checkpoint."""
    folders, record = kept_folders(module), text_record(module)
    if folders and KEPT not in checkpoint:
        checkpoint[KEPT] = {path: folder.entry for path, folder in folders.items()}
    if record is not None:
        checkpoint.setdefault(TEXTS, record.state)
