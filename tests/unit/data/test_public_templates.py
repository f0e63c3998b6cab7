"""Chat templates of public models, as trl ships them: what is trained, or a refusal.

trl has for many of them a second form that marks answers. Where both render alike, every character
that the marks have is trained without them, too. The marks may have some of the header more.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_view import Rendered
from megatron_lightning.data.chat.conversations import Chat
from megatron_lightning.data.chat.marked_templates import marks_of
from megatron_lightning.data.chat.row_values import ASSISTANT
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


@pytest.mark.parametrize("messages", [ONE, TWO])
def test_marks_and_prefixes_agree(messages: list[dict[str, Any]]) -> None:
    found = Counter(_outcome(name, messages) for name in NAMES)
    assert found["equal"] >= 20, found
    assert not found["refused"], found


def test_every_turn_alone_works() -> None:
    for name in NAMES:
        samples = _samples(name, TWO, split_turns=True)
        assert len(samples) == 2, name
        for sample, answer in zip(samples, ("It is blue.", "That is green."), strict=True):
            text = "".join(sample.text[begin:end] for begin, end in sample.spans)
            assert answer in text and "What is it?" not in text, name


def test_a_template_that_drops_reasoning_is_refused_by_message() -> None:
    with pytest.raises(DataError, match=r"message 1, .*; set split_turns=True"):
        _samples("gptoss", [*THOUGHT, *ONE])
    with pytest.raises(DataError, match=r"write thinking of message 1, .*; set reasoning=inline"):
        _samples("llama3", [ONE[0], {**ONE[1], "thinking": "Skies are."}])


THOUGHT = [ONE[0], {**ONE[1], "reasoning_content": "Skies are."}]
KNOWN = [name for name in NAMES if marks_of((FOLDER / f"{name}.jinja").read_text())]


def test_the_table_has_the_templates() -> None:
    table = {
        "deepseek_r1_distill", "deepseekv3", "glm4moe", "gptoss", "nemotron_3_5_lightning",
        "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink",
        "qwen3_5_think", "qwen3_6",
    }  # fmt: skip
    assert set(KNOWN) == table & set(NAMES)


@pytest.mark.parametrize("name", KNOWN)
def test_marks_of_the_table_against_the_original(name: str) -> None:
    """Spans of several turns are those of the original's last answers, and the text is its own."""
    original = (FOLDER / f"{name}.jinja").read_text()
    marks = marks_of(original)
    assert marks is not None
    marked = ChatTemplate(marks.applied(original), TOKENS)
    for messages in (ONE, TWO, [turn("system", "Be brief."), *TWO], THOUGHT, CALLS):
        chat = _chat(messages)
        for stop in range(1 + (messages[0]["role"] == "system"), len(messages) + 1):
            text, spans = marked.render(chat, messages[:stop])
            if marks.keeps_text:
                assert text.startswith(_original(original, chat, messages[:stop]))
        # Each answer as the original writes it as the last one.
        for (begin, end), answer in zip(spans, sorted(chat.trained), strict=True):
            alone = _original(original, chat, messages[: answer + 1])
            pieces = (text[begin:end], text[begin:end].removesuffix("<|user|>"))
            keeps_end = any(alone.endswith(piece) for piece in pieces)
            without = alone.removesuffix("<|return|>").removesuffix("<|end|>")
            is_thought = "reasoning_content" in messages[answer] and name.startswith("deepseek")
            assert keeps_end or without.endswith(pieces[0]) or is_thought, (name, pieces, alone)


CALLS = [
    turn("user", "What is it?"),
    turn("assistant", "", tool_calls=[
        {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    ]),
    {"role": "tool", "name": "look", "content": "blue"},
    turn("assistant", "It is blue."),
]  # fmt: skip


def _original(template: str, chat: Chat, messages: list[dict[str, Any]]) -> str:
    plain = ChatTemplate(template + "{# as it is #}", TOKENS)  # out of the table
    return plain.render(chat, messages)[0]


@pytest.mark.parametrize("name", KNOWN)
def test_several_turns_need_no_split(name: str) -> None:
    (sample,) = _samples(name, TWO)
    text = "".join(sample.text[begin:end] for begin, end in sample.spans)
    assert "It is blue." in text and "That is green." in text
    assert "What is it?" not in text


@pytest.mark.parametrize("name", [name for name in KNOWN if name[:4] in ("deep", "qwen")])
def test_reasoning_of_every_turn_is_kept(name: str) -> None:
    (sample,) = _samples(name, [*THOUGHT, *THOUGHT])
    text = "".join(sample.text[begin:end] for begin, end in sample.spans)
    assert text.count("<think>\nSkies are.\n</think>\n\nIt is blue.") == 2


@pytest.mark.parametrize("name", [name for name in KNOWN if name[:4] == "deep"])
def test_reasoning_in_the_content_is_refused_where_it_is_cut(name: str) -> None:
    with pytest.raises(DataError, match=r"reasoning in the content of message 1.*reasoning=keep"):
        _samples(name, THOUGHT, reasoning="inline")
