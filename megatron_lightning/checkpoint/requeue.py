"""The checkpoint of a job queued again by Slurm. Lightning takes the largest number, even of a
killed save.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from megatron_lightning.checkpoint.commit import is_committed
from megatron_lightning.checkpoint.format.storage import is_plain_file, list_folders

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def committed_requeue(path: str) -> str:
    """Return the newest committed ``hpc_ckpt_<n>.ckpt`` if ``path`` is such a name without a
    checkpoint. Otherwise return ``path``.
    """
    folder, _, name = path.rpartition("/")
    if not _REQUEUED.fullmatch(name) or is_committed(path) or is_plain_file(path):
        return path
    try:
        numbered = [
            (_numbered(folder_path), folder_path) for folder_path in list_folders(folder or ".")
        ]
    except FileNotFoundError:
        return path
    return max(
        (
            (int(number[1]), folder_path)
            for number, folder_path in numbered
            if number and is_committed(folder_path)
        ),
        default=(0, path),
    )[1]


def _numbered(path: str) -> re.Match[str] | None:
    return _REQUEUED.fullmatch(PurePosixPath(path).name)
