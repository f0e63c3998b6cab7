"""``PREFIX.json`` beside an indexed data set: the tokenizer that wrote it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import fsspec

from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.remote import BlockCache, is_remote, local_path
from megatron_lightning.data.text.tokenizers import Tokenizer
from megatron_lightning.errors import DataError

_VERSION = 1


@dataclass(frozen=True)
class Sidecar:
    """The tokenizer of an indexed data set."""

    tokenizer: str
    """Digest (:attr:`Tokenizer.identity`)."""
    vocab_size: int
    eod: int
    append_eod: bool
    """Whether every document ends with ``eod``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, append_eod: bool) -> Sidecar:
        """Return the description of data that a tokenizer writes."""
        return cls(tokenizer.identity, tokenizer.vocab_size, tokenizer.eod, append_eod)

    def write(
        self,
        prefix: str | Path,
        indexed: IndexedDataset,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Write the file beside a data set.

        Args:
            prefix: Path of the data set.
            indexed: The data set.
            options: Options that wrote the data set, for readers.
        """
        sizes = {"documents": indexed.num_documents, "tokens": indexed.num_tokens}
        content: dict[str, object] = {"version": _VERSION, **asdict(self), **sizes}
        if options is not None:
            content["options"] = dict(options)
        with atomic_write(sidecar_path(prefix)) as file:
            file.write(f"{json.dumps(content, indent=2)}\n".encode())

    @classmethod
    def read(cls, prefix: str | Path, cache: BlockCache | None = None) -> Sidecar | None:
        """Return the description beside a data set. None: there is none, as beside Megatron's, or
        it describes other files.

        Args:
            prefix: Path or URL of the data set.
            cache: Keeps what is read from a URL.

        Raises:
            DataError: If the file is damaged.
        """
        path = f"{local_path(str(prefix))}.json"
        raw = _read(path)
        if raw is None:
            return None
        try:
            content = json.loads(raw)
            indexed = IndexedDataset(prefix, cache)
            # The data set was written again by a tool that does not know the description.
            if (content["documents"], content["tokens"]) != (
                indexed.num_documents,
                indexed.num_tokens,
            ):
                return None
            return cls(**{name: content[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: is damaged ({error!r}). Remove it, and the tokenizer of the data is not "
                "checked."
            ) from error


def sidecar_path(prefix: str | Path) -> Path:
    """Return the file that describes a data set."""
    return Path(f"{local_path(str(prefix))}.json")


def _read(path: str) -> bytes | None:
    """Return the bytes of a file or URL. None: there is no such file."""
    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
            return content
    except FileNotFoundError:
        return None
    except Exception as error:  # stores answer for a missing file in many ways
        if not is_remote(path):
            raise
        warnings.warn(
            f"{path} cannot be read ({error!r}). The tokenizer of the data is not checked.",
            stacklevel=2,
        )
        return None


def check_tokenizer(
    prefix: str | Path, tokenizer: Tokenizer, name: str, cache: BlockCache | None = None
) -> None:
    """Check that a data set was written by a tokenizer.

    Args:
        prefix: Path or URL of the data set.
        tokenizer: The tokenizer.
        name: The tokenizer's name, for messages.
        cache: Keeps what is read from a URL.

    Raises:
        DataError: If another tokenizer has written the data set.
    """
    sidecar = Sidecar.read(prefix, cache)
    if sidecar is not None and sidecar.tokenizer != tokenizer.identity:
        raise DataError(
            f"{prefix} was written with another tokenizer (of {sidecar.vocab_size} ids, digest "
            f"{sidecar.tokenizer[:12]}) than {name} (of {tokenizer.vocab_size} ids, digest "
            f"{tokenizer.identity[:12]}), so that its ids mean other texts. Set tokenizer_model to "
            "the tokenizer of the data, or run preprocess again."
        )


def common_sidecar(prefixes: Sequence[str]) -> Sidecar | None:
    """Return the description that all data sets share. None: some have none.

    Raises:
        DataError: If data sets were written with different tokenizers.
    """
    sidecars = {prefix: Sidecar.read(prefix) for prefix in prefixes}
    described = {prefix: one for prefix, one in sidecars.items() if one is not None}
    first = next(iter(described), None)
    for prefix, one in described.items():
        if first is not None and one.tokenizer != described[first].tokenizer:
            raise DataError(
                f"{prefix} and {first} were written with different tokenizers (of {one.vocab_size} "
                f"and {described[first].vocab_size} ids). Write both with one by "
                "`megatron-lightning preprocess`."
            )
    alike = set(described.values())
    return alike.pop() if len(described) == len(prefixes) and len(alike) == 1 else None
