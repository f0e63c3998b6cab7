"""Chat templates of public models, as trl ships them: what is trained, or a refusal.

trl has for many of them a second form that marks answers. Where both render alike, every character
that the marks have is trained without them, too. The marks may have some of the header more.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data.chat import ASSISTANT, Chat
from megatron_lightning.data.chat_template import ChatOptions, ChatTemplate, Rendered
from megatron_lightning.errors import DataError
from tests.helpers.chats import turn

trl = pytest.importorskip("trl")
pytest.importorskip("transformers")

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
ONE = [turn("user", "What is it?"), turn("assistant", "It is blue.")]
TWO = [*ONE, turn("user", "And that?"), turn("assistant", "That is green.")]
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


def _chat(messages: list[dict[str, Any]]) -> Chat:
    trained = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    return Chat("row", messages, None, frozenset(trained))


def _samples(name: str, messages: list[dict[str, Any]], **options: Any) -> list[Rendered]:
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS)
    return list(template.samples(_chat(messages), ChatOptions(**options)))


def _characters(sample: Rendered) -> set[int]:
    return {at for begin, end in sample.spans for at in range(begin, end)}


def _outcome(name: str, messages: list[dict[str, Any]]) -> str:
    """Return equal, more (the marks have more), alone (nothing to compare) or refused."""
    try:
        (sample,) = _samples(name, messages)
    except DataError:
        return "refused"
    answers = [message["content"] for message in messages if message["role"] == ASSISTANT]
    text = "".join(sample.text[begin:end] for begin, end in sample.spans)
    assert all(answer in text for answer in answers), name
    assert not any(message["content"] in text for message in messages if message["role"] == "user")
    if not (FOLDER / f"{name}_training.jinja").exists():
        return "alone"
    (marked,) = _samples(f"{name}_training", messages)
    if marked.text != sample.text:
        return "alone"
    more = _characters(sample) - _characters(marked)
    assert all(sample.text[at].isspace() for at in more), name  # behind the end of a turn
    return "equal" if _characters(sample) == _characters(marked) else "more"


@pytest.mark.parametrize(("messages", "fewest"), [(ONE, 25), (TWO, 20)])
def test_marks_and_prefixes_agree(messages: list[dict[str, Any]], fewest: int) -> None:
    found = Counter(_outcome(name, messages) for name in NAMES)
    assert found["equal"] >= 10, found
    assert sum(found.values()) - found["refused"] >= fewest, found
    assert found["refused"], found


def test_every_turn_alone_works() -> None:
    for name in NAMES:
        samples = _samples(name, TWO, split_turns=True)
        assert len(samples) == 2, name
        for sample, answer in zip(samples, ("It is blue.", "That is green."), strict=True):
            text = "".join(sample.text[begin:end] for begin, end in sample.spans)
            assert answer in text and "What is it?" not in text, name


def test_a_template_that_drops_reasoning_is_refused_by_message() -> None:
    with pytest.raises(DataError, match=r"row: message 1 .*; set split_turns=True"):
        _samples("qwen3", TWO)
