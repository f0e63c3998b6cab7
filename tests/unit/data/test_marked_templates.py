"""Marks of public templates: the table, and what a marked template trains."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from megatron_lightning.data.chat import marked_templates
from megatron_lightning.data.chat.chat_encoding import Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.conversations import Chat
from megatron_lightning.data.chat.marked_templates import Edit, Marks, digest_of
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError
from tests.helpers.chats import CHATML, TWO, make_tokenizer, turn

LAST = CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.last %}<think>{{ message.reasoning_content }}"
    "</think>{% endif %}{{ message.content }}",
)
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EVERY = Marks(
    (
        Edit(
            "{% if message.role == 'assistant' and loop.last %}",
            "{% if message.role == 'assistant' %}{% generation %}<think>"
            "{{ message.reasoning_content }}</think>{{ message.content }}<|im_end|>\n"
            "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}",
            "{% endif %}{{ message.content }}<|im_end|>\n",
        ),
    ),
    keeps_text=False,
)
HEADER = Marks(
    (
        Edit("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
             "{% if loop.last and not add_generation_prompt %}<|user|>{% endif %}"
             "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"),
    ),
    ends_at_header=True,
)  # fmt: skip


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {digest_of(LAST): EVERY, digest_of(HEADERS): HEADER}
    monkeypatch.setattr(marked_templates, "_TABLE", table)


def _encoder(template: str, tokens: tuple[str, ...], **options: bool) -> Encoder:
    tokenizer = ChatTokenizer(make_tokenizer(tokens))
    chat = ChatTemplate(template, tokenizer.special_tokens)
    limit = SupervisedOptions(sequence_length=200, chat=ChatOptions(**options))  # type: ignore[arg-type]
    return Encoder(tokenizer, chat, limit)


def _trained(encoder: Encoder, messages: list[dict[str, str]]) -> list[str]:
    documents = encoder.documents([Row("row", {"messages": messages})])
    decode = encoder._tokenizer.decode
    return [decode(one.ids[one.trained].tolist()) for one in documents]


@pytest.mark.usefixtures("_table")
def test_every_answer_of_a_rewriting_template_is_trained_in_its_last_form() -> None:
    messages = [{**one, "reasoning_content": "red"} for one in TWO]
    encoder = _encoder(LAST, ("<|im_start|>", "<|im_end|>"))
    each = ["<think>red</think>the sky<|im_end|>\n", "<think>red</think>blue<|im_end|>\n"]
    assert _trained(encoder, messages) == ["".join(each)]
    assert encoder.counts["conversations whose earlier answers keep the form of a last answer"] == 1
    # One turn, and turns alone, are as the template itself writes them.
    assert _trained(encoder, messages[:2]) == each[:1]
    split = _encoder(LAST, ("<|im_start|>", "<|im_end|>"), split_turns=True)
    assert _trained(split, messages) == each
    (*_, last) = split.documents([Row("row", {"messages": messages})])
    assert split._tokenizer.decode(last.ids.tolist()).count("red") == 1


@pytest.mark.usefixtures("_table")
def test_a_header_that_ends_an_answer_is_trained_behind_every_answer() -> None:
    tokens = ("<|user|>", "<|assistant|>", "<|endoftext|>")
    encoder = _encoder(HEADERS, tokens)
    assert _trained(encoder, TWO) == ["the sky<|user|>blue<|user|>"]
    assert _trained(_encoder(HEADERS, tokens, split_turns=True), TWO[:2]) == ["the sky<|user|>"]
    # A text that ends with it has an end already.
    (text,) = encoder.documents([Row("row", {"text": "what is<|user|>"})])
    assert encoder._tokenizer.decode(text.ids.tolist()) == "what is<|user|>"


@pytest.mark.usefixtures("_table")
def test_what_serves_is_the_original() -> None:
    template = ChatTemplate(LAST + "\n", {})
    assert template.sources == {"default": LAST + "\n"}
    assert "generation" in str(template.identity["marked"])
    unknown = ChatTemplate(LAST + "{# other #}", {})
    assert "marked" not in unknown.identity
    with pytest.raises(DataError, match="message 1 renders otherwise"):
        list(unknown.samples(Chat("row", TWO, trained=frozenset((1, 3))), ChatOptions()))


@pytest.mark.usefixtures("_table")
def test_a_refusal_of_the_original_stays_if_the_marks_refuse() -> None:
    messages = [TWO[0], turn("assistant", "", refusal="no"), *TWO[2:]]
    with pytest.raises(DataError, match="write refusal of message 1"):
        _trained(_encoder(LAST, ("<|im_start|>", "<|im_end|>")), messages)
