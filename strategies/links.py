"""Links to checkpoints that are still being written: until the commit they lead to where they led before.

``ModelCheckpoint(save_last="link")`` points its link to a new checkpoint as soon as the Trainer's save returns. With a save in
the background nothing stands there yet, and nothing ever will if it fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import lightning.pytorch as pl

from megatron_lightning.checkpoint.files import beside, new_identifier


def link_paths(trainer: pl.Trainer) -> list[Path]:
    """Return where the links of the Trainer's callbacks are, those not made yet left out."""
    callbacks = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_last", None) == "link"]
    paths = [getattr(callback, "last_model_path", "") for callback in callbacks]
    return [Path(path).absolute() for path in paths if path]


class PendingLinks:
    """The links to one checkpoint that is being written.

    Args:
        path: The checkpoint.
        links: Where links are that may soon point to it.
    """

    def __init__(self, path: Path, links: Iterable[Path]) -> None:
        self._path = path.absolute()
        self._before = {link: os.readlink(link) for link in links if link.is_symlink()}
        self._held: list[Path] = []

    def hold(self, links: Iterable[Path]) -> None:
        """Turn links to the checkpoint back to where they led when it was begun; new ones are taken away."""
        for link in links:
            if link.is_symlink() and link.parent / os.readlink(link) == self._path:
                if link in self._before:
                    _point(link, self._before[link])
                else:
                    link.unlink()
                self._held.append(link)

    def release(self) -> None:
        """Point the links to the checkpoint, which is committed; each in one step."""
        for link in self._held:
            _point(link, os.path.relpath(self._path, link.parent))
        self._held = []


def _point(link: Path, target: str) -> None:
    temporary = beside(link, f".tmp-{new_identifier()}")
    os.symlink(target, temporary)
    os.replace(temporary, link)
