"""Merge indexed data sets into one, byte for byte as Megatron's ``merge_datasets.py``, in a few
passes over the inputs with memory that does not depend on their size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.indexed.atomic_files import flush_to_disk, temporary_beside
from megatron_lightning.data.indexed.index_check import check_index
from megatron_lightning.data.indexed.indexed_files import (
    IndexedDataset,
    bin_path,
    idx_path,
    index_header,
)
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.data.indexed.sidecar import common_sidecar, sidecar_path
from megatron_lightning.errors import ConfigError, DataError

_BLOCK = 1 << 20
"""Bytes of tokens, or entries of an index, at once."""


def merge(inputs: list[str], *, output_prefix: str, overwrite: bool = False) -> None:
    """Merge indexed data sets into one. The documents of each input follow those of the input
    before.

    Args:
        inputs: Prefixes of data sets (PREFIX.bin and PREFIX.idx), or folders with all their data
            sets in the order of names.
        output_prefix: Prefix of the merged data set.
        overwrite: Whether an existing data set is replaced.

    Raises:
        ConfigError: If there is no input, an input is the output, or the output exists.
        DataError: If an input is missing or damaged, or inputs have other dtypes.
    """
    output_prefix = written_path(output_prefix, "output_prefix")
    prefixes = _prefixes([written_path(name, "inputs") for name in inputs])
    if output_prefix in prefixes or bin_path(output_prefix) in map(bin_path, prefixes):
        raise ConfigError(f"{output_prefix} is an input and the output. Set another output_prefix.")
    if idx_path(output_prefix).exists() and not overwrite:
        raise ConfigError(
            f"{idx_path(output_prefix)} exists. Set another output_prefix, or --overwrite."
        )
    # Everything is checked before the output exists.
    _check_alike(prefixes)
    sidecar = common_sidecar(prefixes)
    try:
        with merged_files(prefixes, output_prefix):
            pass
        total = IndexedDataset(output_prefix)
        if sidecar is not None:
            sidecar.write(output_prefix, total)
    except OSError as error:
        raise DataError(
            f"{output_prefix}: cannot be written ({error.strerror}). Set another output_prefix."
        ) from error
    print(
        f"{output_prefix}: {len(prefixes)} data sets, {total.num_documents} documents, "
        f"{total.num_tokens} tokens of {total.dtype}"
    )


def _prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of data sets and of folders of data sets.

    A name with an index is a data set, also beside a folder of the same name: a fit keeps the
    sample indices in such a folder.

    Raises:
        ConfigError: If a folder has no data set, or a data set comes twice.
    """
    prefixes: list[str] = []
    for name in inputs:
        if idx_path(name).exists() or not Path(name).is_dir():
            prefixes.append(name.removesuffix(".bin").removesuffix(".idx"))
            continue
        prefixes_inside = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
        if not prefixes_inside:
            raise ConfigError(f"{name}: has no data set (a pair of .bin and .idx files).")
        prefixes += prefixes_inside
    twice = next((name for name in prefixes if prefixes.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice, and all its documents would be. Name it once.")
    if not prefixes:
        raise ConfigError("there is no input. Name prefixes of data sets, or folders.")
    return prefixes


def _check_alike(prefixes: Sequence[str]) -> None:
    """Check that all inputs can be read, are whole, and have the same kind of tokens.

    Raises:
        DataError: If not.
    """
    first = IndexedDataset(prefixes[0])
    check_index(first)
    # One after another: thousands of mapped files are more than a process may have.
    for prefix in prefixes[1:]:
        indexed = IndexedDataset(prefix)
        check_index(indexed)
        if indexed.dtype != first.dtype:
            raise DataError(
                f"{prefix}.idx has tokens of {indexed.dtype}, and {first.prefix}.idx of "
                f"{first.dtype}. Write both with one tokenizer by `megatron-lightning preprocess`."
            )
        if (indexed.modes is None) != (first.modes is None):
            raise DataError(
                f"one of {prefix} and {first.prefix} has modes of sequences (multimodal data), and "
                "the other has none. Merge data sets of one kind."
            )


@contextmanager
def merged_files(prefixes: Sequence[str], output_prefix: str) -> Iterator[None]:
    """Write the merged files of checked inputs, and publish them at the end of the block. Both
    files appear together, or none does.
    """
    bin_file, idx_file = bin_path(output_prefix), idx_path(output_prefix)
    temporary = temporary_beside(bin_file), temporary_beside(idx_file)
    try:
        bin_file.parent.mkdir(parents=True, exist_ok=True)
        with temporary[0].open("xb") as file:
            for prefix in prefixes:
                with bin_path(prefix).open("rb") as source:
                    shutil.copyfileobj(source, file, _BLOCK)
            flush_to_disk(file)
        with temporary[1].open("xb") as file:
            _write_index(prefixes, file)
            flush_to_disk(file)
        yield
        # An old index, or description, must never meet the new tokens.
        idx_file.unlink(missing_ok=True)
        sidecar_path(output_prefix).unlink(missing_ok=True)
        temporary[0].replace(bin_file)
        temporary[1].replace(idx_file)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _write_index(prefixes: Sequence[str], file: BinaryIO) -> None:
    """Write the merged index, an array after another, each in one pass over the inputs."""
    first = IndexedDataset(prefixes[0])
    counts = [(len(data), data.num_documents) for data in map(IndexedDataset, prefixes)]
    num_sequences, num_documents = (sum(column) for column in zip(*counts, strict=True))
    file.write(index_header(first.dtype, num_sequences, num_documents + 1))
    # Sizes of files, not sums of lengths: a file may have bytes that no sequence points to.
    num_bytes = [bin_path(prefix).stat().st_size for prefix in prefixes]
    _write_each(prefixes, file, lambda data: data.sequence_lengths, [0] * len(prefixes))
    _write_each(prefixes, file, lambda data: data.sequence_pointers, _offsets(num_bytes))
    file.write(np.zeros(1, "<i8").tobytes())
    begins = _offsets([size for size, _ in counts])
    _write_each(prefixes, file, lambda data: data.document_indices[1:], begins)
    if first.modes is not None:
        _write_each(prefixes, file, lambda data: data.modes, [0] * len(prefixes))  # type: ignore[arg-type,return-value]


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes, dtype=np.int64)[:-1].tolist()]


def _write_each(
    prefixes: Sequence[str],
    file: BinaryIO,
    array_of: Callable[[IndexedDataset], npt.NDArray[np.generic]],
    offsets: Sequence[int],
) -> None:
    """Write an array of every input, plus the input's offset."""
    for prefix, offset in zip(prefixes, offsets, strict=True):
        for block in _blocks(array_of(IndexedDataset(prefix))):
            file.write(np.add(block, offset, dtype=block.dtype).tobytes())


def _blocks(array: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
    for begin in range(0, len(array), _BLOCK):
        yield array[begin : begin + _BLOCK]
