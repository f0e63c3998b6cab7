"""Blends of ``.bin`` files: Megatron's order, sizes and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data import GPTDataset, GPTDatasetConfig, IndexedDatasetWriter
from megatron_lightning.data.pretraining.blended import (
    BlendedDataset,
    BlendSpec,
    DataSpec,
    NamedDatasets,
)
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import PretrainDataModule

FACTS = json.loads((Path(__file__).parents[2] / "oracles" / "datasets_blended.json").read_text())[
    "facts"
]
PARTS = {"train": "train", "valid": "valid", "test": "test"}


def _document(d: int) -> list[int]:
    n = 3 + 7919 * d % 61
    return [1 + (131 * d + 17 * i) % 96 for i in range(n - 1)] + [0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpora of the oracle."""
    path = tmp_path_factory.mktemp("corpora")
    for name, (first, count) in FACTS["corpora"].items():
        with IndexedDatasetWriter(str(path / name), np.dtype(np.int32)) as writer:
            for d in range(first, first + count):
                tokens = np.array(_document(d))
                writer.add_documents(
                    tokens, np.array([len(tokens)], np.int32), np.ones(1, np.int64)
                )
            writer.finish()
    return path


class Corpus:
    """Tokenizer of the oracle: end of document 0, no padding."""

    vocab_size, eod, pad = 97, 0, -1
    unique_identifiers: dict[str, object] = {}  # noqa: RUF012


def _make(folder: Path, part: Any, split: str) -> Any:
    config = GPTDatasetConfig(
        sequence_length=16, split=split, tokenizer=Corpus(), cache_dir=str(folder / "cache"),  # type: ignore[arg-type]
    )  # fmt: skip
    return lambda prefix, count: GPTDataset(prefix, config, part, count)


def _check(made: Any, expected: dict[str, Any]) -> None:
    assert len(made) == expected["len"]
    if "dataset_index" in expected:
        assert [len(child) for child in made.children] == expected["child_len"]
        assert made.blend.index.tolist() == expected["dataset_index"]
        numbers = [made.blend[i][1] for i in range(len(made))]
        assert numbers == expected["dataset_sample_index"]
        assert [int(made[i]["dataset_id"]) for i in range(5 if len(made) > 4 else len(made))] == (
            expected["dataset_index"][:5]
        )
    first = expected.get("first_tokens") or [one["tokens"] for one in expected["samples"]]
    for number, tokens in enumerate(first):
        assert made[number]["tokens"][: len(tokens)].tolist() == tokens


@pytest.mark.parametrize("number", range(len(FACTS["blended"])))
@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_the_oracle(folder: Path, number: int, part: str) -> None:
    fact = FACTS["blended"][number]
    expected, config = fact["splits"][part], fact["config"]
    size = fact["num_samples"][list(PARTS).index(part)]
    if "blend" in config:
        given, split = config["blend"], "70,20,10"
    else:
        given = config["blend_per_split"][list(PARTS).index(part)]
        split = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}[part]
    if given is None or expected is None:
        return
    prefixes, weights = given
    spec = BlendSpec(tuple(str(folder / prefix) for prefix in prefixes), weights and tuple(weights))
    make = _make(folder, part, split)
    if spec.is_single:
        _check(make(spec.prefixes[0], size), expected)
    else:
        _check(BlendedDataset(spec, size, make, part), expected)


def test_a_data_set_of_which_the_blend_takes_more_is_built_again(folder: Path) -> None:
    """Where Megatron stops with an IndexError: many small weights and a small size."""
    asked: list[int | None] = []

    class Child:
        def __init__(self, prefix: str, count: int | None) -> None:
            asked.append(count)
            self.count = count or 0

        def __len__(self) -> int:
            return self.count

    weights = (0.5, *[0.5 / 499] * 499)
    spec = BlendSpec(tuple(f"p{i}" for i in range(500)), weights)
    made = BlendedDataset(spec, 1000, Child)  # type: ignore[arg-type]
    assert len(made) == 1499
    assert asked[:3] == [504, 749, 3]  # half a percent more than the share, and what is taken
    counts = np.bincount(made.blend.index, minlength=500)
    assert all(len(child) >= count for child, count in zip(made.children, counts, strict=True))


def test_forms_of_a_blend(tmp_path: Path) -> None:
    pairs = BlendSpec(("a", "b"), (0.3, 0.7))
    assert BlendSpec.parse([[0.3, "a"], [0.7, "b"]]) == pairs
    assert BlendSpec.parse(["0.3", "a", "0.7", "b"]) == pairs
    assert BlendSpec.parse(["a", "b"]) == BlendSpec(("a", "b"))
    assert BlendSpec.parse([[1, "a"]]).weights == (1.0,)
    spec = DataSpec.parse({"train": [[0.3, "a"], [0.7, "b"]], "validation": {"x": "c", "y": "d"}})
    assert spec.names == ("x", "y")
    assert not spec.is_split and spec.test is None
    for name, text in (
        ("blend.json", json.dumps({"train": "0.3 a 0.7 b", "valid": ["c"], "test": None})),
        ("blend.yaml", "train: [[0.3, a], [0.7, b]]\nvalid: [c]\n"),
    ):
        (tmp_path / name).write_text(text)
        read = DataSpec.parse(str(tmp_path / name))
        assert read.train == pairs
        assert read.validation == {"": BlendSpec(("c",))}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be a prefix, a list of prefixes"),
        (["a", "b", "a"], "names a twice"),
        (["data/a", "data/./a"], "names data/./a, data/a twice"),
        (["/data/a", "file:///data/a"], "names /data/a, file:///data/a twice"),
        (["memory://x/a", "memory:///x/a"], "names memory:///x/a, memory://x/a twice"),
        (["a", "0.3", "b", "0.7"], "has numbers among prefixes"),
        ([[0.5, "a"], "b"], "the entry 'b' among pairs"),
        ([[0.0, "a"], [1.0, "b"]], "each must be a number above 0"),
        (["0.3", "a", "0.7"], "a flat list has a weight before every prefix"),
        ({"train": "a", "dev": "b"}, r"data_prefix has the keys \['dev', 'train'\]"),
        ({"train": "a", "validation": {"x/y": "b"}}, "has the name 'x/y'"),
    ],
)
def test_blends_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSpec.parse(given)


def test_sizes_that_cannot_be(folder: Path) -> None:
    both = [str(folder / "corp"), str(folder / "corpB")]
    options: dict[str, Any] = {"sequence_length": 16, "batch_size": 2, "split": "1"}
    cache = str(folder / "cache")
    data = PretrainDataModule(both, **options, num_train_samples=5000, cache_dir=cache)
    with pytest.raises(ConfigError, match="have 135 samples in one epoch: data without weights"):
        data.setup("fit")
    pairs = [(0.5, both[0]), (0.5, both[1])]
    with pytest.raises(ConfigError, match="num_train_samples is not set"):
        PretrainDataModule(pairs, **options, cache_dir=cache).setup("fit")
    with pytest.raises(ConfigError, match="leave split out"):
        PretrainDataModule({"train": both[0]}, **options)
    with pytest.raises(DataError, match="the valid part of split='0,1,0' has"):
        few = {"train": both[0], "validation": both[1]}
        module = PretrainDataModule(few, 4000, 1, cache_dir=cache)
        module.check_files("validate")


def test_named_validation_sets_are_mixed(folder: Path) -> None:
    data = PretrainDataModule(
        {
            "train": [[1.0, str(folder / "corp")]],
            "validation": {"b": str(folder / "corpB"), "c": [str(folder / "corpC")]},
        },
        16, 4, num_train_samples=20, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    data.setup("fit")
    assert data.validation_names == ("b", "c")
    rows = list(data.val_dataloader())
    assert all((batch["dataset_id"] == 0).all() for batch in rows)
    sets = torch.cat([batch["validation_set"] for batch in rows])
    inside = data._datasets["valid"]
    assert isinstance(inside, NamedDatasets)
    assert torch.bincount(sets).tolist() == [len(one) for one in inside.datasets]
    assert set(sets[:4].tolist()) == {0, 1}
    assert "dataset_id" in next(iter(data.train_dataloader()))


def test_named_validation_sets_may_be_blends(folder: Path) -> None:
    """A batch mixes samples of a blend and of a single data set."""
    pairs = [[0.5, str(folder / "corp")], [0.5, str(folder / "corpB")]]
    data = PretrainDataModule(
        {"train": str(folder / "corp"), "validation": {"b": pairs, "c": str(folder / "corpC")}},
        16, 4, num_val_samples=20, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    data.setup("fit")
    rows: Any = list(data.val_dataloader())
    ids = torch.cat([batch["dataset_id"] for batch in rows])
    sets = torch.cat([batch["validation_set"] for batch in rows])
    assert torch.bincount(ids[sets == 0]).tolist() == [10, 10]
    assert not ids[sets == 1].any()
