"""From text to indexed files: tokenizers, the corpus readers, and preprocess with its errors."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from tqdm import tqdm

from megatron_lightning.data.indexed import indexed_merge
from megatron_lightning.data.indexed.indexed_files import IndexedDataset, IndexedDatasetWriter
from megatron_lightning.data.text import encoding, pieces
from megatron_lightning.data.text import preprocess as preprocess_module
from megatron_lightning.data.text.corpus import STDLIB, input_files, read_records, stdlib_files
from megatron_lightning.data.text.preprocess import preprocess
from megatron_lightning.data.text.tokenizers import (
    NO_PAD,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_sentencepiece,
)
from megatron_lightning.errors import ConfigError, DataError

TEXTS = [
    f"def f{i}(x):\n    if x > {i}:\n        return 'é' * {i}\n\n\treturn None  # {'word ' * i}\n"
    for i in range(60)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    train_sentencepiece(TEXTS, 400, path)
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": text, "title": f"title {i}"}) + "\n" for i, text in enumerate(TEXTS)
        )
    )
    return path


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_sentencepiece_reproduces_any_text(model: str) -> None:
    tokenizer = SentencePieceTokenizer(model)
    for text in [
        *TEXTS,
        "  leading, \t tabs\r\n\n\n  and 漢字 \U0001f600  trailing  ",
        "",
        "\n",
        "a",
    ]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.vocab_size == 400
    assert tokenizer.pad == NO_PAD
    assert tokenizer.eod not in tokenizer.encode("".join(TEXTS))


def test_training_is_deterministic(model: str, tmp_path: Path) -> None:
    train_sentencepiece(TEXTS, 400, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == Path(model).read_bytes()


def test_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="vocab_size=100000: no tokenizer can be trained"):
        train_sentencepiece(TEXTS, 100_000, tmp_path / "x.model")
    assert files_in(tmp_path) == []
    with pytest.raises(DataError, match=r"none\.model: cannot be read"):
        load_tokenizer(tmp_path / "none.model")
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(DataError, match=r"text\.model: is not a SentencePiece model"):
        load_tokenizer(tmp_path / "text.model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="needs the package transformers"):
        load_tokenizer("any", "huggingface")


def hugging_face_folder(folder: Path, **special: str) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return str(folder)


def test_hugging_face_tokenizer(tmp_path: Path, jsonl: Path) -> None:
    folder = hugging_face_folder(tmp_path / "hf", eos_token="<eos>", pad_token="<eos>")
    tokenizer = load_tokenizer(folder, "huggingface")
    assert tokenizer.decode(tokenizer.encode(TEXTS[7])) == TEXTS[7]
    assert tokenizer.vocab_size == 301
    assert (tokenizer.eod, tokenizer.pad) == (300, NO_PAD)
    preprocess(str(tmp_path / "out"), str(jsonl), "huggingface", folder, append_eod=True, workers=2)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in data] == TEXTS
    assert {int(ids[-1]) for ids in data} == {tokenizer.eod}


def test_hugging_face_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="has no eos_token"):
        HuggingFaceTokenizer(hugging_face_folder(tmp_path / "hf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no Hugging Face tokenizer can be loaded"):
        HuggingFaceTokenizer(tmp_path / "empty")
    with pytest.raises(DataError, match="absent: there is no such folder; set tokenizer_model"):
        HuggingFaceTokenizer(tmp_path / "absent")


def test_a_hugging_face_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    with pytest.raises(
        DataError,
        match=(
            r"some/name: .* without network, use a folder with the tokenizer's files.* couldn't "
            r"connect"
        ),
    ):
        HuggingFaceTokenizer("some/name")


def test_stdlib_corpus_is_ordered_and_readable() -> None:
    files = stdlib_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == sorted(names)
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    sample = input_files(STDLIB)[::40]
    assert all(record.text().strip() and not record.is_json for record in read_records(sample))


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_keep_their_order(
    workers: int, jsonl: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several documents a chunk, many chunks.
    monkeypatch.setattr(encoding, "_CHUNK_BYTES", 300)
    monkeypatch.setattr(pieces, "_SMALLEST", 1000)
    prefixes = preprocess(
        str(tmp_path / "out" / "x"),
        str(jsonl),
        tokenizer_model=model,
        json_keys=["text", "title"],
        workers=workers,
    )
    assert prefixes == {
        key: str(tmp_path / "out" / f"x_{key}_document") for key in ("text", "title")
    }
    assert files_in(tmp_path / "out") == [
        f"x_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx", "json")
    ]
    tokenizer = load_tokenizer(model)
    text, title = IndexedDataset(prefixes["text"]), IndexedDataset(prefixes["title"])
    assert text.dtype == np.uint16
    assert [tokenizer.decode(ids.tolist()) for ids in text] == TEXTS
    assert [tokenizer.decode(ids.tolist()) for ids in title] == [
        f"title {i}" for i in range(len(TEXTS))
    ]
    assert text.num_documents == len(TEXTS)


def test_trains_a_tokenizer_and_reads_text_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text("".join(TEXTS[number::3]))
    inputs = [str(tmp_path / f"{number}.py") for number in (2, 0, 1)]
    prefix = preprocess(str(tmp_path / "out" / "x"), inputs, vocab_size=350, append_eod=True)[
        "text"
    ]
    tokenizer = load_tokenizer(tmp_path / "out" / "x_tokenizer.model")
    data = IndexedDataset(prefix)
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in data] == [
        "".join(TEXTS[number::3]) for number in (2, 0, 1)
    ]
    assert all(ids[-1] == tokenizer.eod for ids in data)
    assert files_in(tmp_path / "out") == [
        "x_text_document.bin",
        "x_text_document.idx",
        "x_text_document.json",
        "x_tokenizer.model",
    ]


BAD_LINES = [
    (b'{"text": "a"}\n\n{"text": "b"\n', r"in\.jsonl:3: invalid JSON at column 13: Expecting"),
    (
        b'{"text": "a"}\n["b"]\n',
        r"in\.jsonl:2: found a list\. Each line must be a JSON object",
    ),
    (
        b'{"text": "a"}\n{"body": "b"}\n',
        r"in\.jsonl:2: no key 'text', only \['body'\]; set json_keys",
    ),
    (b'{"text": "a"}\n{"text": 7}\n', r"in\.jsonl:2: int under key 'text'; set json_keys"),
    (b'{"text": "a"}\n{"text": "\xff"}\n', r"in\.jsonl:2: not UTF-8: byte 0xff"),
    (
        b'{"text": "a"}\n{"text": "\\ud800 x"}\n',
        r"in\.jsonl:2: half a character under key 'text': '\\ud800' at character 1 is",
    ),
    (
        b'{"text": "a"}\n' + b"[" * 100_000,
        r"in\.jsonl:2: unreadable JSON \(maximum recursion depth",
    ),
    (
        b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n",
        r"in\.jsonl:1: unreadable JSON \(Exceeds the limit",
    ),
    (
        b'{"text": "a"}\n{"text": ""}\n',
        r"in\.jsonl:2: empty document under key 'text'; .* empty_documents to skip",
    ),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("content", "message"), BAD_LINES)
def test_bad_line_is_named_and_leaves_nothing(
    content: bytes, message: str, workers: int, model: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        preprocess(
            str(tmp_path / "out" / "x"),
            str(tmp_path / "in.jsonl"),
            tokenizer_model=model,
            workers=workers,
        )
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [*BAD_LINES[:-1], (b"\n \n", r"in\.jsonl: no document, only blank lines")],
)
def test_bad_line_is_named_when_a_tokenizer_is_trained(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"^[^ ]*{message}"):
        preprocess(str(tmp_path / "out" / "x"), str(tmp_path / "in.jsonl"), vocab_size=300)
    assert files_in(tmp_path / "out") == []


def test_input_without_text_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    (tmp_path / "in.txt").write_text("")
    with pytest.raises(DataError, match=r"in\.jsonl: no document, only blank lines"):
        preprocess(str(tmp_path / "out" / "x"), str(tmp_path / "in.jsonl"), tokenizer_model=model)
    with pytest.raises(DataError, match="no text that a tokenizer could be trained on"):
        preprocess(str(tmp_path / "out" / "x"), str(tmp_path / "in.txt"), vocab_size=300)
    assert files_in(tmp_path / "out") == []


class _Terminating(tqdm):  # type: ignore[misc, type-arg]
    """A progress bar at whose first step somebody ends the job."""

    def update(self, n: float | None = 1) -> bool | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().update(n)


@pytest.mark.parametrize("workers", [1, 2])
def test_termination_keeps_complete_pieces_alone(
    workers: int, jsonl: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_module, "tqdm", _Terminating)
    handled = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_:
        preprocess(str(tmp_path / "out" / "x"), str(jsonl), tokenizer_model=model, workers=workers)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert files_in(tmp_path / "out") == ["x.pieces"]
    assert signal.getsignal(signal.SIGTERM) == handled


def test_a_full_disk_leaves_nothing(
    jsonl: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, *_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        close = write  # what is buffered cannot be written either

    class Writer(IndexedDatasetWriter):
        def __init__(self, prefix: str, dtype: Any) -> None:
            super().__init__(prefix, dtype)
            self._file.close()
            self._file = Full()

    monkeypatch.setattr(encoding, "IndexedDatasetWriter", Writer)
    with pytest.raises(
        DataError, match=r"x: cannot be written \(\[Errno 28\] No space left .* or free space"
    ):
        preprocess(str(tmp_path / "out" / "x"), str(jsonl), tokenizer_model=model)
    assert files_in(tmp_path / "out") == []


def test_undecodable_text_file_names_its_line(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(DataError, match=r"in\.txt:3: not UTF-8: byte 0xe9 at offset 11"):
        preprocess(str(tmp_path / "out" / "x"), str(tmp_path / "in.txt"), vocab_size=300)
    assert files_in(tmp_path / "out") == []


def test_empty_documents_can_be_skipped(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    prefix = preprocess(
        str(tmp_path / "x"),
        str(tmp_path / "in.jsonl"),
        tokenizer_model=model,
        empty_documents="skip",
    )["text"]
    assert len(IndexedDataset(prefix)) == 2
    (tmp_path / "in.jsonl").write_text('{"text": "a", "title": ""}\n' * 2)
    with pytest.raises(DataError, match=r"in\.jsonl: only empty documents under key 'title'"):
        preprocess(
            str(tmp_path / "out" / "x"),
            str(tmp_path / "in.jsonl"),
            tokenizer_model=model,
            json_keys=["text", "title"],
            empty_documents="skip",
        )
    assert files_in(tmp_path / "out") == []


def test_a_disk_that_fills_up_with_the_last_of_several_datasets_leaves_none(
    jsonl: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(prefixes: Any, file: Any) -> None:
        if "_title_" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(b"an index")

    monkeypatch.setattr(indexed_merge, "_write_index", full)
    with pytest.raises(DataError, match="No space left"):
        preprocess(
            str(tmp_path / "out" / "x"),
            str(jsonl),
            tokenizer_model=model,
            json_keys=["text", "title"],
        )
    assert files_in(tmp_path / "out") == ["x.pieces"]


class _TooLarge:
    """A tokenizer whose files do not belong together."""

    vocab_size, eod, pad, unique_identifiers, identity = 5, 0, NO_PAD, {"class": "x"}, "x"

    def encode(self, text: str) -> list[int]:
        return [1, 5]

    def encode_batch(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        return ""


def test_id_outside_the_vocabulary_is_refused(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: _TooLarge())
    with pytest.raises(
        DataError, match=r"in\.jsonl:1: token id 5 is outside the tokenizer's vocabulary of 5 ids"
    ):
        preprocess(str(tmp_path / "out" / "x"), str(jsonl), tokenizer_model="any")
    assert files_in(tmp_path / "out") == []


class _Deadly(_TooLarge):
    def encode(self, text: str) -> list[int]:
        os._exit(9)


def test_dead_worker_ends_the_run(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("the replaced tokenizer reaches a forked worker only")
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: _Deadly())
    with pytest.raises(DataError, match="a worker process died"):
        preprocess(str(tmp_path / "out" / "x"), str(jsonl), tokenizer_model="any", workers=2)
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"input": "missing.jsonl"}, DataError, r"missing\.jsonl: cannot be read \(No such file"),
        (
            {"input": "."},
            DataError,
            r"\. is a directory, and input takes files; list those in it, as in --input \./\*\.txt",
        ),
        ({"input": []}, DataError, "names no file"),
        ({"workers": 0}, ConfigError, "workers=0"),
        ({"json_keys": []}, ConfigError, "json_keys"),
        ({"json_keys": ["a", "a"]}, ConfigError, "json_keys"),
        (
            {"vocab_size": None},
            ConfigError,
            "set tokenizer_model to use an existing tokenizer, or vocab_size",
        ),
        ({"tokenizer_model": "x.model"}, ConfigError, "and not both"),
        ({"tokenizer_type": "huggingface"}, ConfigError, "is never trained here"),
        ({"output_prefix": "file/x"}, DataError, "file/x: cannot be written"),
        ({"output_prefix": "/proc/x"}, DataError, "/proc/x: cannot be written"),
    ],
)
def test_impossible_settings_are_refused(
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    jsonl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=message):
        preprocess(**{"output_prefix": "out/x", "input": str(jsonl), "vocab_size": 300, **settings})
    assert files_in(tmp_path / "out") == []


def _lines(folder: Path) -> Path:
    path = folder / "many.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text * (1 + i % 7)}) + "\n" for i, text in enumerate(TEXTS))
    )
    return path


def _bytes(prefix: str) -> list[bytes]:
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def test_the_same_bytes_whatever_is_stopped_and_how_many_workers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after some pieces, the same command with other workers goes on with them."""
    monkeypatch.setattr(pieces, "_SMALLEST", 2000)
    lines = _lines(tmp_path)
    whole = preprocess(str(tmp_path / "a" / "x"), str(lines), tokenizer_model=model)["text"]
    encoded, write = [], encoding._encode

    def killed(piece: Any, *arguments: Any) -> None:
        if len(encoded) == 3:
            raise MemoryError
        encoded.append(piece)
        write(piece, *arguments)

    monkeypatch.setattr(encoding, "_encode", killed)
    with pytest.raises(MemoryError):
        preprocess(str(tmp_path / "b" / "x"), str(lines), tokenizer_model=model)
    assert "3 tokenized pieces are kept" in capsys.readouterr().err
    monkeypatch.setattr(encoding, "_encode", write)
    (tmp_path / "b" / "x.pieces" / ".half.bin.1.ab.tmp").write_bytes(b"of a killed process")
    resumed = preprocess(str(tmp_path / "b" / "x"), str(lines), tokenizer_model=model, workers=2)
    num_pieces = len(pieces.cut([str(lines)]))
    assert num_pieces > 6
    summary = capsys.readouterr().out
    assert f"{num_pieces - 3} of {num_pieces} pieces tokenized now" in summary
    assert "_text_document, tokens of a document:\n" in summary and "█" in summary
    assert _bytes(resumed["text"]) == _bytes(whole)
    assert files_in(tmp_path / "b") == [f"x_text_document.{end}" for end in ("bin", "idx", "json")]


def test_other_settings_tokenize_anew(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SMALLEST", 2000)
    monkeypatch.setattr(preprocess_module, "tqdm", _Terminating)
    lines = _lines(tmp_path)
    with pytest.raises(SystemExit):
        preprocess(str(tmp_path / "x"), str(lines), tokenizer_model=model)
    monkeypatch.setattr(preprocess_module, "tqdm", tqdm)
    settings: dict[str, Any] = {"tokenizer_model": model, "append_eod": True}
    prefix = preprocess(str(tmp_path / "x"), str(lines), **settings)["text"]
    expected = preprocess(str(tmp_path / "y"), str(lines), **settings)["text"]
    assert _bytes(prefix) == _bytes(expected)


def test_a_bad_line_in_a_later_piece_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SMALLEST", 2000)
    lines = _lines(tmp_path)
    rows = lines.read_text().splitlines()
    rows[41] = "{"
    lines.write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"many\.jsonl:42: invalid JSON"):
        preprocess(str(tmp_path / "x"), str(lines), tokenizer_model=model, workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_changes_meanwhile_is_refused(
    workers: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SMALLEST", 2000)
    lines, cut = _lines(tmp_path), pieces.cut

    def cut_and_changed(files: Any) -> Any:
        found = cut(files)
        lines.write_text(lines.read_text().replace("def", "DEF"))
        os.utime(lines, (1, 1))
        return found

    monkeypatch.setattr(preprocess_module, "cut", cut_and_changed)
    with pytest.raises(DataError, match=r"many\.jsonl: changed while it was read"):
        preprocess(str(tmp_path / "out" / "x"), str(lines), tokenizer_model=model, workers=workers)
    assert files_in(tmp_path / "out") == []


def test_two_runs_into_one_prefix_are_refused(jsonl: Path, model: str, tmp_path: Path) -> None:
    with (
        preprocess_module._folder_of_pieces(str(tmp_path / "x")),
        pytest.raises(ConfigError, match="another process tokenizes into"),
    ):
        preprocess(str(tmp_path / "x"), str(jsonl), tokenizer_model=model)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "txt.gz", "memory", "glob"])
def test_formats_and_urls(kind: str, jsonl: Path, model: str, tmp_path: Path) -> None:
    content = jsonl.read_bytes()
    source: Any = tmp_path / f"data.{kind}"
    if kind == "jsonl.gz":
        source.write_bytes(gzip.compress(content))
    elif kind == "jsonl.zst":
        source.write_bytes(pytest.importorskip("zstandard").compress(content))
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist([{"text": text} for text in TEXTS])
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(table, source, row_group_size=7)
    elif kind == "txt.gz":
        source.write_bytes(gzip.compress("".join(TEXTS).encode()))
    elif kind == "memory":
        source = "memory://inputs/data.jsonl"
        fsspec.filesystem("memory").pipe("/inputs/data.jsonl", content)
    else:
        for number in (1, 0):
            (tmp_path / f"part{number}.txt").write_text("".join(TEXTS[number::2]))
        source = tmp_path / "part?.txt"
    prefix = preprocess(str(tmp_path / "out" / "x"), str(source), tokenizer_model=model)["text"]
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.decode(ids.tolist()) for ids in IndexedDataset(prefix)]
    expected = {
        "txt.gz": ["".join(TEXTS)],
        "glob": ["".join(TEXTS[0::2]), "".join(TEXTS[1::2])],
    }
    assert texts == expected.get(kind, TEXTS)


def test_parquet_is_cut_by_row_groups(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(pieces, "_SMALLEST", 500)
    table = arrow.Table.from_pylist([{"text": text} for text in TEXTS])
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=7)
    found = pieces.cut([str(tmp_path / "x.parquet")])
    assert len(found) > 2
    records = [record for piece in found for record in piece.records()]
    assert [record.texts(["text"])[0] for record in records] == TEXTS
    assert [record.line for record in records] == list(range(1, len(TEXTS) + 1))


def test_a_damaged_archive_is_named(model: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 900)[:-12])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz: is damaged"):
        preprocess(str(tmp_path / "out" / "x"), str(tmp_path / "x.jsonl.gz"), tokenizer_model=model)


def test_data_of_another_tokenizer_are_refused(jsonl: Path, model: str, tmp_path: Path) -> None:
    from megatron_lightning.data.indexed.sidecar import check_tokenizer

    prefix = preprocess(str(tmp_path / "x"), str(jsonl), tokenizer_model=model)["text"]
    other = preprocess(str(tmp_path / "y"), str(jsonl), vocab_size=350)["text"]
    assert json.loads(Path(f"{prefix}.json").read_text())["options"] == {
        "tokenizer_type": "sentencepiece",
        "json_key": "text",
        "empty_documents": "error",
        "sentence_splitter": None,
        "lang": None,
    }
    trained = load_tokenizer(tmp_path / "y_tokenizer.model")
    check_tokenizer(prefix, load_tokenizer(model), "small")
    check_tokenizer(other, trained, "trained")
    with pytest.raises(DataError, match=r"x_text_document was written with another tokenizer"):
        check_tokenizer(prefix, trained, "trained")
    with pytest.raises(DataError, match="were written with different tokenizers"):
        indexed_merge.merge([prefix, other], output_prefix=str(tmp_path / "both"))
    indexed_merge.merge([prefix], output_prefix=str(tmp_path / "one"))
    check_tokenizer(tmp_path / "one", load_tokenizer(model), "small")


STORIES = [
    "The cat sat. It slept on Mr. Smith's mat! Did it? 42 mice came.\n\nA title\n\nThe end.",
    "One sentence alone",
    "\u4f60\u597d\u3002\u4e16\u754c\uff01",
]
SENTENCES = [
    [
        "The cat sat.",
        "It slept on Mr. Smith's mat!",
        "Did it?",
        "42 mice came.",
        "A title",
        "The end.",
    ],
    ["One sentence alone"],
    ["\u4f60\u597d\u3002", "\u4e16\u754c\uff01"],
]


@pytest.mark.parametrize("workers", [1, 2])
def test_sentences_are_sequences_of_their_document(tmp_path: Path, workers: int) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    options: dict[str, Any] = {"tokenizer_type": "bytes", "tokenizer_model": "bytes"}
    made = preprocess(
        str(tmp_path / "out"), str(source), **options, split_sentences=True, append_eod=True,
        workers=workers,
    )  # fmt: skip
    assert made == {"text": f"{tmp_path}/out_text_sentence"}
    data = IndexedDataset(made["text"])
    texts = [bytes(data[i][data[i] < 256].tolist()).decode() for i in range(len(data))]
    assert texts == [sentence for story in SENTENCES for sentence in story]
    ends = [i for i in range(len(data)) if data[i][-1] == 256]
    assert data.document_indices.tolist() == [0, 6, 7, 9]
    assert ends == [5, 6, 8]  # the last sentence of each document


def test_lines_are_sentences_and_other_splitters_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("One. Two.\n\nThree.\n")
    options: dict[str, Any] = {
        "tokenizer_type": "bytes", "tokenizer_model": "bytes", "split_sentences": True
    }  # fmt: skip
    made = preprocess(str(tmp_path / "out"), str(source), **options, sentence_splitter="lines")
    written = json.loads(Path(f"{made['text']}.json").read_text())["options"]
    assert (written["sentence_splitter"], written["lang"]) == ("lines", "english")
    assert IndexedDataset(made["text"]).sequence_lengths.tolist() == [9, 6]
    with pytest.raises(ConfigError, match="must be one of rules, lines, punkt"):
        preprocess(str(tmp_path / "no"), str(source), **options, sentence_splitter="word")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pip install nltk|no data for lang='klingon'"):
        preprocess(
            str(tmp_path / "no"), str(source), **options, sentence_splitter="punkt", lang="klingon"
        )
    assert not list(tmp_path.glob("no*"))
