"""Bytes of single tokens, in vocabularies of the package ``tokenizers``.

A token may be a part of a character: a piece of a byte-level alphabet, or a byte written as
``<0xE6>`` (byte fallback).
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of tokens by the rules of a tokenizer's decoder.

    Args:
        backend: A ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = dict(backend.get_added_tokens_decoder())
        # The state of a decoder is JSON: one rule, or a sequence of rules.
        rules = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        kinds = {rule.get("type") for rule in rules.get("decoders", [rules])}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds

    def is_fallback(self, token: int) -> bool:
        """Return whether a token is a byte of byte fallback."""
        return self._has_fallback and fallback_byte(self._backend.id_to_token(token)) is not None

    def __call__(self, token: int) -> bytes | None:
        """Return the bytes of a token. None: the piece alone does not tell the bytes."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._backend.id_to_token(token)
        if self._has_fallback and (byte := fallback_byte(piece)) is not None:
            return byte
        if not self._is_byte_level or piece is None:
            return None
        alphabet = _byte_alphabet()
        return bytes(alphabet[character] for character in piece if character in alphabet)


def fallback_byte(piece: str | None) -> bytes | None:
    """Return the byte of a piece such as ``<0xE6>``. None: the piece is no byte."""
    match = None if piece is None else _BYTE.fullmatch(piece)
    return None if match is None else bytes([int(match[1], 16)])


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the printable character of GPT-2's vocabulary -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + place) for place in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))
