r"""Token sequences on disk in Megatron's indexed format: ``PREFIX.bin`` and ``PREFIX.idx``.

Both are little endian. ``.bin`` holds the tokens of all sequences back to back, no header. ``.idx``
holds, with S sequences and D - 1 documents::

    "MMIDIDX\0\0" | u64 version = 1 | u8 dtype code | u64 S | u64 D
    i32[S] sequence lengths in tokens | i64[S] byte offsets into .bin
    i64[D] first sequence of each document, then S

A document is a run of sequences, for text a single sequence. Multimodal files carry i8[S] modes at
the end. Training ignores the modes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.indexed.atomic_files import flush_to_disk, temporary_beside
from megatron_lightning.data.indexed.remote import BlockCache, is_remote, local_path
from megatron_lightning.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Position = code in the header.
_DTYPES = ("", "<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Return the smallest dtype Megatron stores a vocabulary in: uint16 below 65500 ids, else
    int32.
    """
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the file of tokens of the dataset ``prefix``."""
    return Path(f"{local_path(str(prefix))}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the index file of the dataset ``prefix``."""
    return Path(f"{local_path(str(prefix))}.idx")


def index_header(dtype: np.dtype[np.generic], num_sequences: int, num_boundaries: int) -> bytes:
    """Return the first bytes of an index file. There is a boundary before, between and behind the
    documents.
    """
    code = [np.dtype(name) for name in _DTYPES[1:]].index(dtype) + 1
    return _HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_boundaries)


class IndexedDataset:
    """Memory-mapped, read-only view of a dataset. ``dataset[i]`` is sequence i as an array [length]
    of the stored dtype.

    Args:
        prefix: Path or URL of the two files without their suffixes.
        cache: Keeps what is read from a URL. Required for a URL.

    Raises:
        DataError: If a file is missing, is not of this format, or is truncated.
    """

    def __init__(self, prefix: str | Path, cache: BlockCache | None = None) -> None:
        self.prefix = str(prefix)
        self._cache = cache
        self.index_file = self._index_file()
        """The index, or its local copy."""
        index = self._map(self.index_file)
        self.dtype, num_sequences, num_boundaries = self._read_header(index)
        sizes = (4 * num_sequences, 8 * num_sequences, 8 * num_boundaries)
        expected_bytes = _HEADER.size + sum(sizes)
        if len(index) not in (expected_bytes, expected_bytes + num_sequences):
            raise DataError(
                f"{self.prefix}.idx: has {len(index)} bytes, but its header declares "
                f"{num_sequences} sequences and {num_boundaries - 1} documents, which take "
                f"{expected_bytes}: the file is truncated or damaged; copy it again or run "
                "preprocess again"
            )
        # Arrays are views of the mapped file: opening costs the same for any number of sequences.
        starts = np.cumsum((_HEADER.size, *sizes))
        self.sequence_lengths: npt.NDArray[np.int32] = index[starts[0] : starts[1]].view("<i4")
        self.sequence_pointers: npt.NDArray[np.int64] = index[starts[1] : starts[2]].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = index[starts[2] : starts[3]].view("<i8")
        modes = index[starts[3] :].view("i1")
        self.modes: npt.NDArray[np.int8] | None = modes if len(modes) else None
        """Modes of the sequences of multimodal data [S]. None: there are none."""
        self._remote = None
        if cache is not None and is_remote(self.prefix):
            self._remote = cache.file(f"{prefix}.bin")
        content: Any = self._map(bin_path(prefix)) if self._remote is None else self._remote
        self._check_token_file(len(content))
        # Typed once: typing each document's bytes would take half the time of a read.
        self._tokens: Any = content.view(self.dtype)

    def _index_file(self) -> Path:
        if not is_remote(self.prefix):
            return idx_path(local_path(self.prefix))
        if self._cache is None:
            raise DataError(
                f"{self.prefix} is a URL, and there is no folder to keep what is read. Set "
                "cache_dir, or copy the two files."
            )
        return self._cache.whole(f"{self.prefix}.idx")

    def _map(self, path: Path) -> npt.NDArray[np.uint8]:
        try:
            if path.stat().st_size == 0:
                return np.empty(0, np.uint8)  # an empty file cannot be mapped
            return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        except OSError as error:
            usual_prefix = (
                f"{self.prefix}_text_document"  # what preprocess makes of --output-prefix
            )
            fix = "check the path, or write them with `megatron-lightning preprocess`"
            if idx_path(usual_prefix).is_file():
                fix = f"{usual_prefix} is here: set that prefix"
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); a dataset is two files, "
                f"{self.prefix}.bin and {self.prefix}.idx, named by their common prefix: {fix}"
            ) from error

    def _read_header(self, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[np.generic], int, int]:
        if len(index) < _HEADER.size:
            raise DataError(
                f"{self.prefix}.idx: truncated: {len(index)} bytes, but the header alone takes "
                f"{_HEADER.size}"
            )
        magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(
            index[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC:
            raise DataError(
                f"{self.prefix}.idx: bad header {magic!r}, cannot read: an index file starts with "
                f"{_MAGIC!r}"
            )
        if version != _VERSION:
            raise DataError(
                f"{self.prefix}.idx: bad version {version}, cannot read: only version {_VERSION} "
                "is known"
            )
        if not 1 <= code < len(_DTYPES):
            raise DataError(
                f"{self.prefix}.idx: bad token dtype code {code}, cannot read: codes are 1 to "
                f"{len(_DTYPES) - 1}"
            )
        return np.dtype(_DTYPES[code]), num_sequences, num_boundaries

    def _check_token_file(self, num_bytes: int) -> None:
        expected_bytes = self.num_tokens * self.dtype.itemsize
        if num_bytes != expected_bytes:
            raise DataError(
                f"{self.prefix}.bin: has {num_bytes} bytes, but {self.prefix}.idx declares "
                f"{self.num_tokens} tokens of {self.dtype}, which take {expected_bytes}: the .bin "
                "is truncated or belongs to another .idx; copy both files again or run preprocess "
                "again"
            )
        if (
            len(self.document_indices) == 0
            or self.document_indices[0] != 0
            or self.document_indices[-1] != len(self)
        ):
            raise DataError(
                f"{self.prefix}.idx: document boundaries do not run from 0 to {len(self)}: the "
                "file is damaged"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        if len(self) == 0:
            return 0
        return int(self.sequence_pointers[-1]) // self.dtype.itemsize + int(
            self.sequence_lengths[-1]
        )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> npt.NDArray[np.generic]:
        return self.get(index)

    def get(
        self, index: int, offset: int = 0, length: int | None = None
    ) -> npt.NDArray[np.generic]:
        """Return ``length`` tokens of sequence ``index`` from token ``offset``. None: up to the
        end.

        Raises:
            DataError: If the range leaves the sequence, or a damaged index points outside the
                ``.bin``.
        """
        # item(): a sample has many documents, and numbers of NumPy take twice the time.
        sequence_length = self.sequence_lengths.item(index)
        count = sequence_length - offset if length is None else length
        first, rest = divmod(self.sequence_pointers.item(index), self.dtype.itemsize)
        begin, end = first + offset, first + offset + count
        # A damaged index must not read tokens of another document.
        if (
            offset < 0
            or count < 0
            or offset + count > sequence_length
            or first < 0
            or rest
            or end > len(self._tokens)
        ):
            raise DataError(
                f"{self.prefix}.bin: tokens {offset} to {offset + count} of sequence {index} do "
                f"not exist: it has {sequence_length} tokens at byte "
                f"{self.sequence_pointers.item(index)} of "
                f"{len(self._tokens) * self.dtype.itemsize}"
            )
        return self._tokens[begin:end]  # type: ignore[no-any-return]

    def ahead(self, ranges: Sequence[tuple[int, int, int | None]]) -> None:
        """Fetch parts of sequences in the background. Files of this machine need nothing.

        Args:
            ranges: Sequence, first token and number of tokens of each part, as in :meth:`get`.
        """
        if self._remote is None:
            return
        size, found = self.dtype.itemsize, []
        for index, offset, length in ranges:
            count = int(self.sequence_lengths[index]) - offset if length is None else length
            begin = int(self.sequence_pointers[index]) + offset * size
            found.append((begin, begin + count * size))
        self._remote.ahead(found)

    def all_tokens(self) -> npt.NDArray[np.generic]:
        """Return the tokens of all sequences, back to back in the order of the file."""
        return self._tokens[:]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        # Another process maps the files again instead of receiving their bytes.
        return (IndexedDataset, (self.prefix, self._cache))


class IndexedDatasetWriter:
    """Writer of a dataset, byte for byte as Megatron's. The two files appear together on success,
    and not at all otherwise.

    Use the writer as a context manager: leaving the block normally publishes the files. An
    exception (Ctrl-C included) removes the files.

    Args:
        prefix: Path of the two files without their suffixes. Existing files are replaced.
        dtype: Stored dtype of a token, see :func:`token_dtype`.

    Raises:
        DataError: If the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike = np.int32) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in [np.dtype(name) for name in _DTYPES[1:]]:
            raise DataError(
                f"{self.prefix}: tokens of {self.dtype} cannot be stored; use uint16 or int32 "
                "(token_dtype(vocab_size))"
            )
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._boundaries: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._num_sequences = 0
        self._temporary = temporary_beside(bin_path(prefix))
        self._temporary_idx = temporary_beside(idx_path(prefix))
        try:
            self._temporary.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("xb")
        except OSError as error:
            raise DataError(
                f"{bin_path(prefix)}: cannot be written ({error.strerror}); set another output "
                "prefix"
            ) from error

    def add_document(
        self, tokens: npt.ArrayLike, sequence_lengths: Sequence[int] | None = None
    ) -> None:
        """Append a document of token ids [n]. ``sequence_lengths`` sum to n. None: a single
        sequence.

        Raises:
            DataError: If an id does not fit the dtype, or the lengths do not sum to n.
        """
        tokens = np.asarray(tokens)
        lengths = np.array(
            [len(tokens)] if sequence_lengths is None else sequence_lengths, np.int32
        )
        self.add_documents(tokens, lengths, np.array([len(lengths)]))

    def add_documents(
        self,
        tokens: npt.NDArray[np.generic],
        lengths: npt.NDArray[np.int32],
        num_sequences: npt.ArrayLike,
    ) -> None:
        """Append documents of token ids [n]. ``lengths`` of sequences sum to n, ``num_sequences``
        of documents to the number of sequences.

        Raises:
            DataError: If an id does not fit the dtype, or the counts do not agree.
        """
        counts = np.asarray(num_sequences, np.int64)
        if lengths.sum() != len(tokens) or counts.sum() != len(lengths):
            raise DataError(
                f"{self.prefix}: {len(tokens)} tokens in {len(lengths)} sequences do not agree "
                f"with sequence lengths that sum to {lengths.sum()} and documents of "
                f"{counts.sum()} sequences"
            )
        if self.dtype.kind in "iu" and len(tokens):
            limits, smallest, largest = np.iinfo(self.dtype), tokens.min(), tokens.max()
            if smallest < limits.min or largest > limits.max:
                raise DataError(
                    f"{self.prefix}.bin: token ids {smallest} to {largest} do not fit {self.dtype} "
                    f"({limits.min} to {limits.max}); choose the dtype by token_dtype(vocab_size)"
                )
        self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        # Only lengths stay in memory. The index is written at the end, when all counts are known.
        self._lengths.append(lengths.astype(np.int32))
        self._boundaries.append(np.cumsum(counts) + self._num_sequences)
        self._num_sequences += len(lengths)

    def finish(self) -> None:
        """Write all data to the disk, so that :meth:`close` only renames the files.

        To publish several datasets together, finish all datasets first: a full disk then leaves
        none.
        """
        if self._file.closed:
            return
        with self._temporary_idx.open("xb") as file:
            file.write(self._index_bytes())
            flush_to_disk(file)
        flush_to_disk(self._file)
        self._file.close()

    def close(self) -> None:
        """Publish both files. An interruption at any moment leaves either both files or no readable
        ``.idx``.
        """
        try:
            self.finish()
            # An old index must never meet the new tokens.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary.replace(bin_path(self.prefix))
            self._temporary_idx.replace(idx_path(self.prefix))
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove written but unpublished files."""
        with suppress(OSError):  # a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def _index_bytes(self) -> bytes:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        boundaries = np.concatenate(self._boundaries)
        header = index_header(self.dtype, len(lengths), len(boundaries))
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        return (
            header
            + lengths.astype("<i4").tobytes()
            + pointers.astype("<i8").tobytes()
            + boundaries.astype("<i8").tobytes()
        )

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
