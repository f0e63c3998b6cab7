"""Options of a command of ``pretrain_gpt.py``, by name with underscores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.names.lookup import options as known_options
from megatron_lightning.recipe_reading.from_megatron.expressions import evaluate

DEFAULTS = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --nnodes 1 --micro-batch-size 1
--seed 1234 --attention-dropout 0.1 --hidden-dropout 0.1 --normalization LayerNorm
--position-embedding-type learned_absolute --make-vocab-size-divisible-by 128
--optimizer adam --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.999 --clip-grad 1.0
--lr-decay-style linear --lr-warmup-iters 0 --min-lr 0.0
--log-interval 100 --eval-iters 100 --eval-interval 1000 --num-workers 2
"""
"""Defaults of Megatron for options whose defaults differ here."""

MLA_DEFAULTS = "--kv-lora-rank 32 --rotary-scaling-factor 1.0 --mscale 1.0 --mscale-all-dim 0.0"
"""Further defaults with ``--multi-latent-attention``."""


class Options:
    """Options of a command. Whoever converts an option takes it; what nobody took goes by the table
    of names.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.given = _by_name(words)
        """Name -> its words, as typed."""
        defaults = _by_name(DEFAULTS.split())
        if "multi_latent_attention" in self.given:
            defaults |= _by_name(MLA_DEFAULTS.split())
        self._words = defaults | self.given
        self.left: list[str] = []
        """Options that are not carried over."""

    def __contains__(self, name: str) -> bool:
        return name in self._words

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, and keep it from the table. Without the option: the
        default.
        """
        return value_of(name, self._words.pop(name)) if name in self._words else default

    def look(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, and leave it to the table."""
        return value_of(name, self._words[name]) if name in self._words else default

    def take_words(self, name: str) -> list[str]:
        """Return the words of an option, as they are."""
        return self._words.pop(name, [])

    def leave(self, *names: str) -> None:
        """Note the options of these names that are given as not carried over."""
        self.left += [name for name in names if self._words.pop(name, None) is not None]

    def rest(self) -> dict[str, list[str]]:
        """Return the options that nobody took."""
        return self._words


def launch_options(words: Sequence[str]) -> list[str]:
    """Return torchrun's options with a counterpart. Its others stay torchrun's."""
    given, known = _by_name(words), known_options()
    return [
        word
        for name in given
        if name in known and known[name].is_option
        for word in (f"--{name}", *given[name][:1])
    ]


def value_of(name: str, words: Sequence[str]) -> Any:
    """Return a value: true for an option without words, a number, a text, or a list.

    Raises:
        ConfigError: If a list of layers cannot be read.
    """
    values = [_scalar(name, word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _scalar(name: str, word: str) -> Any:
    if re.fullmatch(r"\(*\[.*", word):
        try:
            return evaluate(word)
        except ConfigError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """Return option -> its words. As in argparse, the last one of a name wins."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = found[name.replace("-", "_")] = [_bare(value)] if equals else []
        else:
            current.append(_bare(word))
    return found


def _bare(word: str) -> str:
    """Return a word without quotes that the shell passed on, as in "--split '99,1,0'"."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word
