"""Atomic saves: a new checkpoint is written next to an existing checkpoint of the same name, and
becomes visible in a single step.

On a file system (:class:`_LocalSave`):

    1. Every rank writes and flushes its files into ``<name>.tmp-<id>``. File names carry the id of
       this save.
    2. The manifest is written there last.
    3. A new name: the directory is renamed. An existing checkpoint: the files move into it, and the
       new manifest replaces the old manifest. Either commits by a single rename, so that a reader
       sees the old checkpoint or the new one.
    4. Files of the old save are deleted.

An object store (:class:`_RemoteSave`) cannot rename, but an object appears complete or not at all.
The files go straight to ``<name>/``, and the manifest still lists the old files. The new manifest
is put last, as the commit.

A save killed before the commit leaves the old checkpoint unchanged. A later save deletes the
leftover files. The writer locks the temporary directory, to distinguish another job's running save
from an abandoned save. In object stores, age distinguishes the two. If two jobs save under the same
name at once, one of the two checkpoints remains, complete.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_lightning.checkpoint.format.files import (
    abandoned,
    beside,
    exchange,
    lock,
    make_locked,
    new_identifier,
    release,
    sync_directory,
)
from megatron_lightning.checkpoint.format.manifest import Manifest, TensorInfo
from megatron_lightning.checkpoint.format.storage import (
    Folder,
    LocalFolder,
    RemoteFolder,
    is_remote,
    local_path,
)
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import EXPORT_FOLDER, MANIFEST, OUR_FILES, state_file

ABANDONED_AFTER_S = 24 * 3600.0
"""Age of uncommitted files in an object store after which the files count as abandoned."""
_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{12}")


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a checkpoint directory with a completed save."""
    if not is_remote(path):
        return (local_path(path) / MANIFEST).is_file()
    return MANIFEST in RemoteFolder(str(path)).sizes()  # a store without an answer is an error


def pending_save(path: str | os.PathLike[str], identifier: str) -> PendingSave:
    """Return a save in progress. The first rank begins and commits the save.

    Args:
        path: Final name of the checkpoint. An existing checkpoint stays readable until the commit.
        identifier: From :func:`new_identifier`, the same on all ranks.
    """
    return (
        _RemoteSave(str(path), identifier)
        if is_remote(path)
        else _LocalSave(local_path(path), identifier)
    )


class PendingSave(ABC):
    """A save in progress."""

    folder: Folder
    """Folder of the files of all ranks."""

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        self._state_file = state_file(identifier)
        self._state_bytes = self._state_checksum = 0
        self._begun = False

    def begin(self, state: bytes) -> None:
        """Make the folder and write the state file."""
        self._begun = True
        self._prepare()
        self._state_bytes = self.folder.write(self._state_file, [state])
        self._state_checksum = zlib.crc32(state)

    def commit(
        self, tensors: Mapping[str, TensorInfo], files: Mapping[str, int], info: Mapping[str, Any]
    ) -> None:
        """Write the manifest from ``files`` and the state file, and make the checkpoint visible
        under the final name.
        """
        manifest = Manifest(
            tensors=tensors,
            files={**files, self._state_file: self._state_bytes},
            state_file=self._state_file,
            state_checksum=self._state_checksum,
            info=info,
        )
        self._commit(manifest)
        self._begun = False

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Delete the written files if the block raises. An existing checkpoint of the name is
        untouched.
        """
        try:
            yield
        except BaseException:
            if self._begun:
                with suppress(Exception):  # a later save deletes the rest
                    self._discard()
            raise

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _commit(self, manifest: Manifest) -> None: ...

    @abstractmethod
    def _discard(self) -> None: ...


class _LocalSave(PendingSave):
    def __init__(self, path: Path, identifier: str) -> None:
        super().__init__(identifier)
        self._path = path
        self._temporary = beside(path, f".tmp-{identifier}")
        self.folder = LocalFolder(self._temporary)
        self._lock: int | None = None

    def _prepare(self) -> None:
        if self._path.is_dir() and _is_foreign(os.listdir(self._path)):
            raise _other_files(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._path.parent)
        self._lock = make_locked(self._temporary)

    def _commit(self, manifest: Manifest) -> None:
        self.folder.write(MANIFEST, [manifest.dumps().encode()])
        sync_directory(self._temporary)
        if self._path.is_symlink() or self._path.is_file():
            self._displace()
        else:
            try:
                os.rename(self._temporary, self._path)
            except OSError:
                if not self._path.is_dir():
                    raise
                self._replace(manifest)
        sync_directory(self._path.parent)
        self._unlock()

    def _displace(self) -> None:
        """Replace a file or a link, because a directory cannot be renamed over either. A link's
        target keeps the target's name.
        """
        if exchange(self._temporary, self._path):
            self._temporary.unlink()
            return
        aside = beside(self._path, f".old-{self.identifier}")
        os.rename(self._path, aside)
        try:
            os.rename(self._temporary, self._path)
        except OSError:
            os.rename(aside, self._path)
            raise
        aside.unlink()

    def _replace(self, manifest: Manifest) -> None:
        """Put the new files and the manifest into the existing directory of the name."""
        directory = os.open(self._path, os.O_RDONLY)
        try:
            # One job at a time. If directories cannot be locked, only files of the replaced
            # manifest are known garbage.
            alone = lock(directory)
            for name in manifest.files:
                os.rename(self._temporary / name, self._path / name)
            sync_directory(self._path)
            replaced = _files_of(self._path / MANIFEST)
            with suppress(FileNotFoundError):  # weights of the old save; deleted with the temporary
                os.rename(self._path / EXPORT_FOLDER, self._temporary / EXPORT_FOLDER)
            os.replace(self._temporary / MANIFEST, self._path / MANIFEST)
            sync_directory(self._path)
            file_names = [name for name in os.listdir(self._path) if OUR_FILES.fullmatch(name)]
            LocalFolder(self._path).remove(
                name
                for name in file_names
                if (alone or name in replaced) and name not in manifest.files
            )
        finally:
            release(directory)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _discard(self) -> None:
        self._unlock()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            release(self._lock)
            self._lock = None


class _RemoteSave(PendingSave):
    folder: RemoteFolder

    def __init__(self, url: str, identifier: str) -> None:
        super().__init__(identifier)
        self.folder = RemoteFolder(url)

    def _prepare(self) -> None:
        if _is_foreign(self.folder.sizes()):
            raise _other_files(self.folder)
        self.folder.files.makedirs(self.folder.root, exist_ok=True)

    def _commit(self, manifest: Manifest) -> None:
        replaced = (
            _files_listed(self.folder.files.cat_file(self._manifest))
            if is_committed(self.folder.url)
            else ()
        )
        self.folder.files.pipe_file(self._manifest, manifest.dumps().encode())
        with suppress(Exception):  # committed: remaining files are deleted when old
            old_files = [
                name
                for name in self.folder.sizes()
                if OUR_FILES.fullmatch(name) and name not in manifest.files
            ]
            self.folder.remove(
                name for name in old_files if name in replaced or self._is_abandoned(name)
            )

    @property
    def _manifest(self) -> str:
        return f"{self.folder.root}/{MANIFEST}"

    @property
    def _is_committed(self) -> bool:
        """Whether our manifest exists: a store may lose the answer after a successful write."""
        try:
            return self._state_file in _files_listed(self.folder.files.cat_file(self._manifest))
        except FileNotFoundError:
            return False

    def _is_abandoned(self, name: str) -> bool:
        modified = self.folder.modified(name)  # without times, leftovers of killed saves stay
        return modified is not None and time.time() - modified > ABANDONED_AFTER_S

    def _discard(self) -> None:
        mark = f".{self.identifier}."
        if not self._is_committed:
            self.folder.remove(
                name for name in self.folder.sizes() if OUR_FILES.fullmatch(name) and mark in name
            )


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint (directory, file or link). The checkpoint disappears from view in a
    single step.

    A missing checkpoint is fine, also if another job deletes the checkpoint at the same time. A
    directory of other files stays: callbacks read the names to delete from the resumed checkpoint,
    possibly written by anybody.
    """
    if is_remote(path):
        folder = RemoteFolder(str(path))
        if folder.files.isfile(folder.root):
            folder.files.rm_file(folder.root)
        # Without a rename, the manifest goes first: a folder without one is no checkpoint.
        folder.remove([MANIFEST])
        folder.remove(name for name in folder.sizes() if OUR_FILES.fullmatch(name))
        return
    path_here = local_path(path)
    if path_here.is_symlink() or path_here.is_file():
        path_here.unlink(missing_ok=True)
    elif path_here.is_dir():
        to_delete = beside(path_here, f".tmp-{new_identifier()}")
        with suppress(FileNotFoundError):
            if not _TEMPORARY.fullmatch(path_here.name) and _is_foreign(os.listdir(path_here)):
                warnings.warn(
                    f"{path_here} is not deleted: it is a directory with other files, and no "
                    "checkpoint.",
                    stacklevel=2,
                )
                return
            # Deleting takes time. A rename makes it disappear at once, and a killed process leaves
            # a folder that prune recognizes.
            os.rename(path_here, to_delete)
        shutil.rmtree(to_delete, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Delete the temporary directories of killed saves in ``folder``. None if directories cannot be
    locked.
    """
    for entry in folder.iterdir():
        if _TEMPORARY.fullmatch(entry.name) and entry.is_symlink():
            entry.unlink(missing_ok=True)
    for entry in abandoned(folder, _TEMPORARY):
        shutil.rmtree(entry, ignore_errors=True)


def _files_of(manifest: Path) -> frozenset[str]:
    try:
        return _files_listed(manifest.read_bytes())
    except FileNotFoundError:
        return frozenset()


def _files_listed(text: bytes) -> frozenset[str]:
    try:
        return frozenset(Manifest.loads(text).files)
    except CheckpointError:
        return frozenset()  # damaged: the files are removed with abandoned files


def _is_foreign(names: Collection[str]) -> bool:
    """Whether a directory has files, but no file of ours. Other programs use the name manifest.json
    too.
    """
    return bool(names) and not any(OUR_FILES.fullmatch(name) for name in names)


def _other_files(path: object) -> CheckpointError:
    return CheckpointError(
        f"{path} is a directory with other files, and a checkpoint of that name would mix with "
        "them. Choose another name or move the directory."
    )
