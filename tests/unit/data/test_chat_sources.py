"""Sources of rows: formats by name, caches that know contents, and broken rows."""

from __future__ import annotations

import codecs
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from megatron_lightning.data.chat.chat_encoding import BadRows, Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.documents import Documents
from megatron_lightning.data.rows import document_cache, sources
from megatron_lightning.data.rows.document_cache import DocumentCache
from megatron_lightning.data.rows.row_report import warning_of
from megatron_lightning.data.rows.sources import read_rows, source_files
from megatron_lightning.data.text.corpus import read_records
from megatron_lightning.data.text.formats import FileFormat, format_of
from megatron_lightning.errors import DataError
from tests.helpers.chats import CHATML, CHATML_TOKENS, make_tokenizer, turn, write_rows

_TOKENIZER = ChatTokenizer(make_tokenizer(CHATML_TOKENS))
_NO_ANSWER_FIRST = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}" + CHATML
)


def _encoder(template: str = CHATML, bad_rows: BadRows = "refuse") -> Encoder:
    chat = ChatTemplate(template, _TOKENIZER.special_tokens)
    return Encoder(_TOKENIZER, chat, SupervisedOptions(sequence_length=64, bad_rows=bad_rows))


def _texts(documents: Documents) -> list[str]:
    return [_TOKENIZER.decode(document.ids.tolist()) for document in documents]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("DATA.JSONL", FileFormat("lines", None)),
        ("a.ndjson.GZ", FileFormat("lines", "gzip")),
        ("s3://bucket/a.Json.zst", FileFormat("lines", "zstd")),
        ("a.CSV", FileFormat("csv", None)),
        ("a.Parquet", FileFormat("parquet", None)),
        ("a.parquet.gz", FileFormat("text", "gzip")),
        ("a.TXT.gz", FileFormat("text", "gzip")),
        ("notes", FileFormat("text", None)),
    ],
)
def test_a_format_is_known_by_name_in_any_case(path: str, expected: FileFormat) -> None:
    assert format_of(path) == expected


def test_the_mark_before_utf8_is_left_out(tmp_path: Path) -> None:
    lines = tmp_path / "DATA.JSONL"
    lines.write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}\n')
    assert [dict(row.fields) for row in read_rows(str(lines))] == [{"text": "a"}, {"text": "b"}]
    assert [r.texts(["text"]) for r in read_records([lines])] == [["a"], ["b"]]
    text = tmp_path / "NOTES.TXT"
    text.write_bytes(codecs.BOM_UTF8 + b"a b")
    assert [record.text() for record in read_records([text])] == ["a b"]


def _chat(answer: str) -> list[dict[str, Any]]:
    return [turn("user", "Hi"), turn("assistant", answer)]


class _Rows(list[dict[str, Any]]):
    """Rows of the package ``datasets``."""

    _fingerprint = ""


def _rows(text: str) -> _Rows:
    rows = _Rows([{"messages": _chat(text)}])
    rows._fingerprint = text
    return rows


def test_a_folder_saved_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    (folder / "train").mkdir(parents=True)
    cache = DocumentCache(str(tmp_path / "cache"), split="train", subset=None)
    reads = []
    for text in ("one", "two"):
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (folder / "train" / "state.json").write_text(f'{{"_fingerprint": "{text}"}}')

        def load(path: str, *, split: str, subset: str | None, text: str = text) -> _Rows:
            reads.append(text)
            return _rows(text)

        monkeypatch.setattr(sources, "load_dataset", load)
        for _ in range(2):
            documents, _ = cache.documents(str(folder), _encoder())
            assert text in _texts(documents)[0]
    assert reads == ["one", "two"]


def test_a_set_of_the_hub_pushed_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: Iterator[str | None] = iter(["one", "two", None])

    def load(path: str, *, split: str, subset: str | None) -> _Rows:
        if current is None:
            raise DataError("no network, and no local copy")
        return _rows(current)

    for module in (sources, document_cache):
        monkeypatch.setattr(module, "load_dataset", load)
    cache = DocumentCache(str(tmp_path), split="train", subset=None)
    for current in versions:  # read by load
        cache.look_up("org/set")
        documents, _ = cache.documents("org/set", _encoder())
        other_rank = DocumentCache(str(tmp_path), split="train", subset=None)
        with monkeypatch.context() as ranks:  # one rank asks; the others read its note
            ranks.setattr(document_cache, "load_dataset", None)
            assert other_rank.documents("org/set", _encoder())[0].digest == documents.digest
        assert (current or "two") in _texts(documents)[0]


def test_all_broken_rows_are_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": _chat("Yes")}])
    good = path.read_text()
    path.write_text(good + '{"messages": [\n' * 20 + '{"message": []}\n' * 5 + good)
    rows = str(path)
    with pytest.raises(DataError) as refused:
        list(_encoder().documents(read_rows(rows)))
    message = str(refused.value)
    assert message.startswith("25 of 27 rows cannot be used. Set bad_rows=skip")
    assert "chats.jsonl:2: invalid JSON" in message and "chats.jsonl:21: invalid JSON" in message
    assert message.endswith("and 5 more.") and "chats.jsonl:22" not in message
    encoder = _encoder(bad_rows="skip")
    documents = Documents.build(
        tmp_path / "made", encoder.documents(read_rows(rows)), encoder.counts
    )
    assert len(documents) == 2 and documents.rows.tolist() == [0, 26]
    assert "25 of 27 rows cannot be used and are left out" in str(warning_of(rows, documents))
    assert _encoder().identity != encoder.identity


def test_broken_entries_of_lists_and_tables_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n[{"text": "a"}, 3, {"text": "b"}]')
    (tmp_path / "b.csv").write_text("text,n\na,1\nb\nc,2\n")
    for name in ("a.json", "b.csv"):
        encoder = _encoder(bad_rows="skip")
        assert len(list(encoder.documents(read_rows(str(tmp_path / name))))) == 2
        assert encoder.counts["rows left out as broken"] == 1
    (tmp_path / "c.jsonl").write_text('{\n "text": "a"\n}\n')
    with pytest.raises(DataError, match=r"3 of 3 rows cannot be used. No other row is left"):
        list(_encoder(bad_rows="skip").documents(read_rows(str(tmp_path / "c.jsonl"))))


def test_half_of_a_character_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": _chat("Yes")}, {"messages": _chat("\ud83d")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"jsonl:2: the text has half of a character \(U\+D83D\)"):
        list(_encoder().documents(read_rows(str(path))))
    encoder = _encoder(bad_rows="skip")
    assert len(list(encoder.documents(read_rows(str(path))))) == 1
    assert encoder.counts["rows left out as broken"] == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    encoder = _encoder()
    with pytest.raises(DataError, match=r"cannot be cached here .*Set cache_dir to a folder"):
        Documents.build(tmp_path / "file" / "cache", encoder.documents([]), encoder.counts)


@pytest.mark.parametrize("pattern", ["", "/*.jsonl"])
def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path, pattern: str) -> None:
    for name in ("a.jsonl", "._a.jsonl"):
        write_rows(tmp_path / name, [{"messages": _chat("Yes")}])
    [file] = source_files(f"{tmp_path}{pattern}")
    assert Path(file).name == "a.jsonl"
    [hidden] = source_files(f"{tmp_path}/.*.jsonl")
    assert Path(hidden).name == "._a.jsonl"


def test_a_conversation_that_begins_with_an_answer_says_so(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": _chat("Yes")[1:]}])
    with pytest.raises(DataError, match=r"chats.jsonl:1: the conversation begins with an answer"):
        list(_encoder(_NO_ANSWER_FIRST).documents(read_rows(str(path))))


def test_sets_of_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of save_to_disk, several splits in a folder, and a set of the Hub in the local
    cache: without a network, as on a node of a cluster."""
    datasets = pytest.importorskip("datasets")
    answers = ["one", "two", "three"]
    rows = [{"messages": _chat(answer), "extra": None} for answer in answers]
    one, several, cache = (str(tmp_path / name) for name in ("one", "several", "cache"))
    datasets.Dataset.from_list(rows).save_to_disk(one)
    splits = {"train": rows, "test": rows[:1]}
    datasets.DatasetDict(
        {split: datasets.Dataset.from_list(own) for split, own in splits.items()}
    ).save_to_disk(several)
    # As load_dataset leaves a set of the Hub that it has downloaded.
    lines = tmp_path / "rows.jsonl"
    write_rows(lines, rows)
    datasets.load_dataset("json", data_files={"train": str(lines)}, cache_dir=cache)
    [arrow] = (tmp_path / "cache" / "json").rglob("*.arrow")
    version = tmp_path / "cache" / "org___chats" / "default" / "0.0.0" / arrow.parent.name
    shutil.copytree(arrow.parent, version)
    (version / arrow.name).rename(version / "chats-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    documents = DocumentCache(str(tmp_path / "tokens"), split="train", subset=None)
    for path in (one, several, "org/chats"):
        documents.look_up(path)
        found, _ = documents.documents(path, _encoder())
        assert all(word in text for word, text in zip(answers, _texts(found), strict=True))
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\]. Set split to one"):
        sources.load_dataset(several, split="validation", subset=None)
    with pytest.raises(DataError, match=r"org/others is neither a file nor a data set"):
        sources.load_dataset("org/others", split="train", subset=None)
