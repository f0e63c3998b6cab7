"""Our checkpoint directories for a plain Trainer: ``Trainer(plugins=[ShardedCheckpointIO()])`` on one device."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from megatron_lightning.checkpoint import read_full, remove_checkpoint
from megatron_lightning.checkpoint.storage import is_folder


class ShardedCheckpointIO(TorchCheckpointIO):
    """Reads checkpoint directories of any layout as well as plain files; saves plain files.

    It lets a Trainer without :class:`MegatronStrategy` continue, test or predict from what the strategy saved.
    """

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the whole checkpoint, with tensors on the CPU if ``path`` is a directory or the URL of one.

        A plain file is read as plain data wherever it is, unless ``weights_only=False`` says that it is trusted.

        Raises:
            CheckpointError: If the directory is incomplete or damaged.
        """
        if is_folder(path):
            return read_full(path)
        loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only is not False)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a directory or a file."""
        remove_checkpoint(path)
