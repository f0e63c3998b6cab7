"""Division of texts into sentences, for masked datasets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_lightning.errors import ConfigError
from megatron_lightning.optional import require

SentenceSplitter = Literal["rules", "lines", "punkt"]

_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")
_OPENING = "\"'\u201c\u2018\u00ab(\\["
_CLOSING = "\"'\u201d\u2019\u00bb)\\]"
# The end of a sentence before white space and no lower-case letter, or of East Asian scripts.
_ENDS = re.compile(
    rf"(?P<end>[.!?\u2026]+[{_CLOSING}]*)\s+(?=[{_OPENING}]*[^\W_])(?![{_OPENING}]*[a-z\u00df-\u00ff])"
    "|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*\\s*"
)
_ABBREVIATIONS = frozenset([
    "mr", "mrs", "ms", "dr", "prof", "st", "mt", "rev", "hon", "gen", "col", "capt", "lt", "sgt",
    "gov", "sen", "rep", "pres", "vs", "cf", "fig", "figs", "eq", "eqs", "no", "nos", "vol", "vols",
    "pp", "ch", "sec", "approx", "dept", "univ", "est", "e.g", "i.e", "u.s", "u.k", "u.n", "jan",
    "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
])  # fmt: skip
"""Words before a full stop that ends no sentence. "etc." and "p.m." often end one."""


@dataclass(frozen=True)
class SentenceRule:
    """How texts become sentences. Small, because pieces of workers carry the rule."""

    splitter: SentenceSplitter = "rules"
    """rules: at the ends of sentences and paragraphs, without data of a language. lines: a sentence
    a line. punkt: nltk's tokenizer, as in Megatron."""
    lang: str = "english"
    """Language of punkt."""

    def __post_init__(self) -> None:
        if self.splitter not in get_args(SentenceSplitter):
            raise ConfigError(
                f"sentence_splitter={self.splitter!r}: must be one of "
                f"{', '.join(get_args(SentenceSplitter))}"
            )

    def load(self) -> Callable[[str], list[str]]:
        """Return the function from a text to its sentences, without white space around them.

        Raises:
            ConfigError: If nltk or its data are missing.
        """
        if self.splitter == "punkt":
            return _punkt(self.lang)
        return str.splitlines if self.splitter == "lines" else by_rules


def by_rules(text: str) -> list[str]:
    """Return the sentences of a text: divided behind ``.``, ``!``, ``?`` and ``…`` with white space
    and no lower-case letter behind, behind the marks of East Asian scripts, and at blank lines.
    Initials and usual English abbreviations end no sentence.
    """
    sentences = (one.strip() for part in _PARAGRAPHS.split(text) for one in _divided(part))
    return [sentence for sentence in sentences if sentence]


def _divided(text: str) -> Iterator[str]:
    begin = 0
    for match in _ENDS.finditer(text):
        if match["end"] is None or not _is_abbreviated(text[begin : match.start()], match["end"]):
            yield text[begin : match.end()]
            begin = match.end()
    yield text[begin:]


def _is_abbreviated(before: str, end: str) -> bool:
    """Return whether a full stop belongs to the word before it."""
    if end != "." or not before or before[-1].isspace():
        return False
    word = before.rsplit(None, 1)[-1].lstrip(_OPENING).lower()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return is_initial or word in _ABBREVIATIONS


def _punkt(lang: str) -> Callable[[str], list[str]]:
    nltk = require("nltk.tokenize", "sentence_splitter=punkt", "set sentence_splitter=rules")
    try:
        tokenizer: Any = nltk.PunktTokenizer(lang)
    except (LookupError, OSError) as error:
        raise ConfigError(
            f"sentence_splitter=punkt: nltk has no data for lang={lang!r}; `python -m "
            "nltk.downloader punkt_tab`, or set sentence_splitter=rules"
        ) from error
    split: Callable[[str], list[str]] = tokenizer.tokenize
    return split
