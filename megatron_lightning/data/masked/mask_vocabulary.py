"""Special tokens and words of a tokenizer, for masked datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.text.tokenizer_kinds import NO_PAD
from megatron_lightning.errors import ConfigError

_CONTINUES = "##"
_STARTS = ("▁", "Ġ")
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("[BOS]", "<s>", "[CLS]"),
    "eos": ("[EOS]", "</s>", "[SEP]"),
})  # fmt: skip
"""Tokens by their usual texts, for tokenizers that do not name them."""


_SENTINELS = ("<extra_id_0>, <extra_id_1>, …",)


@dataclass(frozen=True)
class MaskVocabulary:
    """Ids of a tokenizer by their roles. None: the tokenizer has no such token."""

    pad: int
    """Padding, or :data:`NO_PAD`."""
    cls: int | None
    sep: int | None
    mask: int | None
    bos: int | None
    """First token of a decoder's input."""
    eos: int | None
    sentinels: tuple[int, ...]
    """Tokens that replace spans, in the order of use."""
    ids: tuple[int, ...]
    """All ids, in the order of random replacements."""
    continues: npt.NDArray[np.bool_]
    """Whether an id continues a word [v]."""
    origin: str = ""
    """Path or name of the tokenizer, for messages."""

    @classmethod
    def of(cls, tokenizer: Any) -> MaskVocabulary:
        """Return the vocabulary of a tokenizer of this package, or of one with the attributes of
        Megatron's: ``inv_vocab``, ``cls``, ``sep``, ``mask``, ``bos``, ``eos`` and
        ``additional_special_tokens_ids``.

        Raises:
            ConfigError: If the tokenizer does not say the texts of its ids.
        """
        texts = _texts(tokenizer)
        ids = {name: _id(tokenizer, name, texts) for name in _NAMES}
        pad = ids.pop("pad")
        ends = (ids["eos"], getattr(tokenizer, "eod", None))
        bos = ids.pop("bos")
        return cls(
            # Megatron's rule: an end of text is never taken for padding.
            pad=NO_PAD if pad is None or pad in ends else pad,
            bos=pad if bos is None else bos,  # as T5's decoder
            sentinels=_sentinels(tokenizer, texts),
            ids=tuple(texts),
            continues=_continuations(texts),
            origin=_origin(tokenizer),
            **ids,
        )

    def need(self, *names: str, use: str) -> None:
        """Check that the tokenizer has tokens.

        Raises:
            ConfigError: If a token is missing.
        """
        missing_names = [name for name in names if getattr(self, name) in (None, ())]
        if missing_names:
            usual = ", and ".join(
                " or ".join(_NAMES.get(name, _SENTINELS)) for name in missing_names
            )
            raise ConfigError(
                f"the tokenizer {self.origin} has no token for {', '.join(missing_names)}, and "
                f"{use} needs it. Set tokenizer_model to a tokenizer with {usual}."
            )


def _origin(tokenizer: Any) -> str:
    """Return the path or name of a tokenizer, or its class."""
    identifiers = _attribute(tokenizer, "unique_identifiers") or {}
    return str(identifiers.get("tokenizer_path") or type(tokenizer).__name__)


def _texts(tokenizer: Any) -> Mapping[int, str]:
    """Return the text of each id."""
    texts = getattr(tokenizer, "inv_vocab", None)
    if isinstance(texts, Mapping):
        return texts
    pieces: Callable[[], Sequence[str]] | None = getattr(tokenizer, "pieces", None)
    if not callable(pieces):
        raise ConfigError(
            f"the tokenizer {_origin(tokenizer)} does not say the texts of its ids, which tell "
            "where words begin. Set tokenizer_type to huggingface, json or sentencepiece, or give "
            "the class inv_vocab."
        )
    return dict(enumerate(pieces()))


def _id(tokenizer: Any, name: str, texts: Mapping[int, str]) -> int | None:
    token_id = _attribute(tokenizer, name)
    if token_id is None:
        token_id = _attribute(getattr(tokenizer, "backend", None), f"{name}_token_id")
    if token_id is not None:
        return None if token_id < 0 else int(token_id)
    by_text = {text: number for number, text in texts.items()} if texts else {}
    return next((by_text[text] for text in _NAMES[name] if text in by_text), None)


def _attribute(tokenizer: Any, name: str) -> Any:
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:  # tokenizers of Megatron
        return None


def _sentinels(tokenizer: Any, texts: Mapping[int, str]) -> tuple[int, ...]:
    ids = _attribute(tokenizer, "additional_special_tokens_ids")
    if ids is not None:
        return tuple(int(number) for number in ids)
    by_text = {text: number for number, text in texts.items()}
    sentinels = (by_text.get(f"<extra_id_{number}>") for number in count())
    return tuple(takewhile(lambda number: number is not None, sentinels))  # type: ignore[arg-type]


def _continuations(texts: Mapping[int, str]) -> npt.NDArray[np.bool_]:
    """Return which ids continue a word [v]: pieces with ## of a WordPiece vocabulary, or pieces
    without the mark of a word's start. In other vocabularies every piece is a word.
    """
    known_texts = {number: text for number, text in texts.items() if isinstance(text, str)}
    continues = np.zeros(max(known_texts, default=-1) + 1, bool)
    has_pieces = any(text.startswith(_CONTINUES) for text in known_texts.values())
    marks = [
        mark for mark in _STARTS if any(text.startswith(mark) for text in known_texts.values())
    ]
    for number, text in known_texts.items():
        if has_pieces:
            continues[number] = text.startswith(_CONTINUES)
        elif marks:
            continues[number] = not text.startswith(marks[0]) and not _is_special(text)
    return continues


def _is_special(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
