"""Folders and Hub ids: a local folder for each, downloaded into the cache if missing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.errors import MissingCheckpointError
from megatron_lightning.file_names import PICKLED_INDEX, PICKLED_WEIGHTS, WEIGHTS, WEIGHTS_INDEX
from megatron_lightning.optional import HF_FOLDER, require

TEXTS = (
    "*.json", "*.model", "*.model.*", "*.txt", "*.jinja", "*.py", "*.md", "*.tiktoken", "*.spm",
    "*.bpe", "*.codes", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files without weights."""
# Copies of the weights in formats of other programs.
_OTHER_FOLDERS = ("original/*", "onnx/*", "metal/*", "coreml/*", "*/onnx/*", "runs/*", ".*")


def local_folder(path: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return a folder, or the local snapshot of a Hub id, downloaded if missing from the cache.

    A cache without the model's weights is completed. Only weight files for
    :class:`HuggingFaceFolder` are downloaded, without copies in other formats.

    Args:
        path: A folder, or a Hub id.
        revision: Branch, tag or commit of the Hub id. None: main.
        weights: Whether weights are needed.

    Raises:
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """
    if Path(path).is_dir():
        return Path(path)
    if Path(path).suffix == ".ckpt":  # of a checkpoint: no request of the Hub could help
        raise MissingCheckpointError.at(path)
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = _cached(path, revision, weights=weights)
    except HFValidationError as error:
        raise MissingCheckpointError.at(path) from error
    if cached is not None:
        return cached
    try:
        snapshot = _snapshot(path, revision, TEXTS)
        if weights:
            # The texts come first: the index says which files hold the weights.
            files = weight_files(snapshot)
            snapshot = _snapshot(path, revision, files)
            if files == (WEIGHTS,) and not (snapshot / WEIGHTS).exists():
                snapshot = _snapshot(path, revision, (PICKLED_WEIGHTS,))
        return snapshot
    except Exception as error:
        reason = _reason(error)
        if isinstance(error, LocalEntryNotFoundError):
            reason = "the Hub does not answer"
        raise MissingCheckpointError(
            f"There is neither a file nor a folder {path}: check the path. It cannot be downloaded "
            f"as an id of the Hub either ({reason}): check the id, the revision "
            f"{revision or 'main'}, and the access of this machine; HF_HUB_OFFLINE=1 reads the "
            "cache only."
        ) from error


def find_file(path: str | Path, name: str, *, revision: str | None = None) -> Path | None:
    """Return a file of a folder, or of a Hub id: from the cache, or downloaded. None: there is no
    such file, or nothing is known about the file: offline, or, with a warning, because the Hub does
    not answer.

    Args:
        path: A folder, or a Hub id.
        name: Name of the file.
        revision: Branch, tag or commit of the Hub id. None: main.
    """
    if Path(path).exists():
        file = Path(path) / name
        return file if file.is_file() else None
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = try_to_load_from_cache(str(path), name, revision=revision)
        if cached is not None:  # a path, or a mark that there is no such file
            return Path(cached) if isinstance(cached, str) else None
        return Path(hf_hub_download(str(path), name, revision=revision))
    except HFValidationError:  # no Hub id
        return None
    except (HfHubHTTPError, OSError) as error:
        if not _is_absent(error):
            warnings.warn(
                f"Whether {path} has {name} at the revision {revision or 'main'} is not known, and "
                f"the run goes on as if it had none: {_reason(error.__cause__ or error)}. Its end "
                "tokens may be missing. Try again, check the access of this machine, or download "
                "the model and name its folder.",
                stacklevel=2,
            )
        return None


def _is_absent(error: Exception) -> bool:
    """Return whether an error says that a file does not exist, or is not in the cache offline. A
    request without an answer ends in an error of the cache, too.
    """
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, LocalEntryNotFoundError):
        return error.__cause__ is None or isinstance(error.__cause__, OfflineModeIsEnabled)
    return isinstance(error, EntryNotFoundError | OfflineModeIsEnabled)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)


def _cached(path: str | Path, revision: str | None, *, weights: bool) -> Path | None:
    """Return the snapshot in the cache. None: there is none, or files are missing from it."""
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = _snapshot(path, revision, TEXTS, cached=True)
    except LocalEntryNotFoundError:
        return None
    files = weight_files(snapshot) if weights else ()
    return snapshot if all((snapshot / file).exists() for file in files) else None


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return a folder's weight files, by the folder's indexes. Not all files need to exist yet."""
    if not (folder / WEIGHTS).exists():
        for index in (WEIGHTS_INDEX, PICKLED_INDEX):
            if (folder / index).exists() and (files := _listed(folder / index)):
                return files
    return (PICKLED_WEIGHTS,) if (folder / PICKLED_WEIGHTS).exists() else (WEIGHTS,)


def _listed(index: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(set(json.loads(index.read_bytes())["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()  # damaged: reading the folder says so


def _snapshot(
    path: str | Path, revision: str | None, files: Sequence[str], *, cached: bool = False
) -> Path:
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": [*_OTHER_FOLDERS]}
    return Path(snapshot_download(str(path), revision=revision, local_files_only=cached, **options))
