"""Masked datasets: sample indices and samples equal megatron-core's, token by token."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.masked import masked_index
from megatron_lightning.data.masked.mask_vocabulary import MaskVocabulary
from megatron_lightning.data.masked.masked_index import SentenceRules, sample_rows
from megatron_lightning.data.masked.masked_samples import (
    BertDataset,
    BertDatasetConfig,
    MaskedDataset,
    T5Dataset,
    T5DatasetConfig,
)
from megatron_lightning.data.masked.mersenne import mt19937, mt19937_64
from megatron_lightning.errors import ConfigError, DataError

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "masked_datasets.json").read_text())
FACTS = ORACLE["facts"]
KINDS: dict[str, Any] = {
    "bert": (BertDataset, BertDatasetConfig),
    "t5": (T5Dataset, T5DatasetConfig),
}
CASES = [(kind, number) for kind in KINDS for number in range(len(FACTS[kind]))]
TOKENIZER = SimpleNamespace(
    pad=0, cls=1, sep=2, mask=3, bos=4, eos=5, vocab_size=120,
    inv_vocab={i: f"##w{i}" if i >= 10 and i % 3 == 0 else f"w{i}" for i in range(120)},
    additional_special_tokens_ids=list(range(100, 120)),
)  # fmt: skip


def sentence(document: int, number: int) -> list[int]:
    """A sentence of the oracle's corpus."""
    length = 3 + (document * 7919 + number * 31) % 17
    return [10 + (document * 131 + number * 37 + i * 17) % 90 for i in range(length)]


def write(prefix: Path, documents: list[list[list[int]]]) -> str:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for sentences in documents:
            writer.add_document([*chain(*sentences)], [len(one) for one in sentences])
    return str(prefix)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    documents = [[sentence(d, j) for j in range(1 + (d * 5) % 6)] for d in range(30)]
    return write(tmp_path_factory.mktemp("masked") / "corpus", documents)


def config_of(kind: str, **options: Any) -> Any:
    sizes = {"sequence_length": 32, "split": "90,8,2", "tokenizer": TOKENIZER}
    if kind == "t5":
        sizes["sequence_length_decoder"] = 24
    return KINDS[kind][1](**sizes | options)


def dataset_of(
    kind: str, corpus: str, split: Any = "train", size: Any = None, **options: Any
) -> Any:
    return KINDS[kind][0](corpus, config_of(kind, **options), split, size)


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_samples_are_those_of_megatron(kind: str, number: int, corpus: str) -> None:
    case = FACTS[kind][number]
    for split, size in zip(("train", "valid", "test"), case["num_samples"], strict=True):
        dataset = dataset_of(kind, corpus, split, size, **case["config"])
        expected = case[split]
        assert len(dataset) == expected["len"]
        assert dataset.sample_index.tolist() == expected["sample_index"]
        for index, sample in expected.get("samples", {}).items():
            found = {name: value.tolist() for name, value in dataset[int(index)].items()}
            assert found == sample
            assert all(value.dtype == torch.int64 for value in dataset[int(index)].values())


def test_numbers_are_those_of_cpp() -> None:
    # of libstdc++: the 10,000th number by the standard, with the default seed
    for numbers, expected in ((mt19937(5489), 4123659995), (mt19937_64(5489), 9981545732273789042)):
        flat = chain.from_iterable(block.tolist() for block in numbers)
        assert next(islice(flat, 9999, None)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_one_epoch(kind: str, corpus: str) -> None:
    dataset = (
        dataset_of(kind, corpus, classification_head=False)
        if kind == "bert"
        else (dataset_of(kind, corpus))
    )
    rows = dataset.sample_index[np.argsort(dataset.sample_index[:, 0])]
    boundaries = dataset.indexed.document_indices[:28]
    assert rows[0, 0] == 0 and rows[-1, 1] == boundaries[-1]
    assert (rows[1:, 0] == rows[:-1, 1]).all()  # every sentence once
    samples = [dataset[index] for index in range(len(dataset))]
    assert all(sample["loss_mask"].sum() >= 1 for sample in samples)
    counts = {(name, value.shape) for sample in samples for name, value in sample.items()}
    assert len(counts) == len(samples[0])


def test_blocks_of_documents_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(3)
    boundaries = np.cumsum([0, *random.randint(0, 9, 200)])
    lengths = random.choice([1, 5, 30, 600], size=boundaries[-1], p=[0.3, 0.4, 0.28, 0.02])
    arguments = boundaries, lengths.astype(np.int32), SentenceRules(40, 0.3, 2), 2000, 5
    expected = sample_rows(*arguments)
    monkeypatch.setattr(masked_index, "_DOCUMENTS", 7)
    assert np.array_equal(sample_rows(*arguments), expected)


def test_a_second_process_reads_the_cached_index(corpus: str, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path)}
    dataset = dataset_of("bert", corpus, size=20, **options)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(times) == 2  # index and description
    again = pickle.loads(pickle.dumps(dataset))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    assert torch.equal(again[7]["text"], dataset[7]["text"])
    dataset_of("bert", corpus, size=20, masking_probability=0.3, **options)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_permutation_follows_from_the_sample(corpus: str) -> None:
    dataset = dataset_of("bert", corpus, masking_do_permutation=True)
    plain = dataset_of("bert", corpus)
    np.random.seed(1)  # Megatron draws from this state
    first = dataset[3]
    np.random.seed(2)
    second = dataset[3]
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Further positions are predicted, and hold each other's tokens.
    extra = (first["loss_mask"] - plain[3]["loss_mask"]).bool()
    assert extra.sum() > 1 and sorted(first["text"][extra]) == sorted(first["labels"][extra])


def test_spans_end_with_the_sentinels_and_the_room_of_the_decoder(corpus: str) -> None:
    few = SimpleNamespace(**{**vars(TOKENIZER), "additional_special_tokens_ids": [100, 101]})
    options = {"masking_probability": 0.4, "masking_max_ngram": 1}
    usual = dataset_of("t5", corpus, **options)
    limits: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": few}, "2 sentinels of the tokenizer SimpleNamespace"),
        ({"sequence_length_decoder": 5}, "the sequence_length_decoder=5; set"),
    ]
    for changed, message in limits:
        dataset = dataset_of("t5", corpus, **options, **changed)
        with pytest.warns(UserWarning, match=message):
            numbers = [int((dataset[i]["text_enc"] >= 100).sum()) for i in range(len(dataset))]
        assert max(numbers) == 2 < max(int((usual[i]["text_enc"] >= 100).sum()) for i in range(9))


def test_words_by_the_marks_of_a_vocabulary() -> None:
    tokenizer = SimpleNamespace(
        vocab_size=8,
        pieces=lambda: ["<pad>", "</s>", "▁new", "er", "▁old", ",", "<extra_id_1>", "<extra_id_0>"],
    )
    vocabulary = MaskVocabulary.of(tokenizer)
    assert vocabulary.continues.nonzero()[0].tolist() == [3, 5]
    assert (vocabulary.pad, vocabulary.bos, vocabulary.eos) == (0, 0, 1)
    assert vocabulary.sentinels == (7, 6)
    with pytest.raises(ConfigError, match="no token for cls, mask, and BertDataset needs it"):
        BertDatasetConfig(sequence_length=32, tokenizer=tokenizer)
    tokenizer.unique_identifiers = {"class": "Some", "tokenizer_path": "folder/of.model"}
    with pytest.raises(
        ConfigError, match=r"folder/of\.model has .* with \[CLS\] .*, and \[MASK\] or <mask>\."
    ):
        BertDatasetConfig(sequence_length=32, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 4}, "needs 2 more at least; set it to 5"),
        ({"masking_probability": 1.0}, "between 0 and 1"),
        ({"short_sequence_probability": 2.0}, "must be a probability"),
        ({"masking_max_ngram": 0}, "positive integer"),
        ({"random_seed": 2**31}, "below 2\\*\\*31 - 1"),
        ({"tokenizer": SimpleNamespace(vocab_size=9)}, "does not say the texts of its ids"),
        (
            {"masking_use_geometric_distribution": True, "masking_do_permutation": True},
            "masking_do_permutation has other lengths",
        ),
        ({"split": "1,2,3,4"}, "one to three weights"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("bert", **options)


def test_wrong_data_are_refused(corpus: str, tmp_path: Path) -> None:
    single = write(tmp_path / "single", [[sentence(d, 0)] for d in range(9)])
    with pytest.raises(DataError, match="--split-sentences"):
        dataset_of("bert", single)
    assert isinstance(dataset_of("bert", single, classification_head=False), MaskedDataset)
    longs = write(tmp_path / "long", [[[7] * 600, [8]] for _ in range(9)])
    with pytest.raises(DataError, match="without one above 512 tokens"):
        dataset_of("t5", longs)
    with pytest.raises(ConfigError, match="the test part has no weight"):
        BertDataset(corpus, config_of("bert", split="1,1,0"), "test")
    with pytest.raises(IndexError):
        dataset_of("bert", corpus)[999]
    outside = dataset_of("bert", corpus, vocab_size=50)
    with pytest.raises(DataError, match="the vocabulary has 50 ids"):
        [outside[index] for index in range(len(outside))]
    assert replace(config_of("t5"), random_seed=1).rules.max_length == 30
