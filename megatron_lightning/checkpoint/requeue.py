"""The checkpoint of a job queued again by Slurm. Lightning takes the largest number, even of a
killed save.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from megatron_lightning.checkpoint.format.storage import is_plain_file, is_remote, list_folders
from megatron_lightning.checkpoint.writing.commit import is_committed

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def committed_requeue(path: str) -> str:
    """Return the newest committed ``hpc_ckpt_<n>.ckpt`` if ``path`` is such a name without a
    checkpoint. Otherwise return ``path``.
    """
    folder, _, name = path.rpartition("/")
    if not _REQUEUED.fullmatch(name) or is_committed(path) or is_plain_file(path):
        return path
    return newest_requeue(folder or ".") or path


def newest_requeue(folder: str) -> str | None:
    """Return the ``hpc_ckpt_<n>.ckpt`` in ``folder`` with the largest number, committed or a plain
    file. None: there is none.
    """
    try:
        paths = list_folders(folder)
    except FileNotFoundError:
        return None
    numbers = {path: int(number[1]) for path in paths if (number := _numbered(path))}
    committed = [path for path in numbers if is_committed(path)]
    if not is_remote(folder):
        files = [str(path) for path in Path(folder).glob("hpc_ckpt_*.ckpt") if path.is_file()]
        numbers |= {path: int(number[1]) for path in files if (number := _numbered(path))}
        committed += [path for path in files if path in numbers]
    return max(committed, key=lambda path: numbers[path], default=None)


def _numbered(path: str) -> re.Match[str] | None:
    return _REQUEUED.fullmatch(PurePosixPath(path).name)
