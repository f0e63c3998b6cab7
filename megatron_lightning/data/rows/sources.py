"""Readers of rows with fields: JSON lines, JSON lists, CSV, Parquet, Arrow, and data sets of the
package ``datasets``.

A path may be local, a glob pattern, a folder, or a URL supported by fsspec. JSON lines are parsed
here: Arrow gives each column a single type, and the arguments of tools have many types.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.text.formats import ROW_SUFFIXES, Kind, format_of, opened, without_bom
from megatron_lightning.data.text.records import Record
from megatron_lightning.errors import DataError
from megatron_lightning.optional import require

_SAVED = ("state.json", "dataset_dict.json")
"""Files of ``save_to_disk`` of the package ``datasets``."""


@dataclass(frozen=True)
class Row:
    """A record of a source."""

    where: str
    """File and line, or data set and row, for messages."""
    fields: Mapping[str, Any]
    error: DataError | None = None
    """Why the record is unreadable. Raised by whoever needs the fields."""


def source_files(path: str) -> list[str]:
    """Return the files named by ``path``, in order. Empty: ``path`` may be the name of a data set.

    A folder or a pattern names no hidden file, such as the ``._rows.jsonl`` beside a file of macOS.

    Raises:
        ConfigError: If the store of a URL is unknown.
        DataError: If a folder or a pattern has no readable file.
    """
    from megatron_lightning.data.indexed.remote import store_of

    system, path_inside = store_of(path)
    if any(character in path_inside for character in "*?["):
        files = sorted(system.glob(path_inside))
    elif system.isdir(path_inside):
        if any(system.exists(f"{path_inside}/{name}") for name in _SAVED):
            return []
        names = system.ls(path_inside, detail=False)
        files = sorted(name for name in names if format_of(name).kind != "text")
    else:
        return [path] if system.exists(path_inside) else []
    if not PurePosixPath(path_inside).name.startswith("."):
        files = [name for name in files if not PurePosixPath(name).name.startswith(".")]
    if not files:
        raise DataError(
            f"{path}: there is no file to read. Set it to files that end in "
            f"{', '.join(ROW_SUFFIXES)}."
        )
    return [system.unstrip_protocol(name) if "://" in path else name for name in files]


def read_rows(path: str, *, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, of all files of a folder or pattern, or of a data set.

    Args:
        path: File, folder, glob pattern, URL, or name of a data set on the Hugging Face Hub.
        split: Split of a data set of the package ``datasets``, with or without a slice.
        subset: Configuration of a data set on the Hub.

    Raises:
        DataError: If an input cannot be read, with file and line.
        ConfigError: If a package required by the format is not installed.
    """
    files = source_files(path)
    if not files:
        yield from _read_dataset(path, split, subset)
    for file in files:
        yield from _reader(file)(file)


def _reader(path: str) -> Callable[[str], Iterator[Row]]:
    readers: Mapping[Kind, Callable[[str], Iterator[Row]]] = {
        "lines": _read_json,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    reader = readers.get(format_of(path).kind)
    if reader is None:
        raise DataError(
            f"{path}: the suffix says no format. Set it to a file that ends in "
            f"{', '.join(ROW_SUFFIXES)}."
        )
    return reader


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    try:
        with opened(path) as file:
            yield file
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Set path to existing files.") from error


def _read_json(path: str) -> Iterator[Row]:
    """A line of JSON is a row. A file beginning with ``[`` is a list of rows."""
    with _opened(path) as file:
        is_first = True
        for number, raw in enumerate(file, 1):
            line = without_bom(raw) if number == 1 else raw
            if not line.strip():
                continue
            if is_first and line.lstrip().startswith(b"["):
                yield from _read_list(path, Record(path, number, line + file.read(), is_json=True))
                return
            is_first, record = False, Record(path, number, line, is_json=True)
            try:
                yield Row(record.where, record.fields())
            except DataError as error:  # later lines may be readable
                yield Row(record.where, {}, error)


def _read_list(path: str, record: Record) -> Iterator[Row]:
    for index, fields in enumerate(record.parsed()):
        where = f"{path}[{index}]"
        if isinstance(fields, dict):
            yield Row(where, fields)
            continue
        kind = type(fields).__name__
        message = f"{where}: found a {kind}. Every entry of the list must be one JSON object."
        yield Row(where, {}, DataError(message))


def _read_csv(path: str) -> Iterator[Row]:
    with _opened(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        try:
            for fields in reader:
                where, broken = f"{path}:{reader.line_num}", None
                if None in fields or None in fields.values():
                    broken = DataError(
                        f"{where}: the line has another number of columns than the header's "
                        f"{len(reader.fieldnames or ())}. Quote commas and line breaks."
                    )
                yield Row(where, fields, broken)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{reader.line_num}: {error}. Write it as UTF-8.") from error


def _needs(package: str, what: str) -> Any:
    return require(package, what, "convert the data to JSON lines")


def _read_parquet(path: str) -> Iterator[Row]:
    arrow = _needs("pyarrow", f"{path}: Parquet")
    parquet = _needs("pyarrow.parquet", f"{path}: Parquet")
    with _opened(path) as file:
        try:
            batches = parquet.ParquetFile(file).iter_batches()
            yield from _rows_of(path, batches)
        except arrow.ArrowException as error:
            raise DataError(f"{path}: is not a Parquet file: {error}") from error


def _read_arrow(path: str) -> Iterator[Row]:
    arrow = _needs("pyarrow", f"{path}: Arrow")
    with _opened(path) as file:
        try:
            try:
                batches: Any = arrow.ipc.open_stream(file)
            except arrow.ArrowInvalid:
                file.seek(0)
                table = arrow.ipc.open_file(file)
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
            yield from _rows_of(path, batches)
        except arrow.ArrowException as error:
            raise DataError(f"{path}: is not an Arrow file: {error}") from error


def _rows_of(path: str, batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            yield Row(f"{path}[{number}]", without_missing(fields))
            number += 1


def _read_dataset(path: str, split: str, subset: str | None) -> Iterator[Row]:
    for index, fields in enumerate(_undecoded(load_dataset(path, split=split, subset=subset))):
        yield Row(f"{path}[{index}]", without_missing(fields))


def _undecoded(rows: Any) -> Any:
    """Return a data set whose images are bytes and paths, as in its files."""
    features = getattr(rows, "features", None)
    made = _with_bytes(features)
    return rows if made == features else rows.cast(made)


def _with_bytes(feature: Any) -> Any:
    """Return a type of columns with bytes in the place of decoded images."""
    if type(feature).__name__ in ("Image", "Audio"):
        return type(feature)(decode=False)
    if isinstance(feature, dict):
        return type(feature)({name: _with_bytes(one) for name, one in feature.items()})
    if isinstance(feature, list):
        return [_with_bytes(one) for one in feature]
    if hasattr(feature, "feature"):  # lists, fixed or not
        return type(feature)(_with_bytes(feature.feature), length=feature.length)
    return feature


def load_dataset(path: str, *, split: str, subset: str | None) -> Any:
    """Return a split of a data set of the package ``datasets``: of a folder written by
    ``save_to_disk``, or of the Hub.

    Raises:
        DataError: If there is no such data set or split.
        ConfigError: If the package is not installed.
    """
    if format_of(path).kind != "text" or (
        path.startswith((".", "/", "~")) and not Path(path).exists()
    ):
        raise DataError(f"{path}: there is no such file. Set path to existing files.")
    datasets = _needs("datasets", f"{path} is no file, and as a data set it")
    try:
        rows = (
            datasets.load_from_disk(path)
            if Path(path).is_dir()
            else datasets.load_dataset(path, subset, split=split)
        )
    except Exception as error:
        raise DataError(
            f"{path} is neither a file nor a data set that can be loaded "
            f"({type(error).__name__}: {error}). Check the path, split={split!r} and "
            f"subset={subset!r}."
        ) from error
    if isinstance(rows, Mapping):
        if split not in rows:
            raise DataError(f"{path} has the splits {sorted(rows)}. Set split to one of them.")
        rows = rows[split]
    return rows


def images_folder(path: str, options: ImageOptions) -> Path | None:
    """Return the folder of the images of a source: as set, or the folder of its files. None: its
    rows have no folder beside them, as data sets on the Hub.
    """
    from megatron_lightning.data.indexed.remote import store_of

    if options.folder is not None:
        return Path(options.folder)
    files = source_files(path)
    if any("://" in file for file in files):
        return None
    folders = {Path(file).parent for file in files}
    if files:
        return folders.pop() if len(folders) == 1 else None
    system, folder = store_of(path)
    return Path(folder) if "://" not in path and system.isdir(folder) else None


def without_missing(value: Any) -> Any:
    """Return ``value`` without keys of the value None: a column of structs has all keys of all
    rows.
    """
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_missing(item) for item in value]
    return value


def file_stamps(path: str) -> list[list[Any]]:
    """Return name, size and time of every file behind ``path``, to name a cache of its rows. Empty:
    ``path`` is a data set on the Hub.
    """
    from megatron_lightning.data.indexed.remote import store_of

    files = source_files(path)
    if not files:
        system, folder = store_of(path)
        # a folder of save_to_disk, with a file of the fingerprint in each split
        files = sorted(system.find(folder)) if system.isdir(folder) else []
    stamps = []
    for file in files:
        system, path_inside = store_of(file)
        info = system.info(path_inside)
        stamp = info.get("mtime") or info.get("LastModified") or info.get("created")
        stamps.append([str(file), info.get("size"), str(stamp)])
    return stamps
