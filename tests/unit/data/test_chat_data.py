"""Which tokens of a conversation are trained: expected text written by hand, beside templates
written by hand in the form that public models have."""

from __future__ import annotations

import codecs
import importlib
import json
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.conversations import parse_row
from megatron_lightning.data.rows.sources import Row, read_rows
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import FinetuneDataModule
from tests.helpers.chats import CHATML, CHATML_TOKENS, TWO, chats, make_tokenizer, turn, write_rows

pytest.importorskip("transformers")

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # an empty thought in the last answer only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # the prompt opens a thought, which answers do not have
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% else %}<Assistant>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
GLM = (  # no end of a turn: generation stops at the next header
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (  # takes parts alone, as templates of models with images do
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content[0].text + '' }}"
    "{{ eos_token if m.role == 'assistant' }} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
MARKED = CHATML.replace(
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
    "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n",
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _module(
    folder: Path, rows: list[Any], tokenizer: Any, length: int = 200, **options: Any
) -> FinetuneDataModule:
    path = write_rows(folder / "rows.jsonl", rows)
    options = {
        "tokenizer": tokenizer,
        "pad_to": length,
        "cache_dir": str(folder / "cache"),
        **options,
    }
    return FinetuneDataModule(path, sequence_length=length, batch_size=1, **options)


def _rows(data: FinetuneDataModule) -> list[dict[str, torch.Tensor]]:
    data.prepare_data()
    data.setup("fit")
    rows = [{name: value[0] for name, value in batch.items()} for batch in data.train_dataloader()]
    for row in rows:  # a label is the token that follows
        counted = row["labels"][:-1] != -100
        assert counted.any()
        assert torch.equal(row["labels"][:-1][counted], row["tokens"][1:][counted])
        assert row["labels"][-1] == -100
    return rows


def _trained(tokenizer: Any, row: dict[str, torch.Tensor]) -> list[str]:
    """Return the stretches of trained text."""
    labels = row["labels"].tolist()
    pieces: list[list[int]] = [[]]
    for label in labels:
        if label != -100:
            pieces[-1].append(label)
        elif pieces[-1]:
            pieces.append([])
    return [tokenizer.decode(piece) for piece in pieces if piece]


HAND: dict[str, tuple[str, tuple[str, ...], dict[str, str], list[Any], list[str]]] = {
    "chatml, pad is the end of turn": (
        CHATML, CHATML_TOKENS, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        TWO, ["the sky<|im_end|>\n", "blue<|im_end|>\n"],
    ),
    "llama 3, two line breaks before the answer": (
        LLAMA3, ("<B>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<B>", "eos_token": "<|eot_id|>"},
        TWO, ["the sky<|eot_id|>", "blue<|eot_id|>"],
    ),
    "mistral, an answer begins with a space": (
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), {"bos_token": "<s>", "eos_token": "</s>"},
        TWO, [" the sky</s>", " blue</s>"],
    ),
    "gemma, another name for the assistant": (
        GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
        TWO, ["the sky<end_of_turn>\n", "blue<end_of_turn>\n"],
    ),
    "zephyr, headers are plain text": (
        ZEPHYR, ("</s>",), {"eos_token": "</s>", "pad_token": "</s>"},
        TWO, ["the sky</s>\n", "blue</s>\n"],
    ),
    "phi 3, an end of text behind the last message only": (
        PHI3, ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        {"eos_token": "<|endoftext|>"},
        TWO, ["the sky<|end|>\n", "blue<|end|>\n<|endoftext|>"],
    ),
    "marked, without the line break": (
        MARKED, CHATML_TOKENS, {"eos_token": "<|im_end|>"},
        TWO, ["the sky<|im_end|>", "blue<|im_end|>"],
    ),
    "glm, the header of the next turn is trained behind an answer": (
        GLM, ("<|user|>", "<|assistant|>", "<|endoftext|>"), {"eos_token": "<|endoftext|>"},
        TWO, ["\nthe sky<|user|>", "\nblue"],
    ),
    "parts alone, in the place of text": (
        PARTS, ("</s>",), {"eos_token": "</s>"}, TWO, [" the sky</s> ", " blue</s> "],
    ),
    "tools: the call is trained, its result is not": (
        TOOLS, CHATML_TOKENS, {"eos_token": "<|im_end|>"},
        [
            turn("user", "what is it"),
            turn("assistant", "", tool_calls=[
                {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
            ]),
            turn("tool", "blue"), turn("assistant", "it is blue"),
        ],
        ['<call>look {"at": "sky"}</call><|im_end|>\n', "it is blue<|im_end|>\n"],
    ),
    "tools: null in the place of a key that is missing": (
        TOOLS.replace("m.tool_calls or []", "(m.tool_calls if 'tool_calls' in m else [])"),
        CHATML_TOKENS, {"eos_token": "<|im_end|>"},
        [turn("user", "what", name=None), turn("assistant", "blue", tool_calls=None, refusal=None)],
        ["blue<|im_end|>\n"],
    ),
    "emoji: several tokens of one character": (
        CHATML, CHATML_TOKENS, {"eos_token": "<|im_end|>"},
        [turn("user", "👩‍🚀 or 🇳🇱?"), turn("assistant", "🤷🏽 é")], ["🤷🏽 é<|im_end|>\n"],
    ),
    "a system message, and an answer that does not count": (
        CHATML, CHATML_TOKENS, {"eos_token": "<|im_end|>"},
        [turn("system", "red"), *TWO[:1], {**TWO[1], "weight": 0}, *TWO[2:]],
        ["blue<|im_end|>\n"],
    ),
    "deepseek, one answer in its own turn": (
        DEEPSEEK.replace("<think>\n", ""), ("<s>", "</s>", "<User>", "<Assistant>"),
        {"bos_token": "<s>", "eos_token": "</s>"}, TWO, ["the sky</s>", "blue</s>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_trained_text_is_what_a_reader_marks(tmp_path: Path, name: str) -> None:
    template, special, names, messages, expected = HAND[name]
    tokenizer = make_tokenizer(special, template=template, **names)
    (row,) = _rows(_module(tmp_path, [{"messages": messages}], tokenizer))
    assert _trained(tokenizer, row) == expected
    # What the tokenizer itself makes of the text, once: no second begin of text.
    rendered = (
        tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False)
        if name[:5] not in ("tools", "parts")
        else None
    )
    if rendered is not None:
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        assert row["tokens"][: len(ids)].tolist() == ids


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK])
def test_templates_that_rewrite_earlier_turns(tmp_path: Path, template: str) -> None:
    special = (*CHATML_TOKENS, "<s>", "</s>", "<User>", "<Assistant>")
    tokenizer = make_tokenizer(
        special,
        template=template,
        bos_token="<s>",
        eos_token=special[1 if template == QWEN3 else 3],
    )
    rows = [{"messages": TWO}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: message 1 .* set split_turns=True"):
        _rows(_module(tmp_path, rows, tokenizer))
    split = _rows(_module(tmp_path, rows, tokenizer, split_turns=True))
    found = sorted(piece for row in split for piece in _trained(tokenizer, row))
    assert found == (
        ["<think>\n\n</think>\n\nblue<|im_end|>\n", "<think>\n\n</think>\n\nthe sky<|im_end|>\n"]
        if template == QWEN3
        else ["<Assistant>blue</s>", "<Assistant>the sky</s>"]
    )


def test_the_last_answer_alone(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=QWEN3)
    (row,) = _rows(_module(tmp_path, [{"messages": TWO}], tokenizer, train_on="last"))
    assert _trained(tokenizer, row) == ["<think>\n\n</think>\n\nblue<|im_end|>\n"]
    marked = make_tokenizer(template=MARKED)
    (row,) = _rows(_module(tmp_path, [{"messages": TWO}], marked, train_on="last"))
    assert _trained(marked, row) == ["blue<|im_end|>"]
    first = [{"messages": [*TWO[:3], {**TWO[3], "train": False}]}]
    (row,) = _rows(_module(tmp_path, first, marked))
    assert _trained(marked, row) == ["the sky<|im_end|>"]


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [
        ("keep", ["<think>\nred\n</think>\nblue<|im_end|>\n"]),
        ("mask", ["blue<|im_end|>\n"]),
        ("drop", ["blue<|im_end|>\n"]),
    ],
)
def test_reasoning(tmp_path: Path, reasoning: str, expected: list[str]) -> None:
    template = CHATML.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n"
        "{% endif %}{{ message.content }}",
    )
    tokenizer = make_tokenizer(template=template)
    rows = [{"messages": [TWO[0], turn("assistant", "blue", reasoning_content="red")]}]
    (row,) = _rows(_module(tmp_path, rows, tokenizer, reasoning=reasoning))
    assert _trained(tokenizer, row) == expected
    assert ("red" in tokenizer.decode(row["tokens"])) == (reasoning != "drop")


def test_schemas_give_the_same_rows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    rows = [
        {"messages": TWO[:2]},
        {"conversations": [
            {"from": "human", "value": "what is"}, {"from": "gpt", "value": "the sky"}
        ]},
        {"instruction": "what is", "output": "the sky"},
        {"prompt": TWO[:1], "completion": TWO[1:2]},
    ]  # fmt: skip
    found = _rows(_module(tmp_path, rows, tokenizer))
    assert len(found) == 4
    for row in found[1:]:
        assert torch.equal(row["labels"], found[0]["labels"])
        assert torch.equal(row["tokens"], found[0]["tokens"])


def test_a_system_text_beside_the_messages_is_their_first(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    system = turn("system", "red")
    turns = [{"from": "human", "value": "what is"}, {"from": "gpt", "value": "the sky"}]
    rows = [
        {"messages": [system, *TWO[:2]]},
        {"messages": TWO[:2], "system": "red"},
        {"messages": json.dumps(TWO[:2]), "system": "red"},  # a table of text
        {"messages": [system, *TWO[:2]], "system": "red"},
        {"conversations": turns, "system": "red"},
        {"prompt": TWO[:1], "completion": TWO[1:2], "system": "red"},
        {"instruction": "what is", "output": "the sky", "system": "red"},
    ]
    found = _rows(_module(tmp_path, rows, tokenizer))
    assert len(found) == len(rows)
    for row in found[1:]:
        assert torch.equal(row["labels"], found[0]["labels"])
        assert torch.equal(row["tokens"], found[0]["tokens"])


def test_text_without_a_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=None)
    rows = [{"prompt": "what is", "completion": " the sky"}, {"text": "sky blue"}]
    found = sorted(_trained(tokenizer, row)[0] for row in _rows(_module(tmp_path, rows, tokenizer)))
    without_first = tokenizer.decode(tokenizer("sky blue").input_ids[1:])
    assert found == sorted([" the sky<|im_end|>", without_first + "<|im_end|>"])
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 is a conversation, and the tokenizer"):
        _rows(_module(tmp_path, [{"messages": TWO}], tokenizer))


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}]
    (row,) = _rows(_module(tmp_path, rows, make_tokenizer(), length=6))
    assert row["labels"].tolist() == [-100, 7, 8, -100, -100, -100]
    shifted = [{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}]
    with pytest.raises(DataError, match=r"labels\[0\] is 6 and input_ids\[0\] 5"):
        _rows(_module(tmp_path, shifted, make_tokenizer()))


@pytest.mark.parametrize("kind", ["drop", "left", "middle", "right"])
def test_no_row_is_left_without_a_trained_token(
    tmp_path: Path, kind: Literal["drop", "left", "middle", "right"]
) -> None:
    """Ids 10 to 19 are the prompt and 20 to 24 the answer."""
    ids = [*range(10, 25)]
    labels = [-100] * 10 + ids[10:]
    rows = [
        {"input_ids": ids, "labels": labels},
        {"input_ids": [*range(10, 60)], "labels": [-100] * 5 + [*range(15, 60)]},
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
    ]
    kept: dict[str, list[int]] = {
        "drop": [],
        "left": [*range(13, 25)],
        "middle": [10, 11, 12, 13, 17, 18, 19, *range(20, 25)],
        "right": [*range(10, 22)],
    }
    data = _module(tmp_path, rows, make_tokenizer(), length=12, truncation=kind)
    found = [row["tokens"].tolist() for row in _rows(data)]
    assert [1, 2, 3, 4] in [row[:4] for row in found]
    assert (kept[kind] in found) == (kind != "drop")
    counts = data._documents(data.paths[0]).report
    assert counts["too long"] == 2
    assert len(found) == {"drop": 1, "left": 2, "middle": 2, "right": 3}[kind]
    assert "too long: 2" in data.describe()


def test_a_cut_answer_that_is_gone_leaves_no_row(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [*range(30)], "labels": [-100] * 25 + [*range(25, 30)]},
        {"messages": [turn("user", "what")]},
        {"messages": TWO},
    ]
    data = _module(tmp_path, rows, make_tokenizer(), length=60, truncation="right")
    assert len(_rows(data)) == 2
    assert "rows without an answer: 1" in data.describe()
    with pytest.raises(DataError, match="left out without a trained token: 1"):
        _rows(_module(tmp_path, rows[:1], make_tokenizer(), length=12, truncation="right"))


WRONG: dict[str, tuple[Any, str]] = {
    "no schema": ({"question": "a"}, r"rows.jsonl:1: the keys \['question'\] are of no known"),
    "no messages": ({"messages": []}, "must be a list of messages, and not an empty one"),
    "no role": ({"messages": [{"content": "a"}]}, "message 0 of messages must be an object"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, TWO[1]]},
        "message 0 has an image, and only text can be trained here; set images",
    ),
    "another key": (
        {"messages": [{"role": "user", "text": "a"}, TWO[1]]},
        r"message 0 of the role 'user' has no content, but the keys \['role', 'text'\]",
    ),
    "an answer without content": (
        {"messages": [TWO[0], {"role": "assistant", "content": None}]},
        "message 1 of the role 'assistant' has no content",
    ),
    "a role of ShareGPT": (
        {"messages": [TWO[0], {"role": "bot", "content": "a"}]},
        "message 1 has the role 'bot', .* write 'assistant'",
    ),
    "a role with a capital": (
        {"messages": [TWO[0], TWO[1], TWO[0], {"role": "Assistant", "content": "a"}]},
        "message 3 has the role 'Assistant', .* write 'assistant'",
    ),
    "a misspelled role": (
        {"messages": [TWO[0], TWO[1], TWO[0], {"role": "asistant", "content": "a"}]},
        "message 3 has the role 'asistant', .* write 'assistant'",
    ),
    "a system role with white space": (
        {"messages": [{"role": "System ", "content": "a"}, *TWO]},
        "message 0 has the role 'System ', .* write 'system'",
    ),
    "a fraction": (
        {"messages": [TWO[0], {**TWO[1], "weight": 0.5}]}, "message 1 has weight=0.5",
    ),
    "no json": (
        {"messages": [TWO[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]},
        "the arguments of a call in message 1 are no JSON",
    ),
    "two system messages": (
        {"messages": [turn("system", "a"), *TWO], "system": "b"}, "keep one of them",
    ),
    "a system text beside a text": (
        {"prompt": "a", "completion": "b", "system": "c"}, "make the prompt a list of messages",
    ),
    "somebody": ({"conversations": [{"from": "me", "value": "a"}]}, "turn 0 is from 'me'"),
    "a foreign id": ({"input_ids": [1, 5000]}, "input_ids has id 5000, and the tokenizer 320"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    row, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        _rows(_module(tmp_path, [row], make_tokenizer()))


def test_a_template_that_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(("<s>", "</s>"), template=MISTRAL, bos_token="<s>", eos_token="</s>")
    rows = [{"messages": TWO}, {"messages": [turn("system", "a"), *TWO]}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: .*only user and assistant"):
        _rows(_module(tmp_path, rows, tokenizer))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*OverflowError: Range too big"):
        endless = "{% for one in range(1000000) %}x{% endfor %}"
        _rows(_module(tmp_path, rows[:1], tokenizer, chat_template=endless))
    with pytest.raises(ConfigError, match="is no Jinja template"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ConfigError, match="neither a file nor a Jinja template"):
        ChatTemplate.load("no/such/file", {})
    with pytest.raises(ConfigError, match="train_on='all'; must be one of answers, last"):
        ChatOptions(train_on="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["message.content + ''", "message.content[0].text + ''"])
def test_a_template_that_ignores_tool_calls_is_named(tmp_path: Path, form: str) -> None:
    """A template of text, and of parts. The answer would be trained to be empty."""
    template = CHATML.replace("message.content", form)
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [turn("user", "a"), turn("assistant", "", tool_calls=[call]), turn("tool", "b"), TWO[1]]
    with pytest.raises(DataError, match="does not write the tool calls of message 1"):
        _rows(_module(tmp_path, [{"messages": chat}], make_tokenizer(), chat_template=template))


def test_slow_and_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    class Slow:
        """A tokenizer without characters."""

    with pytest.raises(ConfigError, match="Slow, which does not say which characters"):
        _rows(_module(tmp_path, [{"messages": TWO}], Slow()))
    with pytest.raises(DataError, match="no tokenizer can be loaded from here"):
        _rows(_module(tmp_path, [{"messages": TWO}], str(tmp_path)))
    with pytest.raises(ConfigError, match="tokenizer of FinetuneDataModule is not set"):
        _rows(_module(tmp_path, [{"messages": TWO}], None))


def test_a_tokenizer_on_disk_and_its_settings(tmp_path: Path) -> None:
    """Padding and truncation of a tokenizer.json are not those of the data."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (row,) = _rows(_module(tmp_path, [{"messages": TWO}], str(tmp_path / "tokenizer")))
    assert _trained(tokenizer, row) == ["the sky<|im_end|>\n", "blue<|im_end|>\n"]
    with_bare = _module(
        tmp_path, [{"messages": TWO}], make_tokenizer(template=None), chat_template=CHATML
    )
    assert torch.equal(_rows(with_bare)[0]["labels"], row["labels"])


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "folder"]
)
def test_files(tmp_path: Path, suffix: str) -> None:
    rows = [{"instruction": f"what {i}", "output": "sky"} for i in range(3)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write_rows(path, rows)
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    elif suffix == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif suffix == "csv":
        path.write_text("instruction,output\n" + "".join(f"what {i},sky\n" for i in range(3)))
    elif suffix == "jsonl.gz":
        import gzip

        path.write_bytes(gzip.compress(("".join(json.dumps(r) + "\n" for r in rows)).encode()))
    elif suffix == "folder":
        path.mkdir()
        write_rows(path / "a.jsonl", rows[:1])
        write_rows(path / "b.jsonl", rows[1:])
    else:
        arrow: Any = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(rows)
        if suffix == "parquet":
            importlib.import_module("pyarrow.parquet").write_table(table, path)
        else:
            with (
                arrow.OSFile(str(path), "wb") as file,
                arrow.ipc.new_stream(file, table.schema) as out,
            ):
                out.write_table(table)
    assert [dict(row.fields) for row in read_rows(str(path))] == rows
    if suffix == "jsonl":
        assert [row.where for row in read_rows(f"file://{path}")][2].endswith("rows.jsonl:3")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": \n')
    readable, broken = read_rows(str(bad))
    assert readable.error is None and "bad.jsonl:2: invalid JSON at column" in str(broken.error)
    with pytest.raises(DataError, match="there is no such file"):
        list(read_rows(str(tmp_path / "none.jsonl")))
    (tmp_path / "bad.csv").write_text("a,b\n1\n")
    [narrow] = read_rows(str(tmp_path / "bad.csv"))
    assert "bad.csv:2: the line has another number of columns" in str(narrow.error)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match="the suffix says no format"):
        list(read_rows(str(tmp_path / "notes.md")))
    with pytest.raises(DataError, match="the training data have no row: the files are empty"):
        _rows(_module(tmp_path, [], make_tokenizer()))
    with pytest.raises(DataError, match=r"labels must be a list of integers"):
        parse_row(Row("here", {"input_ids": [1], "labels": ["a"]}))


def test_the_cache_is_read_again_and_never_for_other_options(tmp_path: Path) -> None:
    path, tokenizer = write_rows(tmp_path / "rows.jsonl", chats(5)), make_tokenizer()

    def folders(**options: Any) -> int:
        """Return the number of cached sources after another run."""
        data = FinetuneDataModule(
            path, sequence_length=200, batch_size=1, tokenizer=tokenizer,
            cache_dir=str(tmp_path / "cache"), **options,
        )  # fmt: skip
        _rows(data)
        return len(list((tmp_path / "cache").iterdir()))

    assert folders() == 1
    assert folders(packing="online") == 1
    assert folders(train_on="last") == 2
    assert folders(template_options={"enable_thinking": False}) == 3
    assert folders(template_options={"enable_thinking": "False"}) == 4  # true in a template
    assert folders(drop_fields=["tools"]) == 5
    assert folders(reasoning="inline") == 6


def test_the_cache_of_an_earlier_parser_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row accepted by an earlier release is refused now, cached or not."""
    bad = {"messages": [TWO[0], TWO[1], {"role": "bot", "content": "a"}]}
    data = _module(tmp_path, [bad], make_tokenizer())
    with monkeypatch.context() as earlier:
        earlier.setattr(
            "megatron_lightning.data.chat.conversations._check_message", lambda *_: None
        )
        earlier.setattr("megatron_lightning.data.chat.chat_encoding.PARSER_VERSION", 1)
        assert len(_rows(data)) == 1
    with pytest.raises(DataError, match="message 2 has the role 'bot'"):
        _rows(data)


def test_workers_and_a_reading_thread_read_the_same_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "sequence_length": 60, "batch_size": 2, "tokenizer": make_tokenizer(),
        "cache_dir": str(tmp_path / "cache"), "packing": "online", "packing_window": 8,
    }  # fmt: skip
    path = tmp_path / "rows.jsonl"
    write_rows(path, chats(20))
    found = []
    for reader in ({}, {"num_workers": 2}, {"reading_thread": True}):
        data = FinetuneDataModule(path, **reader, **options)  # type: ignore[arg-type]
        data.prepare_data()
        data.setup("fit")
        found.append(torch.cat([batch["tokens"] for batch in data.train_dataloader()]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_file_that_changes_in_a_fit_changes_nothing(tmp_path: Path) -> None:
    data = _module(tmp_path, chats(5), make_tokenizer())
    _rows(data)
    state = data.state_dict()
    write_rows(tmp_path / "rows.jsonl", chats(4))
    assert data.state_dict() == state
    data.setup("fit")
    assert data.state_dict() != state


def test_new_tokens_are_tokens(tmp_path: Path) -> None:
    rows = [{"messages": [TWO[0], turn("assistant", "the <new> sky")]}]
    data = _module(tmp_path, rows, make_tokenizer(), new_tokens=["<new>"])
    (row,) = _rows(data)
    assert 320 in row["labels"].tolist()
    assert data.vocab_size == 321


def test_a_validation_without_data_is_refused() -> None:
    data = FinetuneDataModule("chats.jsonl", sequence_length=8, batch_size=1)
    with pytest.raises(ConfigError, match=r"validate reads .* there are none\. Set val_path"):
        data.check_files("validate", pl.LightningModule())
