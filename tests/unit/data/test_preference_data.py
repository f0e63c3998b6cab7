"""Pairs of answers: schemas, labels, lengths and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", "5")

from megatron_lightning.data.chat.conversations import Chat, Text
from megatron_lightning.data.rows.preference_rows import SIDES, parse_pair
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import CheckpointError, ConfigError, DataError
from megatron_lightning.modules import PreferenceDataModule
from megatron_lightning.modules.model_facts import ModelFacts
from tests.helpers.chats import make_tokenizer, turn, write_rows

USER = [turn("user", "what is the sky")]
BLUE, RED = [turn("assistant", "blue")], [turn("assistant", "red")]
TEXT = {"prompt": "the sky is", "chosen": " blue", "rejected": " red or green"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": USER, "chosen": BLUE, "rejected": RED},
        {"chosen": USER + BLUE, "rejected": USER + RED},
        {"prompt": USER, "chosen": USER + BLUE, "rejected": USER + RED},
        {"prompt": "what is the sky", "chosen": USER + BLUE, "rejected": USER + RED},
        {"prompt": USER, "chosen": "blue", "rejected": "red", "score_chosen": 3.0},
        # A text beside whole conversations, with other white space.
        {"prompt": " what is the sky\n", "chosen": USER + BLUE, "rejected": USER + RED},
        {"prompt": "", "chosen": USER + BLUE, "rejected": USER + RED},
        # LLaMA-Factory: an answer is an object, or the output of an instruction.
        {"messages": USER, "chosen": BLUE[0], "rejected": RED[0]},
        {
            "conversations": [{"from": "human", "value": "what is the sky"}],
            "chosen": {"from": "gpt", "value": "blue"},
            "rejected": {"from": "gpt", "value": "red"},
        },
        {"instruction": "what is the sky", "input": "", "chosen": "blue", "rejected": "red"},
        # HH-RLHF: a dialog in one text.
        {
            "chosen": "\n\nHuman: what is the sky\n\nAssistant: blue",
            "rejected": "\n\nHuman: what is the sky \n\nAssistant: red\n",
        },
    ],
)
def test_forms_of_conversations_are_one(fields: dict[str, Any]) -> None:
    chosen, rejected = parse_pair(Row("here", fields))
    assert isinstance(chosen, Chat)
    assert isinstance(rejected, Chat)
    assert (list(chosen.messages), chosen.trained) == (USER + BLUE, {1})
    assert (list(rejected.messages), rejected.trained) == (USER + RED, {1})


SYSTEM = [turn("system", "user")]
LONG = [turn("user", "the color"), turn("assistant", "of what"), *USER]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "what is the sky", "chosen": SYSTEM + USER + BLUE,
          "rejected": SYSTEM + USER + RED}, SYSTEM + USER),
        ({"prompt": SYSTEM + USER, "chosen": USER + BLUE, "rejected": RED}, SYSTEM + USER),
        ({"prompt": USER, "chosen": "blue", "rejected": "red", "system": "user"}, SYSTEM + USER),
        ({"prompt": LONG, "chosen": LONG + BLUE, "rejected": "red"}, LONG),
        ({"instruction": "what is the sky", "history": [["the color", "of what"]],
          "chosen": "blue", "rejected": "red"}, LONG),
        ({"chosen": "\n\nHuman: the color\n\nAssistant: of what\n\nHuman: what is the sky"
                    "\n\nAssistant: blue",
          "rejected": "\n\nHuman: the color\n\nAssistant: of what\n\nHuman: what is the sky"
                      "\n\nAssistant: red"}, LONG),
    ],
)  # fmt: skip
def test_a_prompt_is_asked_once(fields: dict[str, Any], prompt: list[Any]) -> None:
    for chat, answer in zip(parse_pair(Row("here", fields)), (BLUE, RED), strict=True):
        assert isinstance(chat, Chat)
        assert (list(chat.messages), chat.trained) == (prompt + answer, {len(prompt)})


def test_texts_are_joined_as_they_are() -> None:
    assert parse_pair(Row("here", TEXT)) == (
        Text("here", "the sky is", " blue"),
        Text("here", "the sky is", " red or green"),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "UnpairedDataModule"),
        ({"prompt": "a", "chosen": "b"}, "expected prompt, chosen and rejected"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt"),
        ({"chosen": BLUE, "rejected": RED}, "begin with different messages"),
        ({"prompt": BLUE, "chosen": USER, "rejected": USER}, "no answer of the assistant"),
        (
            {"prompt": "what", "chosen": USER + BLUE, "rejected": USER + RED},
            "chosen begins with a message of the role 'user', .* Leave prompt out",
        ),
        (
            {"prompt": USER, "chosen": SYSTEM + BLUE, "rejected": RED},
            "chosen begins with a message of the role 'system'",
        ),
        (
            {"prompt": "what is the sky", "chosen": SYSTEM + USER + BLUE, "rejected": USER + RED},
            "behind different prompts",
        ),
        (
            {
                "prompt": SYSTEM + USER,
                "chosen": [turn("system", "b"), *USER, *BLUE],
                "rejected": RED,
            },
            "prompt and chosen have different system messages",
        ),
        ({"chosen": SYSTEM + USER + BLUE, "rejected": SYSTEM + LONG[:1] + RED}, "begin with diff"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is a int"),
    ],
)
def test_rows_that_are_no_preferences_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"here: .*{message}"):
        parse_pair(Row("here", fields))


def _data(path: Path, rows: list[Any], **options: Any) -> PreferenceDataModule:
    source = write_rows(path / "rows.jsonl", rows)
    options = {"sequence_length": 32, "batch_size": 2, "cache_dir": str(path / "c"), **options}
    data = PreferenceDataModule(source, tokenizer=make_tokenizer(), **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_only_answers_are_trained_up_to_their_end(tmp_path: Path) -> None:
    chat = {"prompt": USER, "chosen": BLUE, "rejected": RED}
    data = _data(tmp_path, [TEXT, chat])
    decode = data.tokenizer.decode
    found = {}
    for number in range(2):
        sample = data.train_dataset()[number]
        assert sample["pair"] == number
        for side in ("chosen", "rejected"):
            tokens, labels = sample[side], sample[f"{side}_labels"]
            kept = labels != -100
            assert (tokens[1:][kept[:-1]] == labels[:-1][kept[:-1]]).all()
            found[number, side] = decode(labels[kept].tolist())
    assert found == {
        (0, "chosen"): " blue<|im_end|>",
        (0, "rejected"): " red or green<|im_end|>",
        (1, "chosen"): "blue<|im_end|>\n",
        (1, "rejected"): "red<|im_end|>\n",
    }


def test_a_pair_with_an_answer_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    long = {**TEXT, "rejected": " why" * 60}
    data = _data(tmp_path, [long, TEXT, TEXT])
    assert len(data.train_dataset()) == 2  # type: ignore[arg-type]
    assert "left out with the other answer: 1" in data.describe()
    counts = data._documents(data.paths[0]).report
    assert counts["documents"] == 4
    assert counts["pairs"] == 2


def test_scores_belong_to_their_documents(tmp_path: Path) -> None:
    rows = [{**TEXT, "chosen": f" blue {number}"} for number in range(5)]
    scores = str(tmp_path / "scores.npz")
    data = _data(tmp_path, rows, scores=scores, val_fraction=0.4)
    with pytest.raises(ConfigError, match="1 of 5 pairs have no scores"):
        data.write_scores({number: [0.0, 0.0] for number in range(4)})
    data.write_scores({number: [-number, -2.0 * number] for number in range(5)})
    data._reads_scores = True
    numbers = []
    for part in data._parts():
        for number, pair in enumerate(part):  # type: ignore[call-overload]
            assert pair.scores.tolist() == [-number, -2.0 * number]
            numbers.append(pair.number)
    assert numbers == list(range(5))
    (tmp_path / "other").mkdir()
    other = _data(tmp_path / "other", rows[:4], scores=scores)
    other._reads_scores = True
    with pytest.raises(CheckpointError, match="belong to 5 pairs of other documents than the 4"):
        other._parts()
    whole = Path(scores).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"scores.npy", b"others.npy")):
        Path(scores).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            data._parts()
    np.save(scores.replace(".npz", ".npy"), np.zeros((5, 2)))
    Path(scores.replace(".npz", ".npy")).rename(scores)
    with pytest.raises(CheckpointError, match="cannot be read"):
        data._parts()
    Path(scores).unlink()
    with pytest.raises(CheckpointError, match="megatron-lightning predict"):
        data._parts()


def test_margins_stay_with_their_pairs_beside_broken_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable line and a row without an answer, which is asked for no margin."""
    rows = [json.dumps(row) for row in ({**TEXT, "margin": 1}, {"prompt": "a"})]
    rows.insert(1, "{broken")
    rows.append(json.dumps({**TEXT, "margin": 2}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows))
    data = PreferenceDataModule(
        str(path), tokenizer=make_tokenizer(), sequence_length=32, batch_size=2,
        cache_dir=str(tmp_path / "c"), bad_rows="skip",
    )  # fmt: skip
    monkeypatch.setattr(data, "_model", lambda: ModelFacts(reads_margins=True))
    data.prepare_data()
    data.setup("fit")
    dataset = data.train_dataset()
    assert [float(dataset[(number,)]["margin"]) for number in (0, 1)] == [1.0, 2.0]


def test_batches_hold_pairs(tmp_path: Path) -> None:
    data = _data(tmp_path, [TEXT] * 5, val_fraction=0.2)
    batch = next(iter(data.train_dataloader()))
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    sides = {f"{side}{name}" for side in SIDES for name in ("", "_labels", "_padding")}
    assert shapes == {**dict.fromkeys(sides, (2, 32)), "pair": (2,)}
    assert np.unique([int(row["pair"]) for row in data.predict_dataloader().dataset]).size == 5  # type: ignore[attr-defined]
