"""Fill-in-the-middle: documents are rearranged so that a causal model learns to write the text
between two texts (arXiv:2207.14255; Megatron's ``GPTFIMDataset``).

A document is cut at two random characters into prefix, middle and suffix, and becomes

    PRE prefix SUF suffix MID middle        (PSM)
    PRE SUF suffix MID prefix middle        (SPM)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.text.tokenizers import Tokenizer
from megatron_lightning.errors import ConfigError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Options of fill-in-the-middle, with Megatron's names. With a tokenizer the object is a
    function of the tokens of a sample.

    Raises:
        ConfigError: If a rate is no probability, an option is missing, or a token is not one id of
            the tokenizer.
    """

    fim_rate: float
    """Probability that a document is rearranged."""
    fim_spm_rate: float = 0.5
    """Probability that a rearranged document has the suffix first (SPM), else PSM."""
    fim_split_sample: str | None = None
    """Token between parts of a document, such as files. The parts are rearranged one by one. None:
    documents have no parts."""
    fim_fragment_rate: float | None = None
    """Probability that a part of a document is rearranged, once the document is chosen."""
    fim_no_prefix: str | None = None
    """Texts that begin with these characters stay as they are."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token PRE."""
    fim_middle_token: str = "<fim_middle>"
    """Token MID."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token SUF."""
    fim_pad_token: str = "<fim_pad>"
    """Token behind a sample that has become shorter. Has no loss."""
    fim_eod_token: str | None = None
    """Token at the end of a document. None: the tokenizer's."""
    tokenizer: Any = None
    """The tokenizer of the data. None: the data module's tokenizer."""

    def __post_init__(self) -> None:
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            rate = getattr(self, name)
            if rate is None and name == "fim_fragment_rate":
                continue
            if not isinstance(rate, int | float) or not 0.0 <= rate <= 1.0:
                raise ConfigError(f"{name}={rate!r} is no probability. Set it between 0 and 1.")
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            raise ConfigError(
                f"fim_split_sample={self.fim_split_sample!r} and fim_fragment_rate="
                f"{self.fim_fragment_rate}: parts of a document need both. Set both, or neither."
            )
        if self.tokenizer is not None:
            object.__setattr__(self, "_ids", _SpecialIds(self, self.tokenizer))

    def of(self, tokenizer: Tokenizer) -> FillInTheMiddle:
        """Return the function for the data of a tokenizer.

        Raises:
            ConfigError: If a token is not one id of the tokenizer.
        """
        return replace(self, tokenizer=tokenizer)

    @property
    def settings(self) -> dict[str, Any]:
        """The options, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokenizer"}

    @property
    def pad_id(self) -> int:
        """Id of the padding."""
        return self._special.pad

    def check_vocabulary(self, num_ids: int) -> None:
        """Check that the model has the ids of the tokens between texts.

        Raises:
            ConfigError: If an id is outside of the vocabulary.
        """
        largest = self._special.largest
        if largest >= num_ids:
            raise ConfigError(
                f"a token of fim has id {largest}, and vocab_size={num_ids}. Set vocab_size to "
                f"{largest + 1} or more."
            )

    @property
    def _special(self) -> _SpecialIds:
        ids: _SpecialIds | None = getattr(self, "_ids", None)
        if ids is None:
            raise ConfigError(
                "fill-in-the-middle cuts texts at characters, and has no tokenizer. Set "
                "tokenizer_model of the data module, or tokenizer."
            )
        return ids

    def __call__(
        self, tokens: npt.ArrayLike, random: np.random.RandomState, length: int | None = None
    ) -> Ids:
        """Return a sample with rearranged documents.

        Args:
            tokens: Ids of the sample [n].
            random: Draws the documents, the cuts and the forms.
            length: Ids returned: more are cut off, fewer are padded. None: n.
        """
        ids, special = np.asarray(tokens, np.int64), self._special
        parts = _each_part(ids, special.eod, lambda document: self._document(document, random))
        result, num_tokens = np.concatenate(parts), len(ids) if length is None else length
        padding = np.full(max(0, num_tokens - len(result)), special.pad, np.int64)
        return np.concatenate([result[:num_tokens], padding])

    def _document(self, ids: Ids, random: np.random.RandomState) -> Ids:
        """Return a document, rearranged as a whole or part by part."""
        split = self._special.split
        if split is None or not (ids == split).any():
            return self._rearranged(ids, self.fim_rate, random)
        if not random.binomial(1, self.fim_rate):
            return ids
        rate = self.fim_fragment_rate or 0.0
        parts = _each_part(ids, split, lambda part: self._rearranged(part, rate, random))
        return np.concatenate(parts)

    def _rearranged(self, ids: Ids, rate: float, random: np.random.RandomState) -> Ids:
        if not random.binomial(1, rate):
            return ids
        special, tokenizer = self._special, self.tokenizer
        text: str = tokenizer.decode([i for i in ids.tolist() if i not in special.hidden])
        if self.fim_no_prefix is not None and text.startswith(self.fim_no_prefix):
            return ids
        begin, end = sorted(random.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            tokenizer.encode(part) for part in (text[:begin], text[begin:end], text[end:])
        )
        if random.binomial(1, self.fim_spm_rate):
            order = [special.pre, special.suf, *suffix, special.mid, *prefix, *middle]
        else:
            order = [special.pre, *prefix, special.suf, *suffix, special.mid, *middle]
        return np.array(order, np.int64)


class _SpecialIds:
    """Ids of the tokens between texts."""

    def __init__(self, fim: FillInTheMiddle, tokenizer: Tokenizer) -> None:
        self.pre = _id_of(tokenizer, "fim_prefix_token", fim.fim_prefix_token)
        self.mid = _id_of(tokenizer, "fim_middle_token", fim.fim_middle_token)
        self.suf = _id_of(tokenizer, "fim_suffix_token", fim.fim_suffix_token)
        self.pad = _id_of(tokenizer, "fim_pad_token", fim.fim_pad_token)
        self.eod = tokenizer.eod
        if fim.fim_eod_token is not None:
            self.eod = _id_of(tokenizer, "fim_eod_token", fim.fim_eod_token)
        self.largest = max(self.pre, self.mid, self.suf, self.pad, self.eod)
        """Largest id written into samples."""
        self.split: int | None = None
        if fim.fim_split_sample is not None:
            self.split = _id_of(tokenizer, "fim_split_sample", fim.fim_split_sample)
        specials = getattr(tokenizer, "special_ids", ())
        self.hidden = frozenset((self.pre, self.mid, self.suf, self.pad, self.eod, *specials))
        """Ids without a text."""


def _id_of(tokenizer: Tokenizer, option: str, token: str) -> int:
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise ConfigError(
            f"{option}={token!r} is not one token of {dict(tokenizer.unique_identifiers)}. Set it "
            "to a token of the tokenizer that wrote the data."
        )
    return token_id


def _each_part(ids: Ids, separator: int, change: Callable[[Ids], Ids]) -> list[Ids]:
    """Return the changed parts between separators. As in Megatron, an empty part loses its
    separator, and the rest behind the last separator is changed even if empty.
    """
    parts: list[Ids] = []
    begin = 0
    places: Sequence[int] = np.flatnonzero(ids == separator).tolist()
    for place in places:
        if place > begin:
            parts += [change(ids[begin:place]), ids[place : place + 1]]
        begin = place + 1
    return [*parts, change(ids[begin:])]
