"""A tokenizer with the characters of every token, and the special tokens of templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.text.auto_tokenizer import auto_tokenizer
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.optional import require

Ids = npt.NDArray[np.int32]


class ChatTokenizer:
    """A fast tokenizer of ``transformers`` or ``tokenizers``.

    Args:
        tokenizer: The tokenizer: an object of ``transformers`` or ``tokenizers``.
        source: Folder or name of the tokenizer's origin, for messages.
        new_tokens: Texts to add as new tokens.

    Raises:
        ConfigError: If the tokenizer does not report the characters of a token.
    """

    def __init__(self, tokenizer: Any, source: str = "", *, new_tokens: Sequence[str] = ()) -> None:
        require("transformers", "chat data")
        from transformers import PreTrainedTokenizerBase

        self.source = source or type(tokenizer).__name__
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = _from_tokenizers(tokenizer, self.source)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"tokenizer {self.source} is a {type(tokenizer).__name__}, which does not say "
                "which characters a token has, so that answers cannot be told from prompts. Use a "
                "tokenizer with a tokenizer.json (a fast one)."
            )
        vocabulary = tokenizer.get_vocab() if new_tokens else {}
        if new_tokens:
            tokenizer.add_tokens(list(new_tokens), special_tokens=True)
        self.tokenizer: Any = tokenizer
        self.added: Mapping[str, int] = {
            text: tokenizer.convert_tokens_to_ids(text)
            for text in new_tokens
            if text not in vocabulary
        }
        """Text -> id of the new tokens that the tokenizer did not have."""
        # The property makes a table in every call.
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        # The tokenizer's settings of padding and truncation change with every call, and are not
        # wanted.
        serialized = tokenizer.backend_tokenizer.to_str()
        self._backend: Any = type(tokenizer.backend_tokenizer).from_str(serialized)
        self._backend.no_padding()
        self._backend.no_truncation()
        # Only adds special tokens, or cuts spaces off the characters of tokens.
        self._backend.post_processor = None
        self._serialized = serialized

    @classmethod
    def load(
        cls, source: Any, *, new_tokens: Sequence[str] = (), trust_remote_code: bool = False
    ) -> ChatTokenizer:
        """Return the tokenizer in ``source`` or named by ``source``.

        Args:
            source: A folder, a ``tokenizer.json``, a name on the Hugging Face Hub, or a tokenizer.
            new_tokens: Texts to add as new tokens.
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: If ``transformers`` is not installed, or the tokenizer cannot be used.
            DataError: If none can be loaded.
        """
        require("transformers", "chat data")
        if not isinstance(source, str | Path):
            return cls(source, new_tokens=new_tokens)
        try:
            if str(source).endswith(".json"):
                loaded = _fast("tokenizer_file", str(source))
            else:
                loaded = auto_tokenizer(str(source), trust_remote_code=trust_remote_code)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise DataError(
                f"tokenizer={source}: no tokenizer can be loaded from here "
                f"({type(error).__name__}: {error}); set it to a folder with a tokenizer.json, or "
                "to a name on the Hugging Face Hub (HF_HUB_OFFLINE=1 reads its cache only)"
            ) from error
        return cls(loaded, str(source), new_tokens=new_tokens)

    def __len__(self) -> int:
        return len(self.tokenizer)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token -> id, of all tokens."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The tokenizer's template of conversations."""
        template: str | dict[str, str] | None = self.tokenizer.chat_template
        return template or None

    @property
    def special_tokens(self) -> Mapping[str, Any]:
        """Text of the special tokens by the names used in templates."""
        return dict(self.tokenizer.special_tokens_map)

    @property
    def padding(self) -> int:
        """Id for filling rows. No code searches for this id: many tokenizers use a real token."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(int(one) for one in candidates if one is not None)

    @cached_property
    def begin(self) -> list[int]:
        """Ids put before plain text by the tokenizer."""
        bos = self.tokenizer.bos_token_id
        added = self.tokenizer("").input_ids
        return [bos] if bos is not None and list(added[:1]) == [bos] else []

    @property
    def end(self) -> int:
        """Id at the end of plain text.

        Raises:
            ConfigError: If there is none.
        """
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(
                f"tokenizer {self.source} has no eos_token, with which plain text has to end; set "
                "eos_token in its tokenizer_config.json"
            )
        return int(eos)

    def is_added(self, token: int) -> bool:
        """Return whether an id belongs to an added token, such as an end of turn."""
        return token in self._added_ids

    @property
    def identity(self) -> str:
        """Digest of all inputs to the ids. Equal for two copies of a folder."""
        special = json.dumps({k: str(v) for k, v in self.special_tokens.items()}, sort_keys=True)
        return hashlib.sha256((self._serialized + special).encode()).hexdigest()

    def is_equal(self, other: ChatTokenizer) -> bool:
        """Return whether another tokenizer has the same ids and the same chat template."""
        return (self.identity, self.chat_template) == (other.identity, other.chat_template)

    def encode(self, texts: Sequence[str]) -> list[tuple[Ids, npt.NDArray[np.int64]]]:
        """Return ids [n] and the characters [n, 2] of every token of each text: the first one, and
        the one behind the last.

        No token is added: templates write the special tokens themselves.
        """
        return [
            (
                np.array(encoding.ids, np.int32),
                np.array(encoding.offsets, np.int64).reshape(-1, 2),
            )
            for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def _from_tokenizers(tokenizer: Any, source: str) -> Any:
    require("tokenizers", "chat data")
    from tokenizers import Tokenizer

    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            f"tokenizer is a {source}, which does not say which characters a token has; set it to "
            "a folder with a tokenizer.json, a name on the Hugging Face Hub, or a fast tokenizer "
            "of transformers"
        )
    return _fast("tokenizer_object", tokenizer)


def _fast(keyword: str, value: Any) -> Any:
    """Return a tokenizer of ``transformers`` around a tokenizer of ``tokenizers``."""
    require("transformers", "chat data")
    import transformers

    make: Any = transformers.PreTrainedTokenizerFast
    return make(**{keyword: value})
