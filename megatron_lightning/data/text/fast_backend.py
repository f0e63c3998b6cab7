"""Optional fast backend of ``preprocess``: gigatoken, compared with the tokenizer while it runs.

gigatoken keeps the ids of words in a cache without a limit, so that the backend is made again after
some text. Only byte-level BPE is accepted: of SentencePiece models, gigatoken 0.10 encodes one text
in thousands to other ids, and a comparison of some texts would miss the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatron_lightning.data.text.tokenizer_kinds import PlainTokenizer
from megatron_lightning.data.text.tokenizers import Tokenizer, TokenizerType
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.optional import require

TokenizerBackend = Literal["reference", "gigatoken"]
_COMPARED = 64
"""One batch in so many is encoded by the tokenizer as well."""
_RENEWED = 1 << 26
"""Characters after which the backend is made again."""
_ODD_TEXTS = (
    "", " ", "  \n\n\t x", "\r\n\r\n  a", "\x00\x01\x7f", "don't I'LL we've", "123456789 १२३",
    "naïve ☕", "🏳️\u200d🌈 한국어 中文 عربى", "\u200b\u00a0\ufeff x", "e\u0301 \u00e9", "a" * 99,
)  # fmt: skip


class OtherIdsError(DataError):
    """A text that the backend encodes to other ids.

    Args:
        message: First difference.
        index: Position of the text in the batch.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class GigatokenTokenizer(PlainTokenizer):
    """A tokenizer with batches encoded by gigatoken. The first batch and every 64th are encoded by
    the tokenizer as well, and must be equal.

    Args:
        reference: A ``huggingface`` or ``json`` tokenizer.

    Raises:
        ConfigError: If gigatoken is missing, or cannot stand for the tokenizer.
    """

    def __init__(self, reference: Tokenizer) -> None:
        self._gigatoken = require("gigatoken", "tokenizer_backend=gigatoken")
        self._reference = reference
        self._rules = _rules(reference)
        self.vocab_size, self.eod, self.pad = reference.vocab_size, reference.eod, reference.pad
        self._num_calls = self._num_characters = 0
        self._compared = _COMPARED
        self._backend = self._make()
        specials = [token["content"] for token in json.loads(self._rules)["added_tokens"]]
        odd = [*_ODD_TEXTS, *(f"a {token}{token} b" for token in specials)]
        try:
            self._compare(odd, self._encoded(odd))
        except OtherIdsError as error:
            raise ConfigError(
                f"tokenizer_backend=gigatoken: of {odd[error.index]!r}, {error}. Leave "
                "tokenizer_backend out."
            ) from error

    @property
    def identity(self) -> str:
        """Digest of the tokenizer: the ids are equal."""
        return self._reference.identity

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and origin of the tokenizer."""
        return self._reference.unique_identifiers

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` by the tokenizer."""
        return self._reference.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text.

        Raises:
            OtherIdsError: If a compared text has other ids.
        """
        if self._num_characters >= _RENEWED:
            self._num_calls = self._num_characters = 0
            self._backend = self._make()
        ids = self._encoded(texts)
        if self._num_calls % self._compared == 0:
            self._compare(texts, ids)
        self._num_calls += 1
        self._num_characters += sum(map(len, texts))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` by the tokenizer."""
        return self._reference.decode(ids)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token. None: there is no such token."""
        return self._reference.token_id(token)

    def _make(self) -> Any:
        try:
            backend = self._gigatoken.Tokenizer.from_json(self._rules)
        except Exception as error:  # the package raises plain exceptions
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"tokenizer_backend=gigatoken: the package cannot read this tokenizer ({reason}). "
                "Leave tokenizer_backend out."
            ) from error
        if not isinstance(backend.backend, self._gigatoken.gigatoken_rs.BPETokenizer):
            raise ConfigError(
                "tokenizer_backend=gigatoken reads byte-level BPE alone, and this tokenizer falls "
                "back to bytes, as SentencePiece models do: some texts would get other ids. Leave "
                "tokenizer_backend out."
            )
        return backend

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        # The caller has a process for each core.
        ids: list[list[int]] = self._backend.encode_batch_list(list(texts), parallel=False)
        return ids

    def _compare(self, texts: Sequence[str], ids: Sequence[list[int]]) -> None:
        for index, (ours, theirs) in enumerate(
            zip(ids, self._reference.encode_batch(texts), strict=True)
        ):
            if ours == theirs:
                continue
            self._compared = 1  # a repetition that counts lines meets the text again
            pairs = zip(ours, theirs, strict=False)
            length = min(len(ours), len(theirs))
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
            raise OtherIdsError(
                f"gigatoken makes {len(ours)} ids, the tokenizer {len(theirs)}, and they differ "
                f"from id {place} on ({ours[place : place + 3]} for {theirs[place : place + 3]})",
                index,
            )


def with_backend(tokenizer: Tokenizer, backend: TokenizerBackend) -> Tokenizer:
    """Return a tokenizer that encodes batches by a backend.

    Raises:
        ConfigError: If the backend is missing, or cannot stand for the tokenizer.
    """
    return tokenizer if backend == "reference" else GigatokenTokenizer(tokenizer)


def check_backend(backend: TokenizerBackend, tokenizer_type: TokenizerType) -> None:
    """Check that a kind of tokenizers has a backend, before the input is read.

    Raises:
        ConfigError: If the kind has none.
    """
    if backend != "reference" and tokenizer_type not in {"huggingface", "json"}:
        raise ConfigError(
            f"tokenizer_backend={backend} reads byte-level BPE of a tokenizer.json alone, and "
            f"tokenizer_type is {tokenizer_type}. Set it to huggingface or json, or leave "
            "tokenizer_backend out."
        )


def _rules(tokenizer: Tokenizer) -> str:
    """Return the ``tokenizer.json`` of a tokenizer."""
    to_json = getattr(tokenizer, "to_json", None)
    rules: str | None = None if to_json is None else to_json()
    if rules is None:
        raise ConfigError(
            "tokenizer_backend=gigatoken reads a tokenizer.json, and this tokenizer has none. "
            "Leave tokenizer_backend out."
        )
    return rules
