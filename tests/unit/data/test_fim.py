"""Fill-in-the-middle: megatron-core's samples token by token, in any order of reading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.pretraining.fim import FillInTheMiddle
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import PretrainDataModule

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "datasets_fim.json").read_text())
CASES, RECIPE = ORACLE["facts"]["cases"], ORACLE["facts"]["recipe"]
PIECES, SPECIAL, PHRASE = RECIPE["pieces"], RECIPE["special"], RECIPE["phrase"]


class Toy:
    """The oracle's tokenizer."""

    vocab_size, eod, pad, identity = 44, 42, 41, "toy"
    unique_identifiers: dict[str, object] = {"class": "Toy"}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            pair = text[at : at + 2]
            ids.append(PIECES.index(pair if pair in PIECES[28:] else text[at]))
            at += 2 if pair in PIECES[28:] else 1
        return ids

    def encode_batch(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        return "".join(PIECES[i] for i in ids if i < 38)

    def token_id(self, token: str) -> int | None:
        return 38 + SPECIAL.index(token) if token in SPECIAL else None


def document(d: int) -> list[int]:
    ids = [(131 * d + 17 * i) % 38 for i in range(5 + 37 * d % 43)]
    if d % 4 == 1:
        ids = [PIECES.index(PHRASE[(d + i) % len(PHRASE)]) for i in range(len(ids))]
    if d % 4 == 2:
        ids = [43 if i % 9 == 4 else token for i, token in enumerate(ids)]
    if d % 6 == 5:
        ids[:2] = [PIECES.index("n"), PIECES.index("o")]
    return [*([] if d % 11 == 10 else ids), 42]


def fim_of(case: dict[str, Any], **others: Any) -> FillInTheMiddle:
    tokens = {f"fim_{name}_token": token for name, token in case["extra_tokens"].items()}
    return FillInTheMiddle(**case["options"], **tokens, **others)


def dataset_of(case: dict[str, Any], folder: Path, fim: FillInTheMiddle | None) -> GPTDataset:
    first, count = case["documents"]
    with IndexedDatasetWriter(folder / "data", case["dtype"]) as writer:
        for d in range(first, first + count):
            writer.add_document(document(d))
    config = GPTDatasetConfig(
        sequence_length=case["sequence_length"],
        random_seed=case["seed"],
        split="100,0,0",
        tokenizer=Toy(),
        eod_mask_loss=case["eod_mask_loss"],
        fim=fim,
    )
    return GPTDataset(str(folder / "data"), config, "train", case["num_samples"])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_megatrons_tokens(number: int, tmp_path: Path) -> None:
    case = CASES[number]
    plain, fim = dataset_of(case, tmp_path, None), fim_of(case, tokenizer=Toy())
    assert len(plain) == case["len"]
    random = np.random.RandomState(case["seed"])
    for read in case["reads"]:
        found = plain._read(read["sample"], case["sequence_length"] + 1)
        assert found.tolist() == read["input"]
        assert fim(found, random).tolist() == read["output"]
    assert random.randint(2**31 - 1) == case["after"]


def test_items_and_their_masks(tmp_path: Path) -> None:
    """The first read of megatron-core's generator, as a sample of the data set."""
    case = CASES[0]
    data = dataset_of(case, tmp_path, fim_of(case))
    read = case["reads"][0]
    state = np.random.RandomState(case["seed"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "RandomState", lambda *_: state)
        item = data[read["sample"]]
    assert {name: value.tolist() for name, value in item.items()} == read["item"]


def test_a_sample_does_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    case = CASES[2]
    data = dataset_of(case, tmp_path, fim_of(case))
    forwards = [data[i]["tokens"].tolist() for i in range(len(data))]
    backwards = [data[i]["tokens"].tolist() for i in reversed(range(len(data)))]
    assert forwards == backwards[::-1]
    plain = dataset_of(case, tmp_path, None)
    assert any(plain[i]["tokens"].tolist() != forwards[i] for i in range(len(data)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fim_rate": 1.5}, r"fim_rate=1\.5 is no probability"),
        ({"fim_spm_rate": None}, "fim_spm_rate=None is no probability"),
        ({"fim_split_sample": "<file>"}, "parts of a document need both"),
        ({"fim_middle_token": "middle"}, "fim_middle_token='middle' is not one token"),
        ({"fim_split_sample": "th e", "fim_fragment_rate": 1.0}, "fim_split_sample='th e' is not"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    tokens = {f"fim_{name}_token": f"<{name}>" for name in ("prefix", "middle", "suffix", "pad")}
    with pytest.raises(ConfigError, match=message):
        FillInTheMiddle(**{"fim_rate": 1.0, **tokens, "tokenizer": Toy(), **options})


def test_ids_outside_the_model_are_refused(tmp_path: Path) -> None:
    case = CASES[0]
    fim = fim_of(case, tokenizer=Toy())
    for size in (44, None):
        GPTDatasetConfig(sequence_length=8, vocab_size=size, tokenizer=Toy(), fim=fim)
    with pytest.raises(ConfigError, match="a token of fim has id 42, and vocab_size=42"):
        GPTDatasetConfig(sequence_length=8, vocab_size=42, tokenizer=Toy(), fim=fim)
    with pytest.raises(ConfigError, match="the tokens of mock=True are random"):
        PretrainDataModule(None, 8, 1, mock=True, fim=fim)


def test_the_last_position_without_an_extra_token_has_no_loss(tmp_path: Path) -> None:
    data = dataset_of(CASES[0], tmp_path, fim_of(CASES[0], tokenizer=Toy()))
    options = replace(data.config, add_extra_token_to_sequence=False)
    short = GPTDataset(str(tmp_path / "data"), options, "train", CASES[0]["num_samples"])
    assert all(short[i]["loss_mask"][-1] == 0 for i in range(len(short)))


def test_without_a_tokenizer_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        FillInTheMiddle(fim_rate=0.5)([1, 2], np.random.RandomState(0))
