"""Tiny tokenizers, chat templates written by hand, and conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
WORDS = "what is the color of sky and grass blue green a red one of them does not know why "


@cache
def _trained(vocab_size: int, special: tuple[str, ...], prefix_space: bool) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 4, "user assistant system\n"], trainer)
    return str(tokenizer.to_str())


def make_tokenizer(
    special: Sequence[str] = CHATML_TOKENS,
    *,
    template: str | None = CHATML,
    vocab_size: int = 320,
    prefix_space: bool = False,
    **names: Any,
) -> Any:
    """Return a fast tokenizer whose pieces are bytes and a few words.

    Args:
        special: Added tokens.
        template: Chat template.
        vocab_size: Number of ids.
        prefix_space: Whether text begins with a space.
        names: Special tokens by their names, such as ``eos_token``; they are in ``special``.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    names = names or {"eos_token": special[-1], "pad_token": special[-1]}
    backend = Tokenizer.from_str(_trained(vocab_size, tuple(special), prefix_space))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Write JSON lines and return the path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TWO = [
    turn("user", "what is"), turn("assistant", "the sky"),
    turn("user", "color"), turn("assistant", "blue"),
]  # fmt: skip


def chats(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns and of various lengths."""
    words = WORDS.split()
    rows = []
    for index in range(count):
        messages = []
        for number in range(1 + index % 3):
            begin = (index * 5 + number * 3) % len(words)
            messages += [
                turn("user", " ".join(words[begin : begin + 2 + index % 4])),
                turn("assistant", " ".join(words[number : number + 1 + (index * 7) % 11])),
            ]
        rows.append({"messages": messages})
    return rows
