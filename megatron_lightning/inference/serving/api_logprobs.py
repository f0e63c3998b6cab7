"""Log-probabilities in answers of the OpenAI API: names, bytes and places of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from megatron_lightning.inference.commands.text_codec import Codec

_LEAST = -9999.0
"""Log-probability of tokens without a probability, as in OpenAI's answers. JSON has no infinity."""


class TokenPlaces:
    """Names of tokens, and their places in a text, as tokens come.

    A token that is no complete text is named by its bytes: two such tokens have different names.

    Args:
        codec: The tokenizer.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.names: list[str] = []
        self.offsets = [0]
        """Place of each token, and the length of the text behind the last token."""

    def extend(self, tokens: Sequence[int], text: str) -> None:
        """Add tokens. ``text``: text of all tokens so far."""
        for token in tokens:
            content = self._codec.bytes_of(token)
            # Tokenizers of the Llama 2 kind drop the space at the begin of a text.
            if self.offsets[-1] == 0 and content[:1] == b" " and text[:1] not in ("", " "):
                content = content[1:]
            is_text = token not in self._codec.special_ids
            length = len(self._characters.decode(content)) if is_text else 0
            self.names.append(_name_of(content))
            self.offsets.append(self.offsets[-1] + length)

    def num_within(self, length: int) -> int:
        """Return the number of tokens inside of the first ``length`` characters."""
        return sum(offset <= length for offset in self.offsets[1:])


def token_of(codec: Codec, token: int) -> dict[str, Any]:
    """Return name and bytes of a token in a chat."""
    content = codec.bytes_of(token)
    return {"token": _name_of(content), "bytes": list(content)}


def name_of(codec: Codec, token: int) -> str:
    """Return the name of a token."""
    return _name_of(codec.bytes_of(token))


def number_of(logprob: float) -> float:
    """Return a log-probability for JSON."""
    return max(logprob, _LEAST)


def _name_of(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
