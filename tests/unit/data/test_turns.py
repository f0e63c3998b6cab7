"""Texts of several turns: ids are appended to, and templates that change what was said are refused.

Answers are sampled character by character, in other tokens than the tokenizer would choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.conversations import Chat
from megatron_lightning.data.rollouts.prompts import prompt_of
from megatron_lightning.data.rollouts.turns import History, Turns
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError
from tests.helpers.chats import CHATML, make_tokenizer, turn

THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
DROPS = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or add_generation_prompt or m.role == 'user' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACES = "{% for m in messages %}{{ m.content }} {% endfor %}"
KEPT = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "lfm2": "<|im_end|>", "lfm2_v2": "<|im_end|>", "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>", "phi3": "<|end|>", "qwen2_5": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
}  # fmt: skip
REFUSED = {
    "deepseek_r1_distill": "<eos>", "glm4moe": "<|user|>", "lfm2_2_5": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_6": "<|im_end|>",
}  # fmt: skip


def _turns(
    template: str, tokenizer: Any, ends: list[str], history: History = "refuse"
) -> tuple[Turns, ChatTokenizer]:
    chosen = ChatTokenizer(tokenizer)
    rendered = ChatTemplate(template, chosen.special_tokens)
    ids = [chosen.vocabulary[end] for end in ends]
    return Turns(Chat("rows.jsonl:1", []), chosen, rendered, ids, history), chosen


def _talk(
    template: str,
    tokenizer: Any,
    end: str,
    *,
    thought: str = "",
    odd: bool = False,
    history: History = "refuse",
) -> tuple[list[int], list[int], list[int], str, ChatTokenizer]:
    """Return ids, mask, all sampled ids, and the whole text of a conversation of three turns."""
    turns, chosen = _turns(template, tokenizer, [end], history)

    def encoded(text: str) -> list[int]:
        return [int(i) for i in chosen.encode([text])[0][0]]

    messages = [turn("user", "What is 2 and 3?")]
    ids = turns.begin(messages)
    mask, answers = [0] * len(ids), list[int]()
    for answer, question in (("It is 5.", "And 4 more?"), ("Then 9.", "Sure?")):
        text = thought + answer
        sampled = [i for piece in (text if odd else [text]) for i in encoded(piece)]
        sampled.append(chosen.vocabulary[end])
        said, new = turn("assistant", text), [turn("user", question)]
        added = turns.extend(messages, said, new, sampled)
        messages += [said, *new]
        ids += sampled + added
        mask += [1] * len(sampled) + [0] * len(added)
        answers += sampled
    whole = ChatTemplate(template, chosen.special_tokens).render(
        Chat("", messages), messages, prompt=True
    )
    return ids, mask, answers, whole[0], chosen


def _chosen(ids: list[int], mask: list[int], value: int = 1) -> list[int]:
    return [i for i, m in zip(ids, mask, strict=True) if m == value]


def _same(ids: list[int], whole: str, chosen: ChatTokenizer) -> None:
    assert chosen.decode(ids) == whole
    assert ids == chosen.encode([whole])[0][0].tolist()


@pytest.mark.parametrize("template", [CHATML, OTHER_END])
def test_ids_are_those_of_the_whole_text(template: str) -> None:
    tokenizer = make_tokenizer(template=template)
    ids, mask, _, whole, chosen = _talk(template, tokenizer, "<|im_end|>")
    _same(ids, whole, chosen)
    odd, odd_mask, answers, _, _ = _talk(template, tokenizer, "<|im_end|>", odd=True)
    assert chosen.decode(odd) == whole and odd != ids
    assert _chosen(ids, mask, 0) == _chosen(odd, odd_mask, 0)
    assert _chosen(odd, odd_mask) == answers


def test_a_template_that_drops_reasoning_is_refused_or_kept() -> None:
    tokenizer = make_tokenizer(template=DROPS)
    named = r'rows.jsonl:1: .* message 1 \(assistant\) .* "keep".*"split"'
    with pytest.raises(DataError, match=named):
        _talk(DROPS, tokenizer, "<|im_end|>", thought=THOUGHT)
    ids, mask, answers, _, chosen = _talk(
        DROPS, tokenizer, "<|im_end|>", thought=THOUGHT, odd=True, history="keep"
    )
    assert _chosen(ids, mask) == answers
    assert chosen.decode(ids).count("Two and three.") == 2
    with pytest.raises(TypeError):  # there is nothing to append: another text begins
        _talk(DROPS, tokenizer, "<|im_end|>", thought=THOUGHT, history="split")
    # Also a template that hides what the answer is: it would not be what the model saw.
    hides = DROPS.replace("message.content if loop.last else ", "")
    with pytest.raises(DataError, match=r"message 1 \(assistant\)"):
        _talk(hides, tokenizer, "<|im_end|>", thought=THOUGHT)


def test_the_message_that_changes_is_named() -> None:
    late = "{{ message.content if loop.index > loop.length - 3 }}"
    hides = CHATML.replace("{{ message.content }}", late)
    with pytest.raises(DataError, match=r"message 0 \(user\)"):
        _talk(hides, make_tokenizer(template=hides), "<|im_end|>")


def test_tokens_across_a_seam_are_refused() -> None:
    with pytest.raises(DataError, match="joins characters of an answer"):
        _talk(SPACES, make_tokenizer(template=SPACES), "<|im_end|>")


def test_an_answer_without_its_end_gets_the_templates() -> None:
    """One that another stop has cut, and one with another end token than the template's."""
    turns, chosen = _turns(CHATML, make_tokenizer(), ["<|im_end|>", "<|im_start|>"])
    asked, said = [turn("user", "what is")], turn("assistant", "blue")
    added = turns.extend(asked, said, [turn("user", "why")], chosen.encode(["blue"])[0][0].tolist())
    assert chosen.decode(added).startswith("<|im_end|>\n<|im_start|>user")
    other = [chosen.vocabulary["<|im_start|>"]]
    assert chosen.decode(turns.extend(asked, said, [turn("user", "why")], other)).startswith("\n")


def test_images_are_refused_and_parts_of_text_are_joined() -> None:
    """In rows, and in messages of an environment."""
    turns, chosen = _turns(CHATML, make_tokenizer(), ["<|im_end|>"])
    parts = [{"type": "text", "text": one} for one in ("what ", "is")]
    asked = {"role": "user", "content": "what is"}
    assert turns.begin([{"role": "user", "content": parts}]) == turns.begin([asked])
    shown = {"role": "user", "content": [*parts, {"type": "image", "url": "a.png"}]}
    said = [turn("assistant", "blue"), shown]
    with pytest.raises(DataError, match=r"rows.jsonl:1: message 2 has an image.*text alone"):
        turns.extend([asked], said[0], said[1:], [])
    template = ChatTemplate(CHATML, chosen.special_tokens)
    for fields in (
        {"messages": [shown]},
        {"images": ["a.png"], "messages": [turn("user", "<image> what")]},
        {"images": ["a.png"], "messages": [turn("user", "what")]},
        {"images": ["a.png"], "prompt": "<image> what"},
        {"audio": "a.wav", "prompt_ids": [1, 2]},
    ):
        with pytest.raises(DataError, match="text alone"):
            prompt_of(Row("rows.jsonl:1", fields), chosen, template)


# ----------------------------------------------------------------------------- public templates


@cache
def _public() -> tuple[Mapping[str, str], Any]:
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = Path(trl.__file__).parent / "chat_templates"
    texts = {name: (folder / f"{name}.jinja").read_text() for name in KEPT | REFUSED}
    found = {s for t in texts.values() for s in re.findall(r"<\W?\w+\W?>", t)}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts.values(),
        trainers.BpeTrainer(
            vocab_size=1200,
            special_tokens=sorted(found | {"<bos>", "<eos>"}),
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    return texts, tokenizer


def _fast(end: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = _public()[1]
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=end)


@pytest.mark.parametrize("name", sorted(KEPT))
def test_public_templates_that_keep_history(name: str) -> None:
    template, end = _public()[0][name], KEPT[name]
    thought = "" if name == "lfm2" else THOUGHT
    ids, _, _, whole, chosen = _talk(template, _fast(end), end, thought=thought)
    _same(ids, whole, chosen)
    odd, mask, answers, _, _ = _talk(template, _fast(end), end, thought=thought, odd=True)
    assert chosen.decode(odd) == whole and odd != ids
    assert _chosen(odd, mask) == answers


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_public_templates_that_change_history(name: str) -> None:
    template, end = _public()[0][name], REFUSED[name]
    with pytest.raises(DataError, match=r"message 1 \(assistant\) in another way"):
        _talk(template, _fast(end), end, thought=THOUGHT)
    ids, mask, answers, _, _ = _talk(
        template, _fast(end), end, thought=THOUGHT, odd=True, history="keep"
    )
    assert _chosen(ids, mask) == answers
