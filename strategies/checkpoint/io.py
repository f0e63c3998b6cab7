"""Our checkpoint directories for a plain Trainer: ``Trainer(plugins=[ShardedCheckpointIO()])`` on
one device.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO

from megatron_lightning.checkpoint import read_full, remove_checkpoint
from megatron_lightning.checkpoint.format.storage import is_folder


class ShardedCheckpointIO(TorchCheckpointIO):
    """Reads checkpoint directories of any layout as well as plain files. Saves plain files.

    A Trainer without :class:`MegatronStrategy` can then continue, test or predict from checkpoints
    of the strategy.
    """

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the full checkpoint, with tensors on the CPU if ``path`` is a directory or the URL
        of a directory.

        A plain file is read as plain data from any place, unless ``weights_only=False`` declares
        the file trusted.

        Raises:
            CheckpointError: If the directory is incomplete or damaged.
        """
        if is_folder(path):
            return read_full(path)
        loaded: dict[str, Any] = super().load_checkpoint(
            path, map_location, weights_only is not False
        )
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a directory or a file."""
        remove_checkpoint(path)


def complete_io(io: CheckpointIO | None) -> CheckpointIO:
    """Return a plugin for plain files: the user's own, or ours, also inside of Lightning's
    wrappers.
    """
    if io is None:
        return ShardedCheckpointIO()
    if hasattr(io, "checkpoint_io"):
        io.checkpoint_io = ShardedCheckpointIO()  # wrappers of another plugin keep theirs
    return io


def users_io(io: CheckpointIO | None) -> CheckpointIO | None:
    """Return a checkpoint plugin of the user's own. None: checkpoints are sharded directories.

    Lightning's ``AsyncCheckpointIO`` without an inner plugin asks for sharded directories, written
    in the background.
    """
    inner = io
    while isinstance(inner, AsyncCheckpointIO):
        inner = inner.checkpoint_io
    return None if inner is None or type(inner) is ShardedCheckpointIO else io
