"""Tokenization of text into Megatron's ``.bin``/``.idx`` files: a single pass over the input by
several processes, in order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_lightning.data.corpus import Record, input_files, read_records
from megatron_lightning.data.files import atomic_path
from megatron_lightning.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_lightning.data.tokenizers import (
    Tokenizer,
    TokenizerType,
    load_tokenizer,
    train_sentencepiece,
)
from megatron_lightning.errors import ConfigError, DataError

# Ids of several documents back to back [n], their lengths [d].
_Encoded = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
_CHUNK_BYTES = 1 << 18
_TRAINING_BYTES = 1 << 24  # a tokenizer of usual size does not improve with more text


@dataclass(frozen=True)
class _Job:
    """Settings of a worker. Small, because every chunk carries the settings."""

    tokenizer_type: TokenizerType
    tokenizer_model: str
    json_keys: tuple[str, ...]
    append_eod: bool
    empty_documents: Literal["error", "skip"]

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_model, self.tokenizer_type)


def preprocess(  # noqa: PLR0917  # every argument is an option of the command line
    output_prefix: str,
    input: str | list[str] = "stdlib",
    tokenizer_type: TokenizerType = "sentencepiece",
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    empty_documents: Literal["error", "skip"] = "error",
) -> dict[str, str]:
    """Tokenize text into indexed files for pre-training, in Megatron's own format.

    Writes ``{output_prefix}_{key}_document.bin`` and ``.idx`` for every key, and
    ``{output_prefix}_tokenizer.model`` if a tokenizer is trained. Everything is published at the
    end: an error, Ctrl-C or SIGTERM leaves nothing behind.

    Args:
        output_prefix: Path and beginning of the names of the output files.
        input: JSON-lines files (``.jsonl``, ``.json``: a document a line), text files (a document a
            file), or ``stdlib``: the source of the Python standard library.
        tokenizer_type: sentencepiece or huggingface.
        tokenizer_model: A SentencePiece model, or a Hugging Face tokenizer's folder or name.
            Default: train a SentencePiece model on the input.
        vocab_size: Number of pieces of the tokenizer to train.
        json_keys: Keys of a JSON line with texts to write, each to a separate dataset.
        append_eod: Whether the end-of-document id ends each document.
        workers: Number of tokenizing processes.
        empty_documents: Treatment of a document without tokens: error or skip.

    Returns:
        Prefix of the dataset of each key, for :class:`IndexedDataset` and ``PretrainDataModule``.

    Raises:
        ConfigError: If the settings contradict each other, or do not suffice to train a tokenizer.
        DataError: If the input cannot be read (with file and line), or the output cannot be
            written.
    """
    _check_settings(tokenizer_type, tokenizer_model, vocab_size, json_keys, workers)
    files = input_files(input)
    prefixes = {key: f"{output_prefix}_{key}_document" for key in json_keys}
    with ExitStack() as published:
        published.enter_context(_write_errors_explained(output_prefix))
        published.enter_context(_termination_as_exit())
        Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
        if tokenizer_model is None and vocab_size is not None:
            trained = published.enter_context(atomic_path(Path(f"{output_prefix}_tokenizer.model")))
            train_sentencepiece(_training_texts(files, json_keys), vocab_size, trained)
            tokenizer_model = str(trained)
        job = _Job(
            tokenizer_type, str(tokenizer_model), tuple(json_keys), append_eod, empty_documents
        )
        tokenizer = job.tokenizer()
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [
            published.enter_context(IndexedDatasetWriter(prefix, dtype))
            for prefix in prefixes.values()
        ]
        # closed in this order: an interrupt anywhere in the loop ends the workers before the files
        # are removed
        bar = published.enter_context(
            tqdm(desc="tokenizing", total=_num_bytes(files), unit="B", unit_scale=True)
        )
        chunks = published.enter_context(
            closing(_encoded_chunks(_chunks(read_records(files)), job, tokenizer, workers))
        )
        num_tokens = dict.fromkeys(json_keys, 0)
        for chunk, encoded in chunks:
            for key, writer, (tokens, lengths) in zip(json_keys, writers, encoded, strict=True):
                writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
                num_tokens[key] += len(tokens)
            bar.update(sum(len(record.raw) for record in chunk))
        _check_not_empty(num_tokens, files)
        for writer in writers:
            writer.finish()  # all files, before the first is published
    print(
        f"{sum(num_tokens.values())} tokens of {tokenizer.vocab_size} ids in "
        f"{', '.join(prefixes.values())}"
    )
    return prefixes


def _check_settings(
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_size: int | None,
    json_keys: Sequence[str],
    workers: int,
) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be a positive integer; set it to 1 or more")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ConfigError(
            f"json_keys={list(json_keys)}: each key is a dataset of its own; set one or more "
            "different keys"
        )
    if tokenizer_model is None and tokenizer_type != "sentencepiece":
        raise ConfigError(
            f"tokenizer_type={tokenizer_type} is never trained here; set tokenizer_model to an "
            "existing tokenizer"
        )
    if (tokenizer_model is None) == (vocab_size is None):
        raise ConfigError(
            f"tokenizer_model={tokenizer_model} and vocab_size={vocab_size}: set tokenizer_model "
            "to use an existing tokenizer, or vocab_size to train one, and not both"
        )


def _check_not_empty(num_tokens: Mapping[str, int], files: Sequence[Path]) -> None:
    for key, count in num_tokens.items():
        if not count:
            raise DataError(
                f"{', '.join(map(str, files[:5]))}: only empty documents under key {key!r}; set "
                "input to text"
            )


@contextmanager
def _write_errors_explained(output_prefix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{output_prefix}: cannot be written ({error}); set another output_prefix, or free "
            "space"
        ) from error


def _num_bytes(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _training_texts(files: Sequence[Path], json_keys: Sequence[str]) -> Iterator[str]:
    """Yield every k-th document, about ``_TRAINING_BYTES`` of a large input."""
    stride = 1 + _num_bytes(files) // _TRAINING_BYTES
    for record in islice(read_records(files), 0, None, stride):
        yield from record.texts(json_keys)


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into chunks large enough to be sent to another process."""
    chunk: list[Record] = []
    num_bytes = 0
    for record in records:
        chunk.append(record)
        num_bytes += len(record.raw)
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _encoded_chunks(
    chunks: Iterable[list[Record]], job: _Job, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[list[Record], list[_Encoded]], None, None]:
    """Yield each chunk with the encoding under every key, in the order of the input."""
    if workers == 1:
        yield from ((chunk, _encode(chunk, job, tokenizer)) for chunk in chunks)
        return
    # fork saves each worker the import of the caller's program. fork is safe on Linux only.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    waiting: deque[tuple[list[Record], Future[list[_Encoded]]]] = deque()
    try:
        for chunk in chunks:
            with _interrupt_deferred():
                waiting.append((chunk, executor.submit(_encode_in_worker, chunk, job)))
            # Enough to keep all workers busy. Without a limit the input is read into memory.
            if len(waiting) > 4 * workers:
                oldest, result = waiting.popleft()
                yield oldest, result.result()
        while waiting:
            oldest, result = waiting.popleft()
            yield oldest, result.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died while tokenizing (out of memory?); set workers below {workers}"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_handled(
    numbers: Sequence[int], handler: Callable[[int, object], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in previous.items():
            signal.signal(number, handled)


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that unfinished files are removed. By default SIGTERM ends
    the process at once.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with _signals_handled([signal.SIGTERM], leave):
        yield


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block: during a fork Python drops signals, or
    loses the worker.
    """
    interrupts: list[int] = []
    with _signals_handled(
        [signal.SIGINT, signal.SIGTERM], lambda number, _: interrupts.append(number)
    ):
        yield
    if interrupts:
        signal.raise_signal(interrupts[0])


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with a killed parent. The parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _worker_tokenizer(job: _Job) -> Tokenizer:
    """Load the tokenizer once per worker. A worker serves a single job."""
    return job.tokenizer()


def _encode_in_worker(chunk: list[Record], job: _Job) -> list[_Encoded]:
    return _encode(chunk, job, _worker_tokenizer(job))


def _encode(chunk: list[Record], job: _Job, tokenizer: Tokenizer) -> list[_Encoded]:
    """Return the tokens of the chunk's documents under every key."""
    documents: list[list[list[int]]] = [[] for _ in job.json_keys]
    for record in chunk:
        for key, text, collected in zip(
            job.json_keys, record.texts(job.json_keys), documents, strict=True
        ):
            ids = tokenizer.encode(text)
            if ids:
                _check_ids(ids, record, tokenizer)
                collected.append([*ids, tokenizer.eod] if job.append_eod else ids)
            elif job.empty_documents == "error":
                raise DataError(
                    f"{record.where}: empty document under key {key!r}; remove it, or set "
                    "empty_documents to skip"
                )
    return [
        (
            np.fromiter(chain.from_iterable(collected), np.int64),
            np.array([len(ids) for ids in collected], np.int32),
        )
        for collected in documents
    ]


def _check_ids(ids: list[int], record: Record, tokenizer: Tokenizer) -> None:
    if max(ids) >= tokenizer.vocab_size:
        raise DataError(
            f"{record.where}: token id {max(ids)} is outside the tokenizer's vocabulary of "
            f"{tokenizer.vocab_size} ids; the tokenizer's files do not belong together"
        )
