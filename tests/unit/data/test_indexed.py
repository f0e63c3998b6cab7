"""Indexed files: equal to megatron-core's bytes, readable, refused when damaged, and never
half-written."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data.indexed.indexed_files import (
    IndexedDataset,
    IndexedDatasetWriter,
    token_dtype,
)
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.errors import ConfigError, DataError

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "datasets_gpt.json").read_text())[
    "facts"
]
WRITTEN: dict[str, dict[str, Any]] = {
    case["name"]: case for case in ORACLE["indexed_dataset"] if "num_docs" in case
}


def document(number: int) -> np.ndarray:
    """The oracle's ``corpus_formula``."""
    length = 3 + (number * 7919) % 61
    tokens = [1 + (number * 131 + i * 17) % 96 for i in range(length - 1)]
    return np.array([*tokens, 0])


def write_case(prefix: Path, case: dict[str, Any]) -> None:
    """Write an oracle case; its sequences per document follow from the recorded boundaries."""
    boundaries = case.get("document_indices", [0])
    with IndexedDatasetWriter(prefix, case["dtype"]) as writer:
        for number in range(case["num_docs"]):
            lengths = case["sequence_lengths"][boundaries[number] : boundaries[number + 1]]
            writer.add_document(document(number), lengths)


@pytest.mark.parametrize("case", WRITTEN.values(), ids=lambda case: case["name"])
def test_bytes_equal_megatron_core(case: dict[str, Any], tmp_path: Path) -> None:
    write_case(tmp_path / "data", case)
    idx, tokens = (tmp_path / "data.idx").read_bytes(), (tmp_path / "data.bin").read_bytes()
    assert idx == base64.b64decode(case["idx_b64"])
    assert tokens == base64.b64decode(case["bin_b64"])
    assert hashlib.sha256(idx).hexdigest() == case["idx_sha256"]
    assert hashlib.sha256(tokens).hexdigest() == case["bin_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("case", WRITTEN.values(), ids=lambda case: case["name"])
def test_reads_megatron_core_files(case: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.idx").write_bytes(base64.b64decode(case["idx_b64"]))
    (tmp_path / "data.bin").write_bytes(base64.b64decode(case["bin_b64"]))
    data = IndexedDataset(tmp_path / "data")
    assert data.num_documents == case["num_docs"]
    assert data.dtype == np.dtype(case["dtype"])
    assert data.sequence_lengths.tolist() == case.get("sequence_lengths", [])
    assert data.document_indices.tolist() == case.get("document_indices", [0])
    expected = np.concatenate([np.zeros(0, int), *map(document, range(case["num_docs"]))])
    read = np.concatenate([np.zeros(0, int), *data])
    assert read.tolist() == expected.tolist()
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000
    assert again.sequence_lengths.tolist() == data.sequence_lengths.tolist()


def test_get_reads_a_part(tmp_path: Path) -> None:
    write_case(tmp_path / "data", WRITTEN["a_int32"])
    data = IndexedDataset(tmp_path / "data")
    assert data.get(1, 1, 3).tolist() == document(1)[1:4].tolist()
    assert data.get(1, 50).tolist() == document(1)[50:].tolist()
    with pytest.raises(
        DataError, match=r"data\.bin: tokens 1 to 4 of sequence 0 do not exist: it has 3 tokens"
    ):
        data.get(0, 1, 3)


def test_merge_equals_megatron_core(tmp_path: Path) -> None:
    merged = next(case for case in ORACLE["indexed_dataset"] if case["name"].startswith("merge"))
    names = merged["name"].removeprefix("merge ").split("+")
    for name in names:
        write_case(tmp_path / name, WRITTEN[name])
    merge([str(tmp_path / name) for name in names], output_prefix=str(tmp_path / "merged"))
    assert (tmp_path / "merged.idx").read_bytes() == base64.b64decode(merged["idx_b64"])
    assert (
        hashlib.sha256((tmp_path / "merged.bin").read_bytes()).hexdigest() == merged["bin_sha256"]
    )
    write_case(tmp_path / "small", WRITTEN["b_uint16"])
    with pytest.raises(DataError, match=r"small\.idx has tokens of uint16"):
        merge([str(tmp_path / name) for name in (names[0], "small")], output_prefix="x")


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (["a", "a"], ConfigError, "a is named twice"),
        (["a", "empty"], ConfigError, "has no data set"),
        (["a", "merged"], ConfigError, "is an input and the output"),
        (["a", "none"], DataError, r"none\.idx: cannot be read"),
        (["a", "modes"], DataError, "has modes of sequences"),
    ],
)
def test_merges_that_cannot_be_are_refused(
    inputs: list[str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    for name in ("a", "modes"):
        write_case(tmp_path / name, WRITTEN["a_int32"])
    with (tmp_path / "modes.idx").open("ab") as file:
        file.write(bytes(len(IndexedDataset(tmp_path / "a"))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        merge([str(tmp_path / name) for name in inputs], output_prefix=str(tmp_path / "merged"))
    assert not [path for path in tmp_path.iterdir() if "merged" in path.name]


def test_a_folder_is_merged_in_the_order_of_names_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_lightning.data.indexed.indexed_merge._BLOCK", 2)
    for name in ("b", "a"):
        write_case(tmp_path / "parts" / name, WRITTEN["a_int32"])
        with (tmp_path / "parts" / f"{name}.idx").open("ab") as file:
            file.write(bytes([3] * len(IndexedDataset(tmp_path / "parts" / name))))
    merge([str(tmp_path / "parts")], output_prefix=str(tmp_path / "out"))
    merged, one = IndexedDataset(tmp_path / "out"), IndexedDataset(tmp_path / "parts" / "a")
    assert [merged[i].tolist() for i in range(len(merged))] == 2 * [
        one[i].tolist() for i in range(len(one))
    ]
    assert merged.modes is not None and merged.modes.tolist() == [3] * len(merged)
    assert f"2 data sets, {2 * one.num_documents} documents" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists"):
        merge([str(tmp_path / "parts")], output_prefix=str(tmp_path / "out"))


def test_a_data_set_is_merged_beside_the_folder_of_its_sample_indices(tmp_path: Path) -> None:
    """A fit without ``cache_dir`` keeps the sample indices in PREFIX/cache."""
    prefix = tmp_path / "a"
    write_case(prefix, WRITTEN["a_int32"])
    (prefix / "cache").mkdir(parents=True)
    merge([str(prefix)], output_prefix=str(tmp_path / "out"))
    assert (tmp_path / "out.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()


def test_modes_of_multimodal_files_are_ignored(tmp_path: Path) -> None:
    write_case(tmp_path / "data", WRITTEN["a_int32"])
    with (tmp_path / "data.idx").open("ab") as file:
        file.write(bytes(5))
    assert len(IndexedDataset(tmp_path / "data")) == 5


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (200_000, "int32")]
)
def test_token_dtype(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(name)


def damage(path: Path, position: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    path.write_bytes(bytes(content))


def test_the_prefix_that_preprocess_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "text_text_document.idx").touch()
    with pytest.raises(DataError, match=r"text_text_document is here: set that prefix"):
        IndexedDataset(tmp_path / "text")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "data.idx").unlink(), r"data\.idx: cannot be read \(No such file"),
        (lambda p: (p / "data.bin").unlink(), r"data\.bin: cannot be read \(No such file"),
        (lambda p: (p / "data.idx").write_bytes(b""), r"data\.idx: truncated: 0 bytes"),
        (
            lambda p: (p / "data.idx").write_bytes((p / "data.idx").read_bytes()[:20]),
            r"data\.idx: truncated: 20 bytes",
        ),
        (
            lambda p: (p / "data.idx").write_bytes((p / "data.idx").read_bytes()[:-8]),
            r"data\.idx: .* truncated or damaged",
        ),
        (
            lambda p: (p / "data.bin").write_bytes((p / "data.bin").read_bytes()[:-1]),
            r"data\.bin: .* \.bin is truncated",
        ),
        (lambda p: damage(p / "data.idx", 0, b"X"), r"data\.idx: bad header"),
        (lambda p: damage(p / "data.idx", 9, b"\x02"), r"data\.idx: bad version 2"),
        (lambda p: damage(p / "data.idx", 17, b"\x09"), r"data\.idx: bad token dtype code 9"),
        (lambda p: damage(p / "data.idx", 34 + 12 * 5, b"\x01"), r"data\.idx: document boundaries"),
    ],
)
def test_damage_is_refused_by_name(harm: Any, message: str, tmp_path: Path) -> None:
    write_case(tmp_path / "data", WRITTEN["a_int32"])
    harm(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "data")


def test_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="token ids 1 to 70000 do not fit uint16"),
        IndexedDatasetWriter(tmp_path / "d", "uint16") as w,
    ):
        w.add_document([1, 70000])
    with (
        pytest.raises(DataError, match="do not agree"),
        IndexedDatasetWriter(tmp_path / "d") as writer,
    ):
        writer.add_document([1, 2, 3], [1, 1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_write_leaves_nothing_and_keeps_the_old(
    error: type[BaseException], tmp_path: Path
) -> None:
    write_case(tmp_path / "data", WRITTEN["a_int32"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error), IndexedDatasetWriter(tmp_path / "data") as writer:
        writer.add_document([1, 2, 3])
        raise error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/data\.bin: cannot be written"):
        IndexedDatasetWriter(tmp_path / "file" / "data")


@pytest.mark.slow
def test_ctrl_c_of_preprocess_keeps_complete_pieces_alone(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {i} " * 2000}) + "\n" for i in range(3000))
    (tmp_path / "in.jsonl").write_text(lines)
    code = (
        # A background job ignores it.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from megatron_lightning.data.text.preprocess import preprocess\n"
        f"preprocess({str(tmp_path / 'out' / 'x')!r}, {str(tmp_path / 'in.jsonl')!r}, "
        "vocab_size=400, workers=2)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not any((tmp_path / "out" / "x.pieces").glob("*.idx")):
            assert time.monotonic() < deadline and process.poll() is None, (
                process.stderr and process.stderr.read()
            )
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.pieces"]
    assert not list((tmp_path / "out" / "x.pieces").glob(".*"))
    assert b"tokenized pieces are kept" in stderr
    shutil.rmtree(tmp_path / "out")
