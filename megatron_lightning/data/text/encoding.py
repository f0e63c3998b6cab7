"""Tokenization of pieces of text into files, by this process or by several workers."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Literal

import numpy as np

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter, token_dtype
from megatron_lightning.data.text.fast_backend import OtherIdsError, TokenizerBackend, with_backend
from megatron_lightning.data.text.interrupts import interrupt_deferred
from megatron_lightning.data.text.pieces import Piece
from megatron_lightning.data.text.records import Record
from megatron_lightning.data.text.sentences import SentenceRule
from megatron_lightning.data.text.tokenizers import Tokenizer, TokenizerType, load_tokenizer
from megatron_lightning.errors import DataError

FORMAT = 1
"""Version of tokenized pieces."""
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class EncodingJob:
    """Settings of the tokenization of pieces. Small, because every piece of a worker carries the
    settings.
    """

    folder: str
    """Folder of the tokenized pieces."""
    tokenizer_type: TokenizerType
    tokenizer_model: str
    json_keys: tuple[str, ...]
    append_eod: bool
    empty_documents: Literal["error", "skip"]
    sentences: SentenceRule | None = None
    """Division of documents into sentences. None: a document is one sequence."""
    tokenizer_backend: TokenizerBackend = "reference"

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer."""
        reference = load_tokenizer(self.tokenizer_model, self.tokenizer_type)
        return with_backend(reference, self.tokenizer_backend)

    def prefixes(self, piece: Piece, tokenizer: Tokenizer) -> list[str]:
        """Return the prefix of the tokenized piece under each key. The name says all that the
        content depends on.
        """
        rule = () if self.sentences is None else (self.sentences,)
        options = (self.json_keys, self.append_eod, self.empty_documents)
        # A backend is compared in part, so that its pieces are not taken for the tokenizer's.
        backend = () if self.tokenizer_backend == "reference" else (self.tokenizer_backend,)
        settings = (*options, tokenizer.identity, *rule, *backend)
        digest = hashlib.sha256(repr((FORMAT, settings, piece)).encode()).hexdigest()[:24]
        return [f"{self.folder}/{digest}-{number}" for number in range(len(self.json_keys))]


def encoded(
    pieces: Sequence[Piece], job: EncodingJob, tokenizer: Tokenizer, workers: int
) -> Generator[Piece, None, None]:
    """Tokenize pieces, and yield each when it is complete."""
    if workers == 1:
        for piece in pieces:
            _encode(piece, job, tokenizer)
            yield piece
        return
    # fork saves each worker the import of the caller's program. fork is safe on Linux only.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    try:
        with interrupt_deferred():
            futures = {executor.submit(_encode_in_worker, piece, job): piece for piece in pieces}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died while tokenizing (out of memory?); set workers below {workers}"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


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
def _worker_tokenizer(job: EncodingJob) -> Tokenizer:
    """Load the tokenizer once per worker. A worker serves a single job."""
    return job.tokenizer()


def _encode_in_worker(piece: Piece, job: EncodingJob) -> None:
    _encode(piece, job, _worker_tokenizer(job))


def _encode(piece: Piece, job: EncodingJob, tokenizer: Tokenizer) -> None:
    """Write the tokens of a piece under every key."""
    try:
        _write(piece.records(), job.prefixes(piece, tokenizer), job, tokenizer)
    except DataError:
        if piece.needs_counting:  # an error names the line, which only counting tells
            _write(piece.counted(), job.prefixes(piece, tokenizer), job, tokenizer)
        raise


def _write(
    records: Iterable[Record], prefixes: Sequence[str], job: EncodingJob, tokenizer: Tokenizer
) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as published:
        writers = [
            published.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes
        ]
        for chunk in _chunks(records):
            texts = zip(*(record.texts(job.json_keys) for record in chunk), strict=True)
            for key, writer, of_key in zip(job.json_keys, writers, texts, strict=True):
                documents = _documents(chunk, key, of_key, job, tokenizer)
                sequences = list(chain.from_iterable(documents))
                tokens = np.fromiter(chain.from_iterable(sequences), np.int64)
                lengths = np.array([len(ids) for ids in sequences], np.int32)
                counts = np.array([len(document) for document in documents], np.int64)
                writer.add_documents(tokens, lengths, counts)
        for writer in writers:
            writer.finish()  # all files, before the first is published


def _documents(
    chunk: Sequence[Record], key: str, texts: Sequence[str], job: EncodingJob, tokenizer: Tokenizer
) -> list[list[list[int]]]:
    """Return the chunk's documents under a key as sequences of tokens: one, or each sentence."""
    split = (lambda text: [text]) if job.sentences is None else job.sentences.load()
    parts = [split(text) for text in texts]
    try:
        ids_of_parts = tokenizer.encode_batch([part for of_text in parts for part in of_text])
    except OtherIdsError as error:
        records = [record for record, of_text in zip(chunk, parts, strict=True) for _ in of_text]
        raise DataError(
            f"{records[error.index].where}: {error}. Leave tokenizer_backend out: the pieces are "
            "tokenized again."
        ) from error
    encoded_parts = iter(ids_of_parts)
    documents = []
    for record, of_text in zip(chunk, parts, strict=True):
        document = [ids for ids in islice(encoded_parts, len(of_text)) if ids]
        if document:
            for ids in document:
                _check_ids(ids, record, tokenizer)
            if job.append_eod:
                document[-1] = [*document[-1], tokenizer.eod]
            documents.append(document)
        elif job.empty_documents == "error":
            raise DataError(
                f"{record.where}: empty document under key {key!r}; remove it, or set "
                "empty_documents to skip"
            )
    return documents


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into chunks large enough to be tokenized together."""
    chunk: list[Record] = []
    num_bytes = 0
    for record in records:
        chunk.append(record)
        num_bytes += record.num_bytes
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _check_ids(ids: list[int], record: Record, tokenizer: Tokenizer) -> None:
    if max(ids) >= tokenizer.vocab_size:
        raise DataError(
            f"{record.where}: token id {max(ids)} is outside the tokenizer's vocabulary of "
            f"{tokenizer.vocab_size} ids; the tokenizer's files do not belong together"
        )
