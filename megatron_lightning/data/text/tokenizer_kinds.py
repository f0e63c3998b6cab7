"""Further tokenizers: ``tokenizer.json`` without ``transformers``, tiktoken, bytes, ids as text.

Packages are imported at the creation of a tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.data.chat.token_bytes import TokenBytes
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.file_names import TOKENIZER, TOKENIZER_CONFIG
from megatron_lightning.optional import require

NO_PAD = -1
"""Padding id of a tokenizer without padding, or with the end of document as padding: no real token
is ever masked."""
_END = "<|endoftext|>"


class PlainTokenizer(ABC):
    """Base of tokenizers of your own: texts one by one, no padding, no special tokens.

    A subclass sets ``vocab_size`` and ``eod``, and defines ``encode`` and ``decode``.
    """

    vocab_size: int
    eod: int
    pad: int = NO_PAD

    @property
    def identity(self) -> str:
        """Digest of :attr:`unique_identifiers`. Override it if files decide about the ids."""
        return _digest(repr(sorted(self.unique_identifiers.items())).encode())

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and size."""
        return {"class": type(self).__qualname__, "vocab_size": self.vocab_size}

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token. None: there is no such token."""
        return None


class JsonTokenizer(PlainTokenizer):
    """A ``tokenizer.json`` of Hugging Face, read by the package ``tokenizers`` alone.

    Args:
        model: The file, or a folder with it.
        eod: Token at the end of a document. Default: ``eos_token`` of ``tokenizer_config.json`` in
            the same folder, else ``sep_token``.

    Raises:
        ConfigError: If the package is missing, or no token ends documents.
        DataError: If the file cannot be read.
    """

    def __init__(self, model: str | Path, eod: str | None = None) -> None:
        tokenizers = require("tokenizers", "tokenizer_type=json")
        path = Path(model) / TOKENIZER if Path(model).is_dir() else Path(model)
        self._path = str(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(self._path)
        except Exception as error:  # the package raises plain exceptions
            raise DataError(
                f"{path}: is no tokenizer.json ({error}). Set tokenizer_model to one."
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.token_bytes = TokenBytes(self._tokenizer)
        """Bytes of a token. None: they are not known."""
        end = eod or _end_in(path.with_name(TOKENIZER_CONFIG))
        end_id = None if end is None else self._tokenizer.token_to_id(end)
        if end_id is None:
            raise ConfigError(
                f"{path}: {end or 'no eos_token'} ends documents, and is not one of its tokens. "
                "Set eos_token in tokenizer_config.json beside it, or eod."
            )
        self.eod: int = end_id
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    @property
    def identity(self) -> str:
        """Digest of the vocabulary and the rules."""
        return _digest(self.to_json().encode())

    def to_json(self) -> str:
        """Return the vocabulary and the rules as ``tokenizer.json``."""
        rules: str = self._tokenizer.to_str()
        return rules

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and path."""
        return {"class": type(self).__name__, "tokenizer_path": self._path}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Return the id of a token. None: there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without a text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def is_byte(self, token: int) -> bool:
        """Return whether an id is a byte of byte fallback."""
        return self.token_bytes.is_fallback(token)

    def pieces(self) -> list[str]:
        """Return the piece of each id."""
        return [self._tokenizer.id_to_token(number) or "" for number in range(self.vocab_size)]


class TiktokenTokenizer(PlainTokenizer):
    """A file of ranks of ``tiktoken``. The file has no pattern to split texts by. Another pattern
    gives other ids, so the pattern is required.

    Args:
        path: File of ranks (``.tiktoken``).
        pattern: Regular expression that splits texts before they are merged.
        special_tokens: Special token -> id. Default: the end of documents behind the ranks.
        eod: Special token at the end of a document.

    Raises:
        ConfigError: If the package is missing, or ``eod`` is no special token.
        DataError: If the file cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str,
        special_tokens: dict[str, int] | None = None,
        eod: str = _END,
    ) -> None:
        tiktoken = require("tiktoken", "TiktokenTokenizer")
        load = importlib.import_module("tiktoken.load")
        try:
            ranks = load.load_tiktoken_bpe(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: is no file of ranks ({error}). Set path to one.") from error
        self._special = special_tokens or {eod: len(ranks)}
        if eod not in self._special:
            raise ConfigError(
                f"eod={eod!r} is none of the special tokens {sorted(self._special)}. Add it to "
                "special_tokens with its id."
            )
        numbers = list(self._special.values())
        used = {*ranks.values()} & {*numbers}
        if used or len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"special_tokens={self._special}: "
                + (f"{sorted(used)} are ranks of {path}" if used else "two tokens share an id")
                + f", so that an id would have two texts. Set ids from {len(ranks)} on."
            )
        self._encoding: Any = tiktoken.Encoding(
            Path(path).name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens=self._special,
        )
        self._path, self._content = path, repr((sorted(ranks.items()), pattern, self._special))
        self.eod = self._special[eod]
        self.vocab_size: int = self._encoding.max_token_value + 1

    @property
    def identity(self) -> str:
        """Digest of ranks, pattern and special tokens."""
        return _digest(self._content.encode())

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without a text."""
        return frozenset(self._special.values())

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and path."""
        return {"class": type(self).__name__, "tokenizer_path": self._path}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``. Special tokens in the text are plain text."""
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        encodings: list[list[int]] = self._encoding.encode_ordinary_batch(
            list(texts), num_threads=1
        )
        return encodings

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Incomplete characters become U+FFFD."""
        return str(self._encoding.decode(list(ids)))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return bytes(self._encoding.decode_single_token_bytes(token))

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token. None: there is no such token."""
        return self._special.get(token)


class ByteTokenizer(PlainTokenizer):
    """The bytes of UTF-8 as ids 0 to 255, and special tokens from 256 on.

    Args:
        special_tokens: Tokens from 258 on, behind the end of documents and the padding.
    """

    eod, pad = 256, 257

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        self._special = {token: 258 + place for place, token in enumerate(special_tokens)}
        self.vocab_size = 258 + len(self._special)

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and special tokens."""
        return {"class": type(self).__name__, "special_tokens": list(self._special)}

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Incomplete characters become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of an id."""
        return bytes([token]) if token < 256 else b""

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token. None: there is no such token."""
        return self._special.get(token)


class NullTokenizer(PlainTokenizer):
    """Ids written as text, for benchmarks (Megatron's ``NullTokenizer``).

    Args:
        vocab_size: Number of ids, without the end of documents behind them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids in ``text``, divided by blanks.

        Raises:
            DataError: If a word is no id below the end of documents.
        """
        words = text.split()
        wrong_word = next((w for w in words if not w.isdecimal() or int(w) >= self.eod), None)
        if wrong_word is not None:
            raise DataError(
                f"{wrong_word!r} is no id from 0 to {self.eod - 1}: tokenizer_type=null reads "
                "texts of ids. Set input to such texts, or another tokenizer."
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return ids as text."""
        return " ".join(map(str, ids))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _end_in(path: Path) -> str | None:
    """Return the token at the end of a text in a ``tokenizer_config.json``."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        end = config.get("eos_token") or config.get("sep_token")  # of BERT
    except (OSError, ValueError):
        return None
    return end.get("content") if isinstance(end, dict) else end
