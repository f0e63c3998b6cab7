"""Tokenizers behind a small protocol: SentencePiece (loaded or trained here), Hugging Face, and the
kinds of ``tokenizer_kinds``.

Packages are imported at the creation of a tokenizer, so that reading tokenized data needs none.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from megatron_lightning.data.chat.token_bytes import fallback_byte
from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.indexed.remote import local_path, written_path
from megatron_lightning.data.text.auto_tokenizer import auto_tokenizer
from megatron_lightning.data.text.tokenizer_kinds import (
    NO_PAD,
    ByteTokenizer,
    JsonTokenizer,
    NullTokenizer,
)
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.file_names import SENTENCEPIECE, TOKENIZER, TOKENIZER_CONFIG
from megatron_lightning.optional import require

TokenizerType = Literal["sentencepiece", "huggingface", "json", "bytes", "null", "class_path"]


class Tokenizer(Protocol):
    """Interface of tokenizers for data preparation, datasets and generation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, from 0."""

    @property
    def eod(self) -> int:
        """Id at the end of a document."""

    @property
    def pad(self) -> int:
        """Id of padding, or :data:`NO_PAD`."""

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and origin. Part of the name of cached sample indices."""

    @property
    def identity(self) -> str:
        """Digest of the vocabulary and the rules, whatever the path of the files."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special ids."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, special tokens included. None: there is no such token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""


_MEMBERS = (
    "vocab_size", "eod", "pad", "unique_identifiers", "identity", "encode", "encode_batch",
    "token_id", "decode",
)  # fmt: skip


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file. The end-of-sentence piece ends a document.

    Raises:
        DataError: If the file is missing or is not a SentencePiece model.
        ConfigError: If the model has no end-of-sentence piece.
    """

    def __init__(self, model: str | Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = str(model)
        try:
            content = Path(model).read_bytes()
            self._processor = SentencePieceProcessor(model_proto=content)
        except OSError as error:
            raise DataError(
                f"{model}: cannot be read ({error.strerror}); set tokenizer_model to a "
                "SentencePiece model"
            ) from error
        except RuntimeError as error:
            raise DataError(
                f"{model}: is not a SentencePiece model; for a Hugging Face tokenizer set "
                "tokenizer_type"
            ) from error
        self.identity: str = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod: int = self._processor.eos_id()
        self.pad: int = self._processor.pad_id()
        if self.eod < 0:
            raise ConfigError(
                f"{model}: has no end-of-sentence piece to end documents with; train the model "
                "with eos_id >= 0"
            )

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and model path."""
        return {"class": type(self).__name__, "tokenizer_path": self._model}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        # one thread: the caller has a process for each core
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece. None: there is no such piece."""
        token_id: int = self._processor.piece_to_id(token)
        return token_id if self._processor.id_to_piece(token_id) == token else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without a text."""
        numbers = range(self.vocab_size)
        return frozenset(number for number in numbers if self._processor.is_control(number))

    def token_bytes(self, token: int) -> bytes | None:
        """Return the byte of a piece of byte fallback. None: the piece is no byte."""
        return fallback_byte(self._processor.id_to_piece(token))

    def is_byte(self, token: int) -> bool:
        """Return whether an id is a byte of byte fallback."""
        return bool(self._processor.is_byte(token))

    def pieces(self) -> list[str]:
        """Return the piece of each id."""
        return [self._processor.id_to_piece(number) for number in range(self.vocab_size)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Byte pieces without a valid character become U+FFFD."""
        text: str = self._processor.decode(list(ids))
        return text


class HuggingFaceTokenizer:
    """Any tokenizer of ``transformers.AutoTokenizer``. The end-of-sentence token ends a document,
    or else the separator.

    Args:
        model: A folder with the tokenizer's files, or a name on the Hugging Face hub.

    Raises:
        ConfigError: If ``transformers`` is missing, or the tokenizer has no end-of-sentence token.
        DataError: If no tokenizer can be loaded from ``model``.
    """

    def __init__(self, model: str | Path) -> None:
        self._model = str(model)
        self.backend: Any = huggingface_tokenizer(model)
        """The tokenizer of ``transformers``."""
        fast = getattr(self.backend, "_tokenizer", None)
        if fast is not None:  # a saved truncation would cut documents of batches
            fast.no_truncation()
            fast.no_padding()
        self.vocab_size: int = len(self.backend)
        eos, pad = self.backend.eos_token_id, self.backend.pad_token_id
        if eos is None:  # as of BERT
            eos = self.backend.sep_token_id
        if eos is None:
            raise ConfigError(
                f"{model}: has no eos_token to end documents with; set eos_token in its "
                f"{TOKENIZER_CONFIG}"
            )
        self.eod: int = eos
        self.pad: int = NO_PAD if pad is None or pad == eos else pad

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """Class and model path or name."""
        return {"class": type(self).__name__, "tokenizer_path": self._model}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        fast = getattr(self.backend, "_tokenizer", None)
        if fast is None:
            return [self.encode(text) for text in texts]
        # without offsets, which take a quarter of the time
        return [one.ids for one in fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token. None: there is no such token."""
        token_id: int | None = self.backend.get_vocab().get(token)
        return token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without a text."""
        return frozenset(self.backend.all_special_ids)

    def pieces(self) -> list[str]:
        """Return the piece of each id."""
        pieces: list[str] = self.backend.convert_ids_to_tokens(list(range(self.vocab_size)))
        return pieces

    @property
    def identity(self) -> str:
        """Digest of the vocabulary and the rules."""
        content = self.to_json()
        if content is None:
            content = f"{type(self.backend).__name__} {sorted(self.backend.get_vocab().items())}"
        return hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> str | None:
        """Return the vocabulary and the rules as ``tokenizer.json``. None: the tokenizer is written
        in Python.
        """
        fast = getattr(self.backend, "_tokenizer", None)
        return None if fast is None else str(fast.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return str(self.backend.decode(list(ids)))


def huggingface_tokenizer(model: str | Path) -> Any:
    """Return the tokenizer of ``transformers`` in a folder, or of a name on the Hugging Face hub.

    Raises:
        ConfigError: If ``transformers`` is missing.
        DataError: If no tokenizer can be loaded from ``model``.
    """
    require("transformers", "tokenizer_type=huggingface", "set tokenizer_type=sentencepiece")
    try:
        return auto_tokenizer(str(model))
    except (OSError, ValueError) as error:
        raise DataError(f"{model}: {_why_not(str(model))}; set tokenizer_model: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:  # of an incomplete file
        raise DataError(
            f"{model}: an entry is missing or of another kind in the tokenizer's files "
            f"({error!r}). Save the tokenizer again with save_pretrained, or set tokenizer_model "
            "to another."
        ) from error


def _why_not(model: str) -> str:
    """Return the reason for a failed load by ``transformers``, to precede the error of
    ``transformers``.
    """
    if Path(model).exists():
        return "no Hugging Face tokenizer can be loaded from here"
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        return "there is no such folder"
    return (
        "there is no such folder, and no tokenizer of this name could be fetched from the Hugging "
        "Face hub. On a machine without network, use a folder with the tokenizer's files, and set "
        "HF_HUB_OFFLINE=1 to skip the attempts"
    )


def load_tokenizer(
    tokenizer_model: str | Path, tokenizer_type: TokenizerType = "sentencepiece"
) -> Tokenizer:
    """Return the tokenizer of ``tokenizer_type`` in ``tokenizer_model``.

    Args:
        tokenizer_model: SentencePiece model; folder or Hub id of ``transformers``;
            ``tokenizer.json``; number of ids (null); anything (bytes); or a class path, or a YAML
            file with ``class_path`` and ``init_args`` (class_path).
        tokenizer_type: Kind of the tokenizer.

    Raises:
        ConfigError: If the library is missing or the tokenizer lacks an end-of-document id.
        DataError: If the tokenizer cannot be loaded.
    """
    tokenizer_model = written_path(str(tokenizer_model), "tokenizer_model")
    if tokenizer_type == "bytes":
        return ByteTokenizer()
    if tokenizer_type == "null":
        if not str(tokenizer_model).isdecimal():
            raise ConfigError(
                f"tokenizer_model={tokenizer_model} is no number of ids. Set it to one, such as "
                "32000, with tokenizer_type=null."
            )
        return NullTokenizer(int(str(tokenizer_model)))
    if tokenizer_type == "class_path":
        return _own_tokenizer(str(tokenizer_model))
    kinds: Mapping[str, Callable[[str | Path], Tokenizer]] = {
        "sentencepiece": SentencePieceTokenizer,
        "huggingface": HuggingFaceTokenizer,
        "json": JsonTokenizer,
    }
    return kinds[tokenizer_type](tokenizer_model)


def tokenizer_files(tokenizer: Tokenizer, model: str) -> dict[str, bytes]:
    """Return the files of a tokenizer, by their names in a folder. Empty: the tokenizer is known by
    its class and options alone.

    Args:
        tokenizer: The tokenizer.
        model: The argument it was loaded from.
    """
    model = local_path(model)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {SENTENCEPIECE: Path(model).read_bytes()}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.backend.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).glob("*.*")}
    if isinstance(tokenizer, JsonTokenizer):
        path = Path(model) if Path(model).is_dir() else Path(model).parent
        names = (TOKENIZER, TOKENIZER_CONFIG)
        files = {name: path / name for name in names if (path / name).is_file()}
        if not Path(model).is_dir():
            files[TOKENIZER] = Path(model)
        return {name: file.read_bytes() for name, file in files.items()}
    return {}


def _own_tokenizer(model: str) -> Tokenizer:
    """Return a tokenizer of a user, or one with options, by class path.

    Raises:
        ConfigError: If the class or the file cannot be loaded, or the class is no tokenizer.
    """
    settings: Any = {"class_path": model}
    if Path(model).suffix in (".yaml", ".yml", ".json"):
        try:
            settings = yaml.safe_load(Path(model).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise DataError(f"{model}: cannot be read as YAML ({error})") from error
    try:
        module, _, name = settings["class_path"].rpartition(".")
        instance = getattr(importlib.import_module(module), name)(
            **(settings.get("init_args") or {})
        )
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"tokenizer_model={model}: no tokenizer can be made of it ({error}). Set it to a class "
            "path, or to a YAML file with class_path and init_args."
        ) from error
    missing_names = [name for name in _MEMBERS if not hasattr(instance, name)]
    if missing_names:
        raise ConfigError(
            f"{type(instance).__name__} has no {', '.join(missing_names)}, which tokenizers have. "
            "Derive it from megatron_lightning.data.PlainTokenizer."
        )
    tokenizer: Tokenizer = instance
    return tokenizer


def train_sentencepiece(texts: Iterable[str], vocab_size: int, output: str | Path) -> None:
    """Train a byte-pair-encoding SentencePiece model able to reproduce any text exactly, and write
    the model to ``output``.

    Runs of spaces are separate pieces (source code is full of spaces) and unknown characters fall
    back to bytes, hence ``decode(encode(text)) == text``. The same texts give the same file.

    Raises:
        ConfigError: If the texts are too few for ``vocab_size``, or ``vocab_size`` is too small for
            the bytes and special pieces.
        DataError: For errors of ``texts``, or if all texts are empty.
    """
    from sentencepiece import SentencePieceTrainer

    lines = [line for text in texts for line in text.splitlines() if line]
    if not lines:
        raise DataError(
            "the input has no text that a tokenizer could be trained on; set input to files with "
            "text"
        )
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 16,
            num_threads=1,  # the model file records the number
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"vocab_size={vocab_size}: no tokenizer can be trained on this text; set another "
            f"vocab_size: {error}"
        ) from error
    with atomic_write(Path(output)) as file:
        file.write(model.getvalue())
