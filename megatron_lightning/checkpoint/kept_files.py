"""Small files kept in a checkpoint: configuration, tokenizer, chat template, generation
configuration and licences from the Hugging Face folder of a model.

A checkpoint, directory or plain file, keeps the files in the state under ``"hugging_face"``::

    {path of a model in the LightningModule: {
        "origin": folder or Hub id, "revision": branch, tag or commit,
        "files": {name: {"packed": zlib's bytes, "bytes": size, "sha256": digest}},
        "tables": {name of a weight file: its header}, "carried": …   # of bridge.folder_record
    }}

Any tool can read the tokenizer from a checkpoint, without folder and weights::

    with read_kept_files("last.ckpt").unpacked() as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import CHAT_TEMPLATES

KEPT = "hugging_face"
"""Entry of a checkpoint's state."""
TOKENIZER = "tokenizer"
"""Entry of a data module's state: ``type``, ``model`` and ``files`` of its tokenizer."""
_MAX_FILE_BYTES = 64 << 20
# Weights in unconverted formats would belong to another model than the new weights.
_LEFT_OUT = frozenset((
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx",
    ".onnx_data", ".ot", ".npz", ".pkl", ".pickle", ".tflite", ".mlmodel", ".mlpackage", ".tar",
    ".gz", ".zip", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4",
))  # fmt: skip


@dataclass(frozen=True)
class KeptFiles:
    """Files of a Hugging Face folder, less weights and pictures."""

    contents: Mapping[str, bytes]
    """Name in the folder -> content."""

    @classmethod
    def of_folder(cls, path: Path) -> KeptFiles:
        """Read the files of a folder. A file above 64 MiB is left out with a warning."""
        contents = {}
        for file in [*sorted(path.iterdir()), *sorted((path / CHAT_TEMPLATES).glob("*.jinja"))]:
            name = file.relative_to(path).as_posix()
            if name.startswith(".") or file.suffix.lower() in _LEFT_OUT or not file.is_file():
                continue
            if file.stat().st_size > _MAX_FILE_BYTES:
                warnings.warn(
                    f"{file} has {file.stat().st_size:,} bytes and does not travel with the model.",
                    stacklevel=2,
                )
                continue
            contents[name] = file.read_bytes()
        return cls(contents)

    def to_state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {
            name: {
                "packed": zlib.compress(content, 1),
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            for name, content in self.contents.items()
        }

    @classmethod
    def from_state(cls, state: Any, origin: str) -> KeptFiles:
        """Return the files from the description of :meth:`to_state`.

        Args:
            state: The description.
            origin: The checkpoint's name, for messages.

        Raises:
            CheckpointError: If a file is damaged, or a name leads out of the folder.
        """
        try:
            return cls({name: _unpacked(name, **entry) for name, entry in state.items()})
        except (AttributeError, TypeError, ValueError, zlib.error) as error:
            raise CheckpointError(
                f"{origin}: its Hugging Face files are damaged ({error}). Name the folder that the "
                "model came from, or use another checkpoint."
            ) from error

    def write_to(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    @contextmanager
    def unpacked(self) -> Iterator[Path]:
        """Yield a temporary folder with the files, for ``from_pretrained`` of tokenizers and
        configurations.
        """
        with tempfile.TemporaryDirectory(prefix="hugging-face-") as folder:
            self.write_to(Path(folder))
            yield Path(folder)


def read_kept_files(path: str | os.PathLike[str], model: str | None = None) -> KeptFiles | None:
    """Return the Hugging Face files in a checkpoint. None: a checkpoint without such files.

    Args:
        path: A checkpoint directory, plain file, or URL.
        model: Path of the model in the LightningModule. None: the first model with files.

    Raises:
        CheckpointError: If the checkpoint or a kept file is damaged.
    """
    from megatron_lightning.checkpoint.reading.source import (
        open_checkpoint,  # tools start without it
    )

    entry = kept_entry(open_checkpoint(path).state(), model)
    return None if entry is None else KeptFiles.from_state(entry[1].get("files"), str(path))


def read_kept_tokenizer(
    path: str | os.PathLike[str],
) -> tuple[str, str, KeptFiles] | None:
    """Return type, name and files of the tokenizer of a checkpoint's pre-training data. None: a
    checkpoint without one.

    Raises:
        CheckpointError: If the checkpoint or a file is damaged.
    """
    from megatron_lightning.checkpoint.reading.source import open_checkpoint

    for entry in open_checkpoint(path).state().values():
        tokenizer = entry.get(TOKENIZER) if isinstance(entry, Mapping) else None
        if isinstance(tokenizer, Mapping) and {"type", "model", "files"} <= tokenizer.keys():
            files = KeptFiles.from_state(tokenizer["files"], str(path))
            return str(tokenizer["type"]), str(tokenizer["model"]), files
    return None


def kept_entry(
    state: Mapping[str, Any], model: str | None = None
) -> tuple[str, Mapping[str, Any]] | None:
    """Return path and entry of a model in a checkpoint's state. None: no entry.

    Args:
        state: The state.
        model: Path of the model in the LightningModule. None: the first.
    """
    entries = state.get(KEPT)
    if not isinstance(entries, Mapping):
        return None
    matches = [path for path in entries if model is None or path == model]
    entry = entries[matches[0]] if matches else None
    return (matches[0], entry) if isinstance(entry, Mapping) else None


def _unpacked(name: str, *, packed: bytes, bytes: int, sha256: str) -> bytes:
    parts = name.split("/")
    is_plain = all(part not in ("", ".", "..") and "\\" not in part for part in parts)
    if not is_plain or "\0" in name or not (len(parts) == 1 or parts[:-1] == [CHAT_TEMPLATES]):
        raise ValueError(f"{name!r} is no plain file name")
    if not 0 <= bytes <= _MAX_FILE_BYTES:
        raise ValueError(f"{name} has {bytes:,} bytes")
    content = zlib.decompressobj().decompress(packed, bytes + 1)
    if len(content) != bytes or hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"the content of {name} is not what was saved")
    return content
