"""Positions of models that count time, height and width of an image apart, such as Qwen2.5-VL.

The model itself says the three positions of a document. In a packed row they follow behind the flat
position, which starts again with every document and by which the model separates documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.optional import require

POSITION_ROWS = "position_rows"
"""Key of the positions in samples and batches."""
_METHOD = "get_rope_index"


class ImagePositions:
    """Positions of a model's documents, made without weights.

    Args:
        kind: Class of the model in ``transformers``.
        config: Its configuration.
    """

    def __init__(self, kind: Any, config: Any) -> None:
        self._kind, self._config = kind, config

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._kind, self._config)

    @classmethod
    def load(cls, folder: Path, *, trusts: bool = False) -> ImagePositions | None:
        """Return the positions of a folder's model. None: it has one position a token.

        Args:
            folder: Folder of a model.
            trusts: Whether code in the folder may run.
        """
        require("transformers", "images in chats")
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
        kind = MODEL_MAPPING.get(type(config), None)
        return cls(kind, config) if hasattr(kind, _METHOD) else None

    def of_document(self, ids: Tensor, entries: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of a document [4, n]: flat, and the model's own three.

        Args:
            ids: Of the document [n].
            entries: Entries of its images. None has a value: a document of text.
        """
        flat = torch.arange(len(ids)).expand(4, -1)
        given = {name: entries[name] for name in self._names if name in entries}
        if not any(entry.numel() for entry in entries.values() if entry.is_floating_point()):
            return flat
        own, _ = self._method(ids[None], **given)
        return torch.cat([flat[:1], own[:, 0]])

    @cached_property
    def _method(self) -> Any:
        with torch.device("meta"):  # the method reads the configuration alone
            return getattr(self._kind(self._config), _METHOD)

    @cached_property
    def _names(self) -> list[str]:
        """Entries that the method reads."""
        names = inspect.signature(getattr(self._kind, _METHOD)).parameters
        return [name for name in names if name not in ("self", "input_ids", "attention_mask")]
