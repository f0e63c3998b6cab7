"""Tokenization of text into Megatron's ``.bin``/``.idx`` files: the tokenized pieces of the input,
joined in order.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal

from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_lightning.data.indexed.indexed_files import IndexedDataset, idx_path
from megatron_lightning.data.indexed.indexed_merge import merged_files
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.data.indexed.sidecar import Sidecar
from megatron_lightning.data.rows.lengths import Lengths
from megatron_lightning.data.text.corpus import input_files, no_documents, read_file, read_records
from megatron_lightning.data.text.encoding import FORMAT, EncodingJob, encoded
from megatron_lightning.data.text.fast_backend import TokenizerBackend, check_backend
from megatron_lightning.data.text.interrupts import termination_as_exit
from megatron_lightning.data.text.pieces import Piece, cut
from megatron_lightning.data.text.sentences import SentenceRule, SentenceSplitter
from megatron_lightning.data.text.tokenizers import Tokenizer, TokenizerType, train_sentencepiece
from megatron_lightning.errors import ConfigError, DataError

_TRAINING_BYTES = 1 << 24  # a tokenizer of usual size does not improve with more text


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
    split_sentences: bool = False,
    sentence_splitter: SentenceSplitter = "rules",
    lang: str = "english",
    tokenizer_backend: TokenizerBackend = "reference",
) -> dict[str, str]:
    """Tokenize text into indexed files for pre-training, in Megatron's own format.

    Writes ``{output_prefix}_{key}_document.bin`` and ``.idx`` for every key, beside them ``.json``
    with the digest of the tokenizer, and ``{output_prefix}_tokenizer.model`` if a tokenizer is
    trained. Everything is published at the end. The input is tokenized in pieces. After a kill,
    Ctrl-C or an error the same command, with any number of workers, goes on with the complete
    pieces, kept in the folder ``{output_prefix}.pieces``. The number of workers does not change a
    byte.

    Args:
        output_prefix: Path and beginning of the names of the output files.
        input: JSON-lines files (``.jsonl``, ``.ndjson``, ``.json``: a document a line), Parquet
            files (``.parquet``), text files (a document a file), each possibly compressed (``.gz``,
            ``.zst``) and named by paths, patterns or URLs, or ``stdlib``: the source of the Python
            standard library.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        tokenizer_model: A SentencePiece model, or a Hugging Face tokenizer's folder or name.
            Default: train a SentencePiece model on the input.
        vocab_size: Number of pieces of the tokenizer to train.
        json_keys: Keys of a JSON line with texts to write, each to a separate dataset.
        append_eod: Whether the end-of-document id ends each document.
        workers: Number of tokenizing processes.
        empty_documents: Treatment of a document without tokens: error or skip.
        split_sentences: Whether every sentence is a sequence of its own, as ``BertDataset`` and
            ``T5Dataset`` read documents. The names end with ``_sentence`` instead of ``_document``.
        sentence_splitter: rules: at the ends of sentences and paragraphs. lines: a sentence a line.
            punkt: the tokenizer of nltk, as in Megatron.
        lang: Language of punkt.
        tokenizer_backend: gigatoken encodes byte-level BPE (huggingface, json) about ten times as
            fast. Its first batch of texts and every 64th are compared with the tokenizer's.

    Returns:
        Prefix of the dataset of each key, for :class:`IndexedDataset` and ``PretrainDataModule``.

    Raises:
        ConfigError: If the settings contradict each other, or do not suffice to train a tokenizer.
        DataError: If the input cannot be read (with file and line), or the output cannot be
            written.
    """
    if tokenizer_type == "bytes":
        tokenizer_model = tokenizer_model or tokenizer_type  # bytes need no file
    _check_settings(tokenizer_type, tokenizer_model, vocab_size, json_keys, workers)
    output_prefix = written_path(output_prefix, "output_prefix")
    check_backend(tokenizer_backend, tokenizer_type)
    files = input_files(input)
    rule = SentenceRule(sentence_splitter, lang) if split_sentences else None
    if rule is not None:
        rule.load()  # an error, before the text is read
    level = "document" if rule is None else "sentence"
    prefixes = {key: f"{output_prefix}_{key}_{level}" for key in json_keys}
    begin = time.monotonic()
    with (
        _write_errors_explained(output_prefix),
        termination_as_exit(),
        _folder_of_pieces(output_prefix) as folder,
    ):
        # Pieces of equal size, whatever the sizes of files, so that workers end together. A piece
        # is complete or absent: a second call continues.
        pieces = cut(files)
        trained = None
        if tokenizer_model is None and vocab_size is not None:
            trained = _trained(files, pieces, json_keys, vocab_size, folder)
        job = EncodingJob(
            str(folder),
            tokenizer_type,
            str(trained or tokenizer_model),
            tuple(json_keys),
            append_eod,
            empty_documents,
            rule,
            tokenizer_backend,
        )
        tokenizer = job.tokenizer()
        parts = [job.prefixes(piece, tokenizer) for piece in pieces]
        num_new = _tokenize(pieces, parts, job, tokenizer, workers)
        of_key = dict(zip(json_keys, zip(*parts, strict=True), strict=True))
        _check_not_empty(of_key, files, folder)
        # Renamed at the end, so that the output is complete whenever it is there.
        _publish({prefixes[key]: names for key, names in of_key.items()})
        written = _describe(prefixes, job, tokenizer)
        if trained is not None:
            trained.replace(f"{output_prefix}_tokenizer.model")
        shutil.rmtree(folder)
    read = f"{len(files)} files, {num_new} of {len(pieces)} pieces tokenized now"
    _print_summary(written, tokenizer, read, time.monotonic() - begin)
    return prefixes


def _describe(
    prefixes: Mapping[str, str], job: EncodingJob, tokenizer: Tokenizer
) -> list[IndexedDataset]:
    """Write how each data set was made beside it. Return the data sets."""
    options = {
        "tokenizer_type": job.tokenizer_type,
        "empty_documents": job.empty_documents,
        "sentence_splitter": job.sentences and job.sentences.splitter,
        "lang": job.sentences and job.sentences.lang,
    }
    described = Sidecar.of(tokenizer, append_eod=job.append_eod)
    written = []
    for key, prefix in prefixes.items():
        indexed = IndexedDataset(prefix)
        described.write(prefix, indexed, {"json_key": key, **options})
        written.append(indexed)
    return written


@contextmanager
def _folder_of_pieces(output_prefix: str) -> Iterator[Path]:
    """Yield the folder of tokenized pieces, held by this process alone. After an error the folder
    stays if a piece is complete.

    Raises:
        ConfigError: If another process holds the folder.
    """
    folder = Path(f"{output_prefix}.pieces")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process tokenizes into {output_prefix}. Wait for it, or set "
                "another output_prefix."
            ) from None
        for path in folder.glob(".*.tmp"):  # of a killed process
            path.unlink(missing_ok=True)
        try:
            yield folder
        except BaseException:
            complete = len(list(folder.glob("*-0.idx")))
            if complete:
                print(
                    f"megatron-lightning: {complete} tokenized pieces are kept in {folder}: the "
                    "same command goes on with them.",
                    file=sys.stderr,
                )
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _trained(
    files: Sequence[str],
    pieces: Sequence[Piece],
    json_keys: Sequence[str],
    vocab_size: int,
    folder: Path,
) -> Path:
    """Return a tokenizer trained on the input, now or by a run before."""
    settings = (FORMAT, tuple(json_keys), vocab_size, tuple(pieces))
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
    trained = folder / f"{digest}.model"
    if not trained.exists():
        num_bytes = sum(piece.num_bytes for piece in pieces)
        train_sentencepiece(_training_texts(files, json_keys, num_bytes), vocab_size, trained)
    return trained


def _tokenize(
    pieces: Sequence[Piece],
    parts: Sequence[Sequence[str]],
    job: EncodingJob,
    tokenizer: Tokenizer,
    workers: int,
) -> int:
    """Tokenize the pieces that are not complete. Return their number."""
    waiting, total = [], sum(piece.num_bytes for piece in pieces)
    with tqdm(desc="tokenizing", total=total, unit="B", unit_scale=True) as bar:
        for piece, prefixes in zip(pieces, parts, strict=True):
            if all(idx_path(prefix).exists() for prefix in prefixes):
                bar.update(piece.num_bytes)
            else:
                waiting.append(piece)
        with closing(encoded(waiting, job, tokenizer, workers)) as complete:
            for piece in complete:
                bar.update(piece.num_bytes)
    return len(waiting)


def _print_summary(
    written: Sequence[IndexedDataset], tokenizer: Tokenizer, read: str, seconds: float
) -> None:
    """Print the lengths of the documents, and what was read and written."""
    for indexed in written:
        print(f"{indexed.prefix}, tokens of a document:\n{Lengths.of(indexed).histogram()}")
    num_tokens = sum(indexed.num_tokens for indexed in written)
    print(
        f"{num_tokens} tokens of {tokenizer.vocab_size} ids in "
        f"{', '.join(indexed.prefix for indexed in written)}\n"
        f"{sum(indexed.num_documents for indexed in written)} documents of {read}, "
        f"{num_tokens / seconds:.0f} tokens/s"
    )


def _publish(parts: Mapping[str, Sequence[str]]) -> None:
    """Join the pieces of each data set. All data sets are written before the first is published."""
    with ExitStack() as published:
        for prefix, pieces in parts.items():
            published.enter_context(merged_files(pieces, prefix))


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


def _check_not_empty(
    parts: Mapping[str, Sequence[str]], files: Sequence[str], folder: Path
) -> None:
    """Check that there are documents, and under every key a document with tokens."""
    for key, prefixes in parts.items():
        if not any(IndexedDataset(prefix).num_tokens for prefix in prefixes):
            shutil.rmtree(folder)  # nothing to go on with
            if not any(True for path in files for _ in read_file(path)):
                raise no_documents(files)
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


def _training_texts(
    files: Sequence[str], json_keys: Sequence[str], num_bytes: int
) -> Iterator[str]:
    """Yield every k-th document, about ``_TRAINING_BYTES`` of a large input."""
    stride = 1 + num_bytes // _TRAINING_BYTES
    for record in islice(read_records(files), 0, None, stride):
        yield from record.texts(json_keys)
