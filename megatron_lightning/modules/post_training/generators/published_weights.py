"""Weights of a fit as folders, for generators to take."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from megatron_lightning.assembly.state.full_state import path_of
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.checkpoint.agreement import on_first_rank
from megatron_lightning.checkpoint.format.files import abandoned, make_locked, release
from megatron_lightning.inference.serving.new_weights import Version
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.peft import folder
from megatron_lightning.peft.base_digest import digest_of_part, frozen_names
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.saved import Base, SavedAdapters

_MARK = f".{platform.node()}.running"
"""End of the name of a folder that a running fit of this machine has locked. Some file systems of
several machines lock directories for each machine alone.
"""
_MARKS = re.compile(rf"[0-9a-f]{{12}}{re.escape(_MARK)}")


class PublishedWeights:
    """Writes the current weights of a model, of adapters alone if it has some.

    Args:
        strategy: Of the fit.
        model: The trained model, or this rank's part.
        target: Folder for the folders.
        run: Name of the fit.
        kept: Folders left in a fit: generators may still read those before the newest.
    """

    def __init__(
        self, strategy: Any, model: nn.Module, target: str, run: str, *, kept: int = 2
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._target = Path(target)
        self._run = run
        self._kept = kept
        self._written: list[Version] = []
        self._stream: Any = None
        self._base: Base | None = None  # of adapters
        self._lock: int | None = None  # descriptor of a folder that says that this fit runs

    def begin(self) -> None:
        """Remove the folders of fits that were killed on this machine. Called by the first rank
        alone.

        A fit locks a folder of its own until its process ends. Without locks nothing is removed.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        for mark in abandoned(self._target, _MARKS):
            self._remove_all(mark.name.removesuffix(_MARK))
        self._lock = make_locked(self._target / f"{self._run}{_MARK}")

    def write(self, step: int) -> Version:
        """Write the weights behind optimizer step ``step``. A collective of all ranks.

        Raises:
            ConfigError: If no family of ``transformers`` describes the model.
        """
        version = Version(self._run, step)
        if self._written and self._written[-1] == version:  # no update has changed them
            return version
        path = self._target / version.folder
        if applied_to(self._model):
            self._write_adapters(path)
        else:
            if self._stream is None:
                dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
                self._stream = self._strategy.weights(module=self._model, dtype=dtype)
            self._stream.write(path)
        self._written.append(version)
        return version

    def _write_adapters(self, path: Path) -> None:
        model, strategy = self._model, self._strategy
        full = strategy.run.full_state(model)
        own_path = path_of(strategy.module, model)
        prefix = f"{own_path}." if own_path else ""
        [applied] = applied_to(model).values()
        names = {name: name.removeprefix(prefix) for name in full.collected}
        state = {  # on all ranks, which read each tensor together
            own: full.tensor(name)
            for name, own in names.items()
            if name.startswith(prefix) and (".adapters." in own or own in applied.saved)
        }
        is_gpt = isinstance(model, GPTModel)
        if self._base is None:  # frozen, so that it is read once
            frozen = [name for name in frozen_names(strategy.module) if name.startswith(prefix)]
            part = ModuleState(strategy.module, strategy.run.part, strategy.context)
            self._base = Base(digest=digest_of_part(part, own_path, frozen))
        saved = SavedAdapters.of_state(state, applied, self._base, is_gpt=is_gpt)
        # All ranks wait: each replica may tell a generator of the folder next.
        on_first_rank(
            strategy.context.axis("world"),
            lambda: folder.write_folder(path, saved, overwrite=True),
        )

    def remove(self, *, all_of_them: bool = False) -> None:
        """Remove folders that no generator reads any more. Called by the first rank alone."""
        while not all_of_them and len(self._written) > self._kept:
            shutil.rmtree(self._target / self._written.pop(0).folder, ignore_errors=True)
        if all_of_them and self._lock is not None:
            self._written.clear()
            self._remove_all(self._run)
            release(self._lock)
            self._lock = None

    def _remove_all(self, run: str) -> None:
        """Remove the folders of a fit, those of writes that failed among them, and its mark."""
        weights = re.compile(rf"{run}-[0-9]{{9}}(\.tmp-.*)?")
        for path in self._target.iterdir():
            if weights.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self._target / f"{run}{_MARK}", ignore_errors=True)
