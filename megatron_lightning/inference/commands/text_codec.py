"""Texts and conversations as token ids, and back, by the tokenizer of a model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_lightning.bridge.folders.hub import find_file
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.checkpoint.text_record import end_tokens
from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.token_bytes import TokenBytes
from megatron_lightning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerType,
    huggingface_tokenizer,
    load_tokenizer,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG, GENERATION_CONFIG
from megatron_lightning.inference.engine.continuation import text_behind

Message = Mapping[str, Any]
"""``role`` and ``content`` of a turn of a conversation, and ``tool_calls``."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""No further variables of a chat template."""


class Codec(Protocol):
    """Token ids of texts."""

    name: str
    """Name in messages."""
    vocab_size: int
    """Number of ids, from 0."""
    prefix: int
    """Id before a text without a context: a begin token, or the end of the previous text."""
    stops: tuple[int, ...]
    """Ids at the end of a text."""
    special_ids: frozenset[int]
    """Ids without a text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the tokenizer's ids before a text. An empty prompt gives
        the end of a document.
        """
        ...

    def ids(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. ``special``: with the tokenizer's added ids."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids. ``special``: with the names of special ids."""
        ...

    def text_of(self, token: int) -> str:
        """Return the text of an id, special ids included."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of an id in the middle of a text, special ids included."""
        ...

    def is_byte(self, token: int) -> bool:
        """Return whether an id is a byte of byte fallback, such as ``<0xE6>``."""
        ...

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return a conversation as a text. The model answers the text, or continues the last
        message.

        Args:
            messages: The conversation.
            continues: Whether the model continues the last message.
            tools: Functions that the model may call, in OpenAI's form.
            variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
            ConfigError: If there is no template, or the template refuses the messages, or does not
                use a variable.
        """
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation for the model to answer, by the chat template.

        Raises:
            ConfigError: If there is no template, or the template refuses the messages.
        """
        ...


class PlainCodec:
    """Codec of a tokenizer of ours. Nothing is put before a text.

    Args:
        tokenizer: The tokenizer.
        name: Name of the tokenizer in messages.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size = tokenizer.vocab_size
        self.prefix = tokenizer.eod
        self.stops: tuple[int, ...] = (tokenizer.eod,)
        self.special_ids: frozenset[int] = getattr(tokenizer, "special_ids", frozenset())
        pieces: list[str] = getattr(tokenizer, "pieces", list)() if self.special_ids else []
        self._names = {token: pieces[token] for token in self.special_ids if token < len(pieces)}
        # Tokenizers of your own need not know the bytes of their tokens.
        self._bytes: Callable[[int], bytes | None] | None = getattr(tokenizer, "token_bytes", None)
        self._is_byte: Callable[[int], bool] | None = getattr(tokenizer, "is_byte", None)

    def encode(self, text: str) -> list[int]:
        """See :class:`Codec`."""
        return self._tokenizer.encode(text) or [self._tokenizer.eod]

    def ids(self, text: str, *, special: bool) -> list[int]:
        """See :class:`Codec`. No ids are added to a text."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See :class:`Codec`."""
        if not special or self.special_ids.isdisjoint(ids):
            return self._tokenizer.decode([one for one in ids if one not in self.special_ids])
        runs = itertools.groupby(ids, self.special_ids.__contains__)
        return "".join(
            "".join(map(self.text_of, run)) if is_special else self._tokenizer.decode(list(run))
            for is_special, run in runs
        )

    def text_of(self, token: int) -> str:
        """See :class:`Codec`."""
        name = self._names.get(token) or self._tokenizer.decode([token])
        return name or f"<{token}>"

    def bytes_of(self, token: int) -> bytes:
        """See :class:`Codec`."""
        if token in self.special_ids:
            return self.text_of(token).encode()
        known = None if self._bytes is None else self._bytes(token)
        return _behind_letter(self, token) if known is None else known

    def is_byte(self, token: int) -> bool:
        """See :class:`Codec`."""
        return self._is_byte is not None and self._is_byte(token)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Refuse: there is no template."""
        raise self._without_template()

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Refuse: there is no template."""
        raise self._without_template()

    def _without_template(self) -> ConfigError:
        return ConfigError(
            f"{self.name} is a tokenizer without a chat template. Set tokenizer_type to "
            "huggingface and tokenizer_model to a folder with a chat template, or generate without "
            "chat."
        )


class HuggingFaceCodec:
    """Codec of a tokenizer of ``transformers``.

    Args:
        tokenizer: The tokenizer.
        name: Name of the tokenizer in messages.
        stops: Ids at the end of a text, beside the tokenizer's own end of a sequence.
    """

    def __init__(self, tokenizer: Any, name: str, stops: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        """The tokenizer of ``transformers``."""
        self.name = name
        self.vocab_size = len(tokenizer)
        begin = tokenizer.bos_token_id
        self.prefix: int = (tokenizer.eos_token_id or 0) if begin is None else begin
        end_tokens = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stops = tuple(dict.fromkeys([*end_tokens, *stops]))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            token for token, content in added.items() if content.special
        }
        backend = getattr(tokenizer, "_tokenizer", None)
        self._bytes = None if backend is None else TokenBytes(backend)

    def encode(self, text: str) -> list[int]:
        """See :class:`Codec`."""
        return self.ids(text, special=True) or [self.prefix]

    def ids(self, text: str, *, special: bool) -> list[int]:
        """See :class:`Codec`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special, verbose=False)
        return ids

    def text_of(self, token: int) -> str:
        """See :class:`Codec`."""
        return str(self.tokenizer.decode([token]))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See :class:`Codec`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def bytes_of(self, token: int) -> bytes:
        """See :class:`Codec`."""
        known = None if self._bytes is None else self._bytes(token)
        return _behind_letter(self, token) if known is None else known

    def is_byte(self, token: int) -> bool:
        """See :class:`Codec`."""
        return self._bytes is not None and self._bytes.is_fallback(token)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """See :class:`Codec`."""
        # The template itself writes the start of a text, such as BOS. No ids are added.
        return self.ids(self.chat_text(messages), special=False)

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """See :class:`Codec`."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of {self.name} has no chat template. Set tokenizer_model to a "
                "folder with one (chat_template.jinja), or generate without chat."
            )
        render = self.tokenizer.apply_chat_template
        reserved = inspect.signature(render).parameters
        for name in variables:
            # A variable may be no argument, such as another template.
            if name in reserved or name not in str(self.tokenizer.chat_template):
                raise ConfigError(
                    f"the chat template of {self.name} has no variable {name[:60]!r}. Leave it out."
                )
        try:
            return str(
                render(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    **variables,
                )
            )
        except Exception as error:  # templates are programs, and raise any error
            raise ConfigError(
                f"the chat template of {self.name} refuses the messages: {error}. Look at the "
                "roles and their order."
            ) from error


def load_codec(model: str | Path, tokenizer_type: TokenizerType) -> Codec:
    """Return the codec of a tokenizer.

    Args:
        model: See :func:`load_tokenizer`.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.

    Raises:
        ConfigError: If the library of the tokenizer is missing.
        DataError: If the tokenizer cannot be loaded.
    """
    if tokenizer_type != "huggingface":
        return PlainCodec(load_tokenizer(model, tokenizer_type), str(model))
    return HuggingFaceCodec(huggingface_tokenizer(model), str(model), end_tokens_of(model))


def codec_of(tokenizer: Tokenizer, name: str) -> Codec:
    """Return the codec of a loaded tokenizer."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return HuggingFaceCodec(tokenizer.backend, name)
    return PlainCodec(tokenizer, name)


def codec_of_files(files: KeptFiles, name: str) -> Codec | None:
    """Return the codec of a tokenizer among the files saved with a model. None: there is no
    tokenizer.
    """
    if not any(file.startswith("tokenizer") or file.endswith(".model") for file in files.contents):
        return None
    with files.unpacked() as folder:
        return HuggingFaceCodec(huggingface_tokenizer(folder), name, end_tokens(files.contents))


def end_tokens_of(model: str | Path, *, revision: str | None = None) -> tuple[int, ...]:
    """Return the end tokens of the model in a folder, or of a Hub id. Many chat models have
    several.

    Args:
        model: A folder, or a Hub id.
        revision: Branch, tag or commit of the Hub id. None: main.
    """
    files = {
        name: find_file(model, name, revision=revision) for name in (GENERATION_CONFIG, CONFIG)
    }
    return end_tokens({name: file.read_bytes() for name, file in files.items() if file})


def prompt_ids(codec: Codec, text: str, *, as_chat: bool) -> list[int]:
    """Return the ids of a prompt, plain or as a user's message of a chat.

    Raises:
        ConfigError: If there is no chat template, or the template refuses the message.
    """
    return codec.chat([{"role": "user", "content": text}]) if as_chat else codec.encode(text)


def chat_template(codec: Codec) -> ChatTemplate:
    """Return the chat template of a codec, to render conversations as training does.

    Raises:
        ConfigError: If there is none.
    """
    tokenizer = getattr(codec, "tokenizer", None)
    if tokenizer is None or tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {codec.name} has no chat template, which conversations need. Set "
            "tokenizer_type to huggingface and tokenizer_model to a folder with one "
            "(chat_template.jinja)."
        )
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)


def _behind_letter(codec: Codec, token: int) -> bytes:
    """Return the bytes of an id by decoding the id behind a letter."""
    return text_behind(codec.decode, codec.ids("a", special=False), [token], special=True).encode()
