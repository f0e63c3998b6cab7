"""GPTDataset: indices, samples and cache names equal megatron-core's; caches are safe, damage is
refused."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter, index_header
from megatron_lightning.data.pretraining import gpt_index
from megatron_lightning.data.pretraining.gpt_index import build_indices, plan_epochs, split_matrix
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig, IndexSplit
from megatron_lightning.data.text.tokenizers import NO_PAD
from megatron_lightning.errors import ConfigError, DataError
from tests.unit.data.test_indexed import document

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "datasets_gpt.json").read_text())[
    "facts"
]
# The oracle's defaults, as its cache description states them.
BASE = {"sequence_length": 16, "split": "90,8,2"}
SPLITS: tuple[IndexSplit, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Tok:
    """The oracle's tokenizer: end of document 0, and a padding id or none."""

    pad: int = NO_PAD
    eod: int = 0
    vocab_size: int = 97

    @property
    def unique_identifiers(self) -> dict[str, object]:
        return {"class": "Tok"}

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        raise NotImplementedError


def config_of(case: dict[str, Any], cache_dir: Path | str | None = None) -> GPTDatasetConfig:
    """The oracle's settings; samples never hold a dense mask."""
    dropped = ("tokenizer", "create_attention_mask")
    settings = {key: value for key, value in case["config"].items() if key not in dropped}
    pad = re.search(r"pad=(\d+)", case["config"].get("tokenizer", ""))
    tokenizer = Tok(int(pad[1])) if pad else Tok()
    return GPTDatasetConfig(
        **{**BASE, **settings}, tokenizer=tokenizer, cache_dir=cache_dir and str(cache_dir)
    )


def write(prefix: Path, documents: list[Any], dtype: str = "int32") -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return str(prefix)


@pytest.fixture
def corp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The oracle's 40 documents, under the relative prefix that its cache names contain."""
    monkeypatch.chdir(tmp_path)
    return write(Path("corp"), [document(number) for number in range(40)])


@pytest.mark.parametrize(
    "case", ORACLE["gpt_dataset"], ids=lambda case: f"{case['config']}-{case['num_samples']}"
)
def test_equals_megatron_core(case: dict[str, Any], corp: str) -> None:
    config = config_of(case)
    assert [bounds and list(bounds) for bounds in split_matrix(config.split)] == case[
        "split_matrix"
    ]
    for name, num_samples in zip(SPLITS, case["num_samples"], strict=True):
        expected = case["splits"][name]
        if expected is None:
            with pytest.raises(ConfigError, match=f"the {name} part has no weight"):
                GPTDataset(corp, config, name, num_samples)
            continue
        data = GPTDataset(corp, config, name, num_samples)
        assert len(data) == expected["len"]
        for field in ("document_index", "sample_index", "shuffle_index"):
            assert getattr(data.indices, field).tolist() == expected[field], field
        indices = data.indices
        dtypes = (
            indices.document_index.dtype,
            indices.sample_index.dtype,
            indices.shuffle_index.dtype,
        )
        assert dtypes == (np.int32, np.int32, np.uint32)
        masks = np.stack(
            [data[index]["loss_mask"].numpy() for index in range(len(expected["samples"]))]
        )
        if not config.eod_mask_loss:
            # megatron-core 0.19.2 zeroes its cached mask in place: positions masked in one sample
            # stay masked in all later ones
            masks = np.minimum.accumulate(masks)
        for index, sample in enumerate(expected["samples"]):
            assert data[index]["tokens"].tolist() == sample["tokens"]
            assert data[index]["labels"].tolist() == sample["labels"]
            assert masks[index].tolist() == sample["loss_mask"]
            if config.reset_position_ids or config.reset_attention_mask:
                assert data[index]["position_ids"].tolist() == sample["position_ids"]
            else:
                assert set(data[index]) == {"tokens", "labels", "loss_mask"}
            if config.reset_attention_mask:
                # Megatron's mask is true where a position is hidden.
                hidden = torch.tensor(sample["attention_mask"])[0]
                assert torch.equal(visible(data[index]["document_ids"]), ~hidden)


def visible(document_ids: torch.Tensor) -> torch.Tensor:
    """Return which positions [s, s] a causal query sees in its own document."""
    return (document_ids[:, None] == document_ids).tril()


def masks_and_positions(
    row: list[int], eod: int, *, reset_position_ids: bool, reset_attention_mask: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the dense mask [s, s] and the positions [s], as Megatron's loop over the ends of
    documents makes them."""
    mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()
    position_ids = torch.arange(len(row))
    previous = 0
    for i in [place for place, token in enumerate(row) if token == eod]:
        if reset_attention_mask:
            mask[i + 1 :, : i + 1] = False
        if reset_position_ids:
            position_ids[i + 1 :] -= i + 1 - previous
            previous = i + 1
    return mask, position_ids


@pytest.mark.parametrize("reset_position_ids", [False, True])
@pytest.mark.parametrize("reset_attention_mask", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        [5, 6, 7, 8, 9, 5, 6, 7],
        [5, 6, 0, 8, 9, 0, 6, 7],
        [0, 6, 7, 8, 9, 5, 6, 7],
        [5, 6, 7, 8, 9, 5, 6, 0],
        [5, 6, 0, 0, 0, 5, 6, 7],
        [0, 0, 7, 8, 9, 5, 0, 0],
        [0] * 8,
        [0],
        [5],
    ],
    ids=str,
)
def test_resets_equal_megatrons_loop(
    row: list[int], reset_attention_mask: bool, reset_position_ids: bool, tmp_path: Path
) -> None:
    resets = {
        "reset_position_ids": reset_position_ids,
        "reset_attention_mask": reset_attention_mask,
    }
    prefix = write(tmp_path / "d", [[*row, 5]])
    config = GPTDatasetConfig(sequence_length=len(row), split="1", tokenizer=Tok(), **resets)
    sample = GPTDataset(prefix, config, "train")[0]
    plain = GPTDataset(prefix, replace(config, **dict.fromkeys(resets, False)), "train")[0]
    assert all(torch.equal(sample[name], plain[name]) for name in plain)
    mask, position_ids = masks_and_positions(row, Tok().eod, **resets)
    expected = {"tokens", "labels", "loss_mask"}
    if reset_position_ids or reset_attention_mask:
        expected.add("position_ids")
        assert sample["position_ids"].dtype == torch.int64
        assert torch.equal(sample["position_ids"], position_ids)
    if reset_attention_mask:
        expected.add("document_ids")
        assert sample["document_ids"].dtype == torch.int64
        assert torch.equal(visible(sample["document_ids"]), mask)
        ends = [row[:place].count(0) for place in range(len(row))]
        assert sample["document_ids"].tolist() == ends
    assert set(sample) == expected


@pytest.mark.parametrize("pad", [NO_PAD, 96])
def test_padding_ends_no_document(pad: int, tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[5, 6, 7, 8, 9, 0]])
    config = GPTDatasetConfig(
        sequence_length=4,
        split="0,1",
        drop_last_partial_validation_sequence=False,
        tokenizer=Tok(pad),
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    data = GPTDataset(prefix, config, "valid")
    last = data[data.indices.shuffle_index.tolist().index(1)]
    assert last["tokens"].tolist() == [9, 0, 0, 0]  # of which two are padding
    assert last["document_ids"].tolist() == [0, 0, 1, 1]
    assert last["position_ids"].tolist() == [0, 1, 0, 1]


def test_resets_use_the_same_cache(corp: str) -> None:
    config = config_of({"config": {}})
    resets = replace(config, reset_position_ids=True, reset_attention_mask=True)
    descriptions = {
        GPTDataset(corp, each, "train", 20).unique_description for each in (config, resets)
    }
    assert descriptions == {ORACLE["cache"]["unique_description"]}


def test_cache_names_equal_megatron_core(corp: str) -> None:
    for name, num_samples in zip(SPLITS, [20, 4, 2], strict=True):
        data = GPTDataset(corp, config_of({"config": {}}), name, num_samples)
        if name == "train":
            assert data.unique_description == ORACLE["cache"]["unique_description"]
            assert data.unique_description_hash == ORACLE["cache"]["hash"]
    folder = Path("corp/cache/GPTDataset_indices")
    assert sorted(path.name for path in folder.iterdir()) == sorted(ORACLE["cache"]["files"])
    for path in folder.glob("*-description.txt"):
        assert hashlib.md5(path.read_bytes()).hexdigest() == path.name.split("-")[0]


def test_settings_that_change_the_indices_change_the_name(corp: str) -> None:
    config = GPTDatasetConfig(**BASE)
    partial = replace(config, drop_last_partial_validation_sequence=False)
    no_extra = replace(config, add_extra_token_to_sequence=False)
    names = {
        GPTDataset(corp, each, "valid", 4).unique_description_hash
        for each in (config, partial, no_extra)
    }
    assert len(names) == 3
    assert (
        len(
            {
                GPTDataset(corp, each, "train", 4).unique_description_hash
                for each in (config, partial)
            }
        )
        == 1
    )


def walk(lengths: list[int], num_samples: int, sequence_length: int, extra: int) -> list[list[int]]:
    """The sample index by reading the stream document by document, as contracts describe it."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(num_samples):
        remaining = sequence_length + extra
        while remaining > 0:
            available = lengths[position] - offset
            if available >= remaining:
                offset += remaining - extra
                break
            if position == len(lengths) - 1:
                offset = lengths[position] - extra
                break
            remaining, position, offset = remaining - available, position + 1, 0
        rows.append([position, offset])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_vectorised_sample_index_equals_the_walk(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_index, "_BLOCK", (1 << 22, 1, 3, 7)[seed % 4])
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 40, size=random.randint(1, 30)).astype(np.int32)
    lengths[:-1][random.rand(len(lengths) - 1) < 0.2] = 0  # empty sequences are legal in a file
    sequence_length, extra, drop_last = (
        int(random.randint(1, 50)),
        int(random.randint(2)),
        bool(random.randint(2)),
    )
    plan = plan_epochs(
        int(lengths.sum()), int(random.randint(1, 60)), sequence_length, extra, drop_last
    )
    sequences = range(len(lengths))
    indices = build_indices(
        lengths, sequences, plan, sequence_length=sequence_length, extra=extra, seed=seed
    )
    stream = lengths[indices.document_index].tolist()
    if drop_last or stream[-1] > 0:
        assert indices.sample_index.tolist() == walk(
            stream, plan.num_samples, sequence_length, extra
        )
    assert sorted(indices.shuffle_index.tolist()) == list(range(plan.num_samples))
    assert sorted(indices.document_index.tolist()) == sorted([*sequences] * plan.num_epochs)


def test_index_of_a_billion_tokens() -> None:
    lengths = np.full(1_000_000, 1000, np.int32)
    sequences = range(len(lengths))
    plan = plan_epochs(1_000_000_000, None, 2048, 1)
    indices = build_indices(lengths, sequences, plan, sequence_length=2048, extra=1, seed=1)
    position, offset = indices.sample_index[-1].tolist()
    assert position * 1000 + offset == plan.num_samples * 2048


@pytest.mark.slow
def test_index_of_a_trillion_tokens() -> None:
    """More than 2**31 positions of documents: arrays without memory stand for the stream."""
    lengths, num_documents = np.array([500], np.int32), 2**31 + 5
    stream = np.broadcast_to(np.int32(0), (num_documents,))
    num_samples, sequence_length = 1000, 1 << 30
    found = gpt_index.sample_starts(lengths, stream, num_samples, sequence_length, 1)
    assert found.dtype == np.int64 and num_documents * 500 > 10**12
    expected = np.arange(num_samples + 1) * sequence_length
    # the start of a document is read by the sample before, whose last label it is
    assert (found[1:, 0] == expected[1:] // 500).all() and (found[:, 1] == expected % 500).all()
    assert gpt_index.sample_starts(lengths, stream[:9], 8, 500, 1).dtype == np.int32


def test_a_shuffle_of_more_samples_than_32_bits_number() -> None:
    assert gpt_index.shuffle_dtype(2**32 - 3) == np.uint32
    assert gpt_index.shuffle_dtype(2**32 - 2) == np.int64


def test_tokens_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file of 12 GiB: sequences of the most tokens, the last with marks at both ends."""
    length, size = 2**31 - 1, 2
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(3 * length * size)
        for place in (2 * length, 3 * length - 2):
            file.seek(place * size)
            file.write(np.array([7, 8], "<u2").tobytes())
    (tmp_path / "x.idx").write_bytes(
        index_header(np.dtype("<u2"), 3, 4)
        + np.full(3, length, "<i4").tobytes()
        + (np.arange(3) * length * size).astype("<i8").tobytes()
        + np.arange(4, dtype="<i8").tobytes()
    )
    config = GPTDatasetConfig(sequence_length=1 << 20, split="1", cache_dir=str(tmp_path / "c"))
    data = GPTDataset(str(tmp_path / "x"), config)
    assert len(data) == (3 * length - 1) >> 20
    assert data.indexed.get(2, 0, 3).tolist() == [7, 8, 0]
    assert data.indexed.get(2, length - 2).tolist() == [7, 8]
    order = data.indices.document_index.tolist()
    row = (order.index(2) * length) >> 20  # the sample in which the marked sequence begins
    sample = data[data.indices.shuffle_index.tolist().index(row)]
    place = order.index(2) * length - (row << 20)
    assert sample["tokens"][place : place + 2].tolist() == [7, 8]


def test_samples_tile_the_stream(corp: str) -> None:
    data = GPTDataset(corp, GPTDatasetConfig(sequence_length=10, split="1"), "train")
    stream = np.concatenate([document(number) for number in data.indices.document_index])
    samples = {int(row): data[index] for index, row in enumerate(data.indices.shuffle_index)}
    tokens = np.concatenate([samples[row]["tokens"] for row in range(len(data))])
    labels = np.concatenate([samples[row]["labels"] for row in range(len(data))])
    assert tokens.tolist() == stream[: len(tokens)].tolist()
    assert labels.tolist() == stream[1 : len(labels) + 1].tolist()


def test_partial_validation_sample_is_padded_and_masked(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[5] * 14])
    config = GPTDatasetConfig(
        sequence_length=8, split="0,1", drop_last_partial_validation_sequence=False
    )
    data = GPTDataset(prefix, config, "valid")
    last = data[data.indices.shuffle_index.tolist().index(1)]
    assert last["tokens"].tolist() == [5] * 6 + [0] * 2
    assert last["labels"].tolist() == [5] * 5 + [0] * 3
    assert last["loss_mask"].tolist() == [1.0] * 5 + [0.0] * 3


def test_pad_that_is_also_eod_masks_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[7, 0, 7, 0, 7]])
    data = GPTDataset(
        prefix, GPTDatasetConfig(sequence_length=4, split="1", tokenizer=Tok(pad=0)), "train"
    )
    assert data[0]["loss_mask"].tolist() == [1.0] * 4


def test_pickle_carries_no_data(corp: str) -> None:
    data = GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20)
    payload = pickle.dumps(data)
    assert len(payload) < 2000
    assert pickle.loads(payload)[3]["tokens"].tolist() == data[3]["tokens"].tolist()


def test_cache_is_used_and_rebuilt_when_wrong(corp: str) -> None:
    data = GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20)
    expected = data.indices.shuffle_index.tolist()
    path = next(Path("corp/cache/GPTDataset_indices").glob("*-train-shuffle_index.npy"))
    np.save(path, np.arange(len(expected), dtype=np.uint32))
    assert GPTDataset(
        corp, GPTDatasetConfig(**BASE), "train", 20
    ).indices.shuffle_index.tolist() == list(range(len(expected)))
    path.write_bytes(path.read_bytes()[:40])
    assert (
        GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20).indices.shuffle_index.tolist()
        == expected
    )
    np.save(path, np.arange(3, dtype=np.uint32))
    assert (
        GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20).indices.shuffle_index.tolist()
        == expected
    )
    np.save(path, np.arange(len(expected), dtype=np.uint32))
    newer = path.stat().st_mtime + 5
    os.utime("corp.idx", (newer, newer))
    assert (
        GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20).indices.shuffle_index.tolist()
        == expected
    )


def build(prefix: str, cache: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    config = GPTDatasetConfig(**BASE, cache_dir=cache)
    results.put(
        hashlib.md5(
            b"".join(
                GPTDataset(prefix, config, "train", 500)[i]["tokens"].numpy() for i in range(50)
            )
        ).hexdigest()
    )


def test_many_processes_build_one_cache(corp: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=build, args=(corp, "cache", barrier, results)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    hashes = {results.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(hashes) == 1
    assert len(list(Path("cache").iterdir())) == 4  # and no temporary file


def test_interrupted_cache_write_leaves_nothing(corp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Any, array: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", interrupted)
        GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20)
    assert list(Path("corp/cache/GPTDataset_indices").iterdir()) == []


@pytest.mark.parametrize("bad", [97, -3])
def test_id_outside_the_vocabulary_names_file_and_place(bad: int, tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[1, 2, 3, 4], [5, 6, bad, 8, 9, 1]])
    data = GPTDataset(
        prefix, GPTDatasetConfig(sequence_length=9, split="1", vocab_size=97), "train"
    )
    with pytest.raises(
        DataError,
        match=rf"d\.bin: token 2 of sequence 1 is id {bad}, but the vocabulary has 97 ids",
    ):
        data[0]
    tokenizer = SimpleNamespace(vocab_size=96, eod=0, pad=-1, unique_identifiers={})
    with pytest.raises(DataError, match="the vocabulary has 96 ids"):
        GPTDataset(
            prefix, GPTDatasetConfig(sequence_length=9, split="1", tokenizer=tokenizer), "train"
        )[0]


def test_sample_that_does_not_exist(corp: str) -> None:
    data = GPTDataset(corp, GPTDatasetConfig(**BASE), "train", 20)
    for index in (len(data), -1):
        with pytest.raises(IndexError, match=f"sample {index} of {len(data)}"):
            data[index]


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a,b", "-1,2", "1;2"])
def test_bad_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="must be one to three weights"):
        GPTDatasetConfig(sequence_length=8, split=split)


def test_impossible_settings_are_refused(corp: str) -> None:
    with pytest.raises(ConfigError, match="sequence_length=0"):
        GPTDatasetConfig(sequence_length=0)
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        message = f"{name}=True needs the end-of-document id; set tokenizer_model, or {name} to"
        with pytest.raises(ConfigError, match=message):
            GPTDatasetConfig(sequence_length=8, **{name: True})
    with pytest.raises(
        DataError, match=r"the test part of split='999,999,1' gets 0 of 40 documents"
    ):
        GPTDataset(corp, GPTDatasetConfig(sequence_length=8, split="999,999,1"), "test")
    with pytest.raises(DataError, match=r"has 62 tokens, but a sample takes 1025"):
        GPTDataset(corp, GPTDatasetConfig(sequence_length=1024, split="90,8,2"), "test")
    Path("file").write_text("")
    with pytest.raises(DataError, match="the index cache cannot be written"):
        GPTDataset(corp, GPTDatasetConfig(**BASE, cache_dir="file/x"), "train")
