"""Fields of rows beside plain content: shown by the template, left out by name, or refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from megatron_lightning.data.chat.chat_encoding import Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.rows.row_report import describe_documents
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError, DataError
from tests.helpers.chats import CHATML, make_tokenizer, turn

USER, BLUE = turn("user", "what"), turn("assistant", "blue")
TOOL = {"type": "function", "function": {"name": "sky", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "sky", "arguments": {"at": 1}}}
REASONING = CHATML.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content | trim }}</think>"
    "{% endif %}{{ message.content }}",
)
LAST = REASONING.replace("{% if message", "{% if loop.last and message")
CUT = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
NO_SYSTEM = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for c in message.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)
COMPARED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] if c.function.name != 'sky' %}"
    "{{ raise_exception('unknown') }}{% endfor %}{% endfor %}" + TOOLS
)
_TOKENIZER = ChatTokenizer(make_tokenizer())


def _encoder(template: str = CHATML, **options: Any) -> Encoder:
    chat = ChatTemplate(template, _TOKENIZER.special_tokens)
    limit = SupervisedOptions(sequence_length=512, chat=ChatOptions(**options))
    return Encoder(_TOKENIZER, chat, limit)


def _trained(row: dict[str, Any], template: str = CHATML, **options: Any) -> list[str]:
    """Return the trained text of every document of a row."""
    documents = _encoder(template, **options).documents([Row("row", row)])
    return [_TOKENIZER.decode(one.ids[one.trained].tolist()) for one in documents]


def _chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages], **fields}


LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning, a template without a form": (
        CHATML, _chat({**BLUE, "reasoning_content": "blue"}),
        r"write reasoning_content of message 1, .*; set reasoning=inline .*, reasoning=drop",
    ),
    "another name of the reasoning": (
        CHATML, _chat({**BLUE, "thinking": "red"}), "write thinking of message 1",
    ),
    "reasoning beside a name that the template compares": (
        COMPARED, _chat({**BLUE, "reasoning_content": "red", "tool_calls": [CALL]}, tools=[TOOL]),
        "write reasoning_content of message 1",
    ),
    "reasoning in the content, beside such a name": (
        COMPARED.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"),
        _chat(
            {**turn("assistant", "<think>\nred\n</think>\n\nblue"), "tool_calls": [CALL]},
            tools=[TOOL],
        ),
        "write the reasoning in the content of message 1",
    ),
    "nothing but reasoning": (
        CHATML, _chat({"role": "assistant", "reasoning": "red"}), "write reasoning of message 1",
    ),
    "reasoning in the content, cut off": (
        CUT, _chat(turn("assistant", "<think>\nred\n</think>\n\nblue")),
        "write the reasoning in the content of message 1, .* set reasoning=drop",
    ),
    "reasoning that would be cut in the content, too": (
        CUT, _chat({**BLUE, "reasoning_content": "red"}),
        "write reasoning_content of message 1, so that it would be lost; set reasoning=drop",
    ),
    "reasoning of an earlier answer": (
        LAST.replace("loop.last", "loop.index > 2"),
        _chat({**BLUE, "reasoning_content": "red"}, USER, BLUE),
        "of message 1, .* split_turns=True",
    ),
    "tools": (CHATML, _chat(BLUE, tools=[TOOL]), r"the row's tools, .* drop_fields=\[tools\]"),
    "a system message": (
        NO_SYSTEM, {"messages": [turn("system", "user"), USER, BLUE]},
        r"the system text of message 0, .* set drop_fields=\[system\]",
    ),
    "a system text": (NO_SYSTEM, _chat(BLUE, system="what"), "the system text of message 0"),
    "a call in the older form": (
        CHATML, _chat({"role": "assistant", "function_call": {"name": "sky", "arguments": "{}"}}),
        "write function_call of message 1",
    ),
    "functions": (CHATML, _chat(BLUE, functions=[{"name": "sky"}]), "functions, an older form"),
    "a refusal in the place of content": (
        CHATML, _chat({**turn("assistant", ""), "refusal": "no"}), "write refusal of message 1",
    ),
    "one call of two": (
        TOOLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
        _chat(turn("assistant", "", tool_calls=[CALL, CALL])), "write the tool calls of message 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_a_field_that_the_template_does_not_write_is_refused(name: str) -> None:
    template, row, message = LOST[name]
    with pytest.raises(DataError, match=f"row: .*{message}"):
        _trained(row, template)


def test_fields_that_the_template_writes_are_taken() -> None:
    thought = {**BLUE, "reasoning_content": " red ", "reasoning": " red "}
    assert _trained(_chat(thought), REASONING) == ["<think>red</think>blue<|im_end|>\n"]
    call = turn("assistant", "", tool_calls=[CALL])
    assert _trained(_chat(call, tools=[TOOL]), TOOLS) == ['{"at": 1}<|im_end|>\n']
    assert _trained({"messages": [turn("system", "user"), USER, BLUE]}) == ["blue<|im_end|>\n"]
    # Templates drop the reasoning of earlier turns by design: an answer without a loss may lose it.
    row = _chat({**thought, "weight": 0}, USER, BLUE)
    assert _trained(row, LAST) == ["blue<|im_end|>\n"]
    split = _trained(_chat(thought, USER, thought), LAST, split_turns=True)
    assert split == ["<think>red</think>blue<|im_end|>\n"] * 2


def test_fields_are_left_out_by_name_and_counted() -> None:
    row = _chat({**BLUE, "thinking": "red"}, tools=[TOOL], system="green", functions=[TOOL])
    encoder = _encoder(drop_fields=("tools", "system", "thinking", "functions", "refusal"))
    (document,) = encoder.documents([Row("row", row)])
    expected = "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\nblue<|im_end|>\n"
    assert _TOKENIZER.decode(document.ids.tolist()) == expected
    assert _TOKENIZER.decode(document.ids[document.trained].tolist()) == "blue<|im_end|>\n"
    counts = {name for name in encoder.counts if name.startswith("conversations without")}
    dropped = ("tools", "system", "thinking", "functions")
    assert counts == {f"conversations without their {name}" for name in dropped}
    with pytest.raises(ConfigError, match=r"drop_fields has 'tool'; the fields .* are tools, func"):
        ChatOptions(drop_fields=("tool",))


@pytest.mark.parametrize(
    "options", [{"reasoning": "drop"}, {"drop_fields": ("reasoning_content",)}]
)
def test_an_answer_of_dropped_fields_alone_is_refused(options: dict[str, Any]) -> None:
    row = _chat(turn("assistant", "", reasoning_content="red"))
    with pytest.raises(DataError, match=r"row: message 1 is empty without reasoning_content"):
        _trained(row, REASONING, **options)


def test_reasoning_is_written_into_the_content() -> None:
    row = _chat({**BLUE, "reasoning": " red\n"})
    inline = "<think>\nred\n</think>\n\nblue<|im_end|>\n"
    assert _trained(row, reasoning="inline") == [inline]
    # In JSON and tables of the same row already written so, the text is the same.
    assert _trained(_chat(turn("assistant", "<think>\nred\n</think>\n\nblue"))) == [inline]
    with pytest.raises(DataError, match="write the reasoning in the content of message 1"):
        _trained(row, CUT, reasoning="inline")


def test_masked_reasoning_is_its_own() -> None:
    """The thought of one answer is text of another, and of its own answer."""
    first = turn("assistant", "red blue", reasoning_content="blue")
    second = turn("assistant", "the sky is blue", reasoning_content=" the sky ")
    assert _trained(_chat(first, USER, second), REASONING, reasoning="mask") == [
        "red blue<|im_end|>\nthe sky is blue<|im_end|>\n"
    ]
    bare = REASONING.replace("<think>", "(").replace("</think>", ")")
    assert _trained(_chat(first), bare, reasoning="mask") == ["()red blue<|im_end|>\n"]
    last = REASONING.replace("<think>", "{{ message.reasoning_content | length }}")
    with pytest.raises(DataError, match="the characters of the reasoning are not known"):
        _trained(_chat(first), last, reasoning="mask")


def test_values_of_a_row_are_values_of_the_template() -> None:
    template = (
        "{% if style is defined %}<|im_start|>system\n{{ style }}<|im_end|>\n{% endif %}" + CHATML
    )
    for options in ({"style": "green", "other": None}, '{"style": "green"}'):
        (document,) = _encoder(template).documents(
            [Row("row", _chat(BLUE, chat_template_kwargs=options))]
        )
        oracle = _TOKENIZER.tokenizer.apply_chat_template(
            [USER, BLUE], chat_template=template, style="green", return_dict=False
        )
        assert document.ids.tolist() == oracle
    (document,) = _encoder(template).documents([Row("row", _chat(BLUE, chat_template_kwargs=None))])
    assert "green" not in _TOKENIZER.decode(document.ids.tolist())
    for wrong, message in (({"tools": []}, "has tools, which is no value"), ([1], "an object")):
        with pytest.raises(DataError, match=f"row: chat_template_kwargs .*{message}"):
            _trained(_chat(BLUE, chat_template_kwargs=wrong))


def test_null_arguments_are_left_out_and_counted() -> None:
    """As in Parquet, where a column of structs has the keys of all rows."""
    call = {"function": {"name": "sky", "arguments": {"at": 1, "b": None, "c": [{"d": None}]}}}
    text = {"function": {"name": "sky", "arguments": '{"b": null}'}}
    row = _chat(turn("assistant", "", tool_calls=[call, text]))
    encoder = _encoder(TOOLS)
    (document,) = encoder.documents([Row("row", row)])
    trained = _TOKENIZER.decode(document.ids[document.trained].tolist())
    assert trained == '{"at": 1, "c": [{}]}{"b": null}<|im_end|>\n'
    assert encoder.counts["arguments of calls left out as null"] == 2


@pytest.mark.parametrize("label", [False, "False"])
def test_answers_to_avoid_are_refused(label: Any) -> None:
    for row in ({"prompt": "what", "completion": " red"}, _chat(BLUE)):
        with pytest.raises(DataError, match=r"row: label is false, .*data of KTO"):
            _trained({**row, "label": label})
        assert _trained({**row, "label": True})
    assert _trained({"text": "what is", "label": False})  # a class of a text


def test_the_report_says_what_was_left_out(tmp_path: Any) -> None:
    from megatron_lightning.data.chat.documents import Documents

    encoder = _encoder(drop_fields=("tools",))
    rows = [Row("row", _chat(BLUE, tools=[TOOL]))] * 3
    documents = Documents.build(tmp_path / "d", encoder.documents(rows), encoder.counts)
    assert "conversations without their tools: 3" in describe_documents("rows", documents)
