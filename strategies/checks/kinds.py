"""Kinds of this package's own modules, recognized without importing the modules.

Objects of a class exist only after the import of the class. So a run of a user's own module does
not wait for the imports of language models, folders and data.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from megatron_lightning.modules.data_modules.indexed_data_module import IndexedDataModule
    from megatron_lightning.modules.distillation import DistillationModule
    from megatron_lightning.modules.finetune_data import FinetuneDataModule
    from megatron_lightning.modules.folder_module import FolderModule
    from megatron_lightning.modules.gpt import GPTLightningModule
    from megatron_lightning.modules.objective import ObjectiveModule
    from megatron_lightning.modules.post_training.rollout_data import RolloutDataModule


def is_distillation(module: object) -> TypeGuard[DistillationModule]:
    """Return whether the module trains a student on the outputs of a teacher."""
    return isinstance(module, _imported("distillation", "DistillationModule"))


def is_finetune_data(data: object) -> TypeGuard[FinetuneDataModule]:
    """Return whether the data are chats or answers from files."""
    return isinstance(data, _imported("finetune_data", "FinetuneDataModule"))


def is_folder_module(module: object) -> TypeGuard[FolderModule]:
    """Return whether the module can hold a model of a Hugging Face folder."""
    return isinstance(module, _imported("folder_module", "FolderModule"))


def is_gpt_module(module: object) -> TypeGuard[GPTLightningModule]:
    """Return whether the module trains a ``GPTModel`` made from a configuration."""
    return isinstance(module, _imported("gpt", "GPTLightningModule"))


def is_indexed_data(data: object) -> TypeGuard[IndexedDataModule]:
    """Return whether the data are indexed files."""
    return isinstance(data, _imported("data_modules.indexed_data_module", "IndexedDataModule"))


def is_objective(module: object) -> TypeGuard[ObjectiveModule]:
    """Return whether the module trains the model of another module by a different loss."""
    return isinstance(module, _imported("objective", "ObjectiveModule"))


def is_rollout_data(data: object) -> TypeGuard[RolloutDataModule]:
    """Return whether the data are sampled texts with rewards."""
    return isinstance(data, _imported("post_training.rollout_data", "RolloutDataModule"))


def has_hook_of_gpt_module(module: object, hook: str) -> bool:
    """Return whether :class:`GPTLightningModule` defines a hook of the module."""
    return _has_hook(module, hook, _imported("gpt", "GPTLightningModule"))


def has_hook_of_hugging_face_module(module: object, hook: str) -> bool:
    """Return whether :class:`HuggingFaceModule` defines a hook of the module."""
    return _has_hook(module, hook, _imported("hugging_face", "HuggingFaceModule"))


def _has_hook(module: object, hook: str, kind: Any) -> bool:
    return kind != () and getattr(type(module), hook) is getattr(kind, hook)


def _imported(name: str, kind: str) -> Any:
    """Return a class, or a tuple of no classes before the import of the class."""
    return getattr(sys.modules.get(f"megatron_lightning.modules.{name}"), kind, ())
