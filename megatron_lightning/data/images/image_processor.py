"""The processor of a folder, asked how a placeholder grows, and for the entries of a document.

Nothing here knows a family. Entries are what the processor returns beside ids, and the dims along
which an entry grows are found by a probe with two images and with three.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_lightning.data.images.image_files import Size
from megatron_lightning.data.images.image_parts import with_article
from megatron_lightning.data.images.media import MEDIA
from megatron_lightning.data.images.processor_parts import (
    input_part,
    missing_package,
    processor_class,
    with_missing_parts,
)
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.optional import require

_DROPPED = ("input_ids", "attention_mask", "labels")
"""Entries of a processor that the data make themselves."""
Dims = dict[int, str]
"""Dim -> what makes it longer: ``token`` or ``image``."""
Entries = dict[str, Tensor]


class ImageProcessor:
    """Text and pictures -> ids and entries of a model.

    Args:
        kind: Class of the processor in ``transformers``.
        parts: Image processor and tokenizer by the names of the class's arguments. A part for
            videos or sound is None.
        settings: Further settings of the processor.
        medium: ``image``, or ``audio`` for sounds.
    """

    def __init__(
        self,
        kind: type,
        parts: Mapping[str, Any],
        settings: Mapping[str, Any],
        medium: str = "image",
    ) -> None:
        self._given = kind, dict(parts), dict(settings), medium
        self.medium = MEDIA[medium]
        """Kind of its inputs."""
        made: Any = with_missing_parts(kind)
        self._processor = made.from_args_and_dict(list(parts.values()), dict(settings))
        self._growth: dict[tuple[Size, int], str] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # The class without some parts has no name to find it by.
        state = {"placeholder": self.placeholder, "words": self.words, "word_ids": self.word_ids}
        return type(self), self._given, {**state, "_does_grow": self._does_grow}

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Any,
        options: Mapping[str, Any],
        *,
        trusts: bool = False,
        medium: str = "image",
    ) -> ImageProcessor:
        """Return the processor of a folder. Parts for videos are not built: they need torchvision.

        Args:
            folder: Folder of a model.
            tokenizer: Tokenizer of ``transformers`` that makes the ids of the data.
            options: Settings of the image processor in place of the folder's.
            trusts: Whether code in the folder may run.
            medium: See the class.

        Raises:
            ConfigError: If the folder has no processor, or the processor needs torchvision.
        """
        require("PIL", "images", "pip install pillow")
        try:
            return cls._load(folder, tokenizer, options, trusts=trusts, medium=medium)
        except ImportError as error:
            raise missing_package(folder, error) from error

    @classmethod
    def _load(
        cls,
        folder: Path,
        tokenizer: Any,
        options: Mapping[str, Any],
        *,
        trusts: bool,
        medium: str,
    ) -> ImageProcessor:
        kind, part = processor_class(folder, trusts=trusts), MEDIA[medium].part
        names = kind.get_attributes()
        if part not in names or "tokenizer" not in names:
            raise ConfigError(
                f"the processor {kind.__name__} of {folder} has {', '.join(names)}, and chats with "
                f"media of the type {medium} need {part} and a tokenizer; take another model"
            )
        parts = dict.fromkeys(names)
        parts["tokenizer"] = tokenizer
        parts[part] = input_part(folder, options, trusts=trusts, medium=medium)
        settings, _ = kind.get_processor_dict(str(folder))
        return cls(kind, parts, {k: v for k, v in settings.items() if k not in names}, medium)

    @property
    def name(self) -> str:
        """Class of the processor."""
        return self._given[0].__name__

    @property
    def kind(self) -> str:
        """Kind of its inputs: ``image`` or ``audio``."""
        return self._given[3]

    @property
    def chat_template(self) -> str | None:
        """Template of conversations of the processor."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    @property
    def identity(self) -> Mapping[str, Any]:
        """All settings that ids and pixels depend on, and the backend of the pixels."""
        part = getattr(self._processor, self.medium.part)
        settings = {**self._given[2], self.medium.part: part.to_dict()}
        return {
            "kind": self.name,
            "backend": type(part).__name__,
            "settings": json.loads(json.dumps(settings, sort_keys=True, default=str)),
        }

    def find_placeholder(self, text: str) -> None:
        """Find the placeholder, and the words that stand for images.

        Args:
            text: Conversation with one image, written by the chat template.

        Raises:
            ConfigError: If there is none, or the processor does not say what it becomes.
        """
        token = getattr(self._processor, self.medium.token, None)
        texts = [text, *([token] if isinstance(token, str) else [])]  # a template of text alone
        for one in texts:
            offsets, ids = self._tried(one)
            if len(offsets) == 1:
                self.placeholder, growth = offsets[0]["text"], offsets[0]["replacement"]
                if ids != self.tokens(one.replace(self.placeholder, growth, 1)):
                    raise ConfigError(
                        f"the processor {self.name} adds tokens of its own to a conversation, "
                        "which no chat template writes; take another model"
                    )
                self._set_words(growth)
                return
            if isinstance(token, str) and one.count(token) == 1 and ids == self.tokens(one):
                self.placeholder, self._does_grow = token, False  # one token that stays one
                self._set_words(token)
                return
        raise ConfigError(
            f"the processor {self.name} does not say what the place of {with_article(self.kind)} "
            "becomes in the chat template's text, so that answers cannot be told from it. Set "
            "chat_template to the model's own, or take another model."
        )

    def _set_words(self, growth: str) -> None:
        ids = set(self.tokens(growth)) | set(self.tokens(self.placeholder))
        tokenizer = self._processor.tokenizer
        added = {token: one.content for token, one in tokenizer.added_tokens_decoder.items()}
        self.words = tuple(sorted({self.placeholder, *(added[i] for i in ids if i in added)}))
        self.word_ids = tuple(sorted(ids & added.keys()))

    def _tried(self, text: str) -> tuple[list[dict[str, Any]], list[int]]:
        try:
            return self._asked(text, self.medium.probes[:1], self.medium.blank)
        except DataError:  # no place in the text
            return [], []

    placeholder: str = ""
    """Text in the place of an image. Empty: not yet known."""
    words: tuple[str, ...] = ()
    """Added tokens that stand for images."""
    word_ids: tuple[int, ...] = ()
    """Their ids."""
    max_growths: int | None = None
    """Sizes of images whose growth is remembered, at most. None: any number."""
    _does_grow = True

    def growth(self, sizes: Sequence[Size]) -> list[str]:
        """Return the text that the placeholder of each image of a document becomes.

        Blank pictures of the same sizes are processed, once for a size and a number of images of
        the document.
        """
        if not self._does_grow:
            return [self.placeholder] * len(sizes)
        keys = [(size, len(sizes)) for size in sizes]
        if any(key not in self._growth for key in keys):
            if self.max_growths is not None and len(self._growth) >= self.max_growths:
                self._growth.clear()
            blank, cheap = self._cheap
            offsets, _ = self._asked(self.placeholder * len(sizes), sizes, blank, **cheap)
            texts = [one["replacement"] for one in offsets]
            self._growth |= dict(zip(keys, texts, strict=True))
            return texts
        return [self._growth[key] for key in keys]

    @cached_property
    def _cheap(self) -> tuple[Callable[[Size], Any], Mapping[str, Any]]:
        """Blank pictures, and settings for them: cheap ones, if a probe grows alike. Nothing else
        is known of the processor, so that the ids of real pictures are compared when rows are read.
        """
        text, sizes, usual = self.placeholder * 2, self.medium.probes, self.medium.blank
        expected = self._asked(text, sizes, usual) if self.medium.cheap else None
        for blank, settings in self.medium.cheap:
            try:
                if self._asked(text, sizes, blank, **settings) == expected:
                    return blank, settings
            except DataError:
                continue
        return usual, {}

    def check_size(self, where: str, size: Size) -> None:
        """Check that the processor takes all of a sound.

        Raises:
            DataError: If the sound has another rate, is cut, or is too short for a token.
        """
        extractor = getattr(self._processor, "feature_extractor", None)
        rate = getattr(extractor, "sampling_rate", None)
        if self.medium.part != "feature_extractor" or rate is None:
            return
        if size[1] != rate:
            raise DataError(
                f"{where}: a sound has {size[1]:,} samples a second, and {self.name} takes "
                f"{rate:,}; resample it"
            )
        if self._makes_no_token(size):
            raise DataError(
                f"{where}: a sound has {size[0]} samples ({size[0] / rate:.3f} s), of which "
                f"{self.name} makes no token; take a longer one, or leave the sound out"
            )
        longest = getattr(extractor, "n_samples", None)
        if not longest or size[0] <= longest:
            return
        more = min(size[0], 2 * longest)  # a blank of a very long sound is not made for this
        if self.growth([(more, rate)]) == self.growth([(longest, rate)]):
            raise DataError(
                f"{where}: a sound has {size[0] / rate:.1f} s, and {self.name} reads the first "
                f"{longest / rate:.1f} s alone; cut it into parts"
            )

    def _makes_no_token(self, size: Size) -> bool:
        """Return whether a sound grows to marks of its begin and end alone, or to nothing."""
        probe = self.medium.probes[0]
        if not 0 < size[0] < probe[0]:
            return size[0] == 0
        of_size, of_probe = (
            set(self.tokens(self.growth([one])[0])).intersection(self.word_ids)
            for one in (size, probe)
        )
        return of_size < of_probe

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def document(self, text: str, pictures: Sequence[Any]) -> tuple[list[int], Entries]:
        """Return the ids of a document, and the entries for the model.

        Args:
            text: The document, with a placeholder for each image.
            pictures: Pictures of Pillow in RGB.
        """
        given = self._call(text, pictures, return_tensors="pt")
        ids: list[int] = given["input_ids"][0].tolist()
        return ids, {name: one for name, one in given.items() if name not in _DROPPED}

    @cached_property
    def dims(self) -> Mapping[str, Dims]:
        """Entry -> the dims that tokens or images make longer. Empty: a value for each row."""
        two, three = self._probe
        lengths = (two["input_ids"].shape[1], three["input_ids"].shape[1])
        return {
            name: {
                dim: "token" if sizes == lengths else "image"
                for dim, sizes in enumerate(zip(two[name].shape, three[name].shape, strict=True))
                if sizes[0] != sizes[1]
            }
            for name in two
            if name not in _DROPPED
        }

    def entries_of_text(self, length: int) -> Entries:
        """Return the entries of a document of text: zeros along tokens, empty along images. A value
        for each row is for rows with images alone.
        """
        return {
            name: self._probe[0][name].new_zeros(
                [
                    length if dims.get(dim) == "token" else 0 if dim in (dims or {0: ""}) else size
                    for dim, size in enumerate(self._probe[0][name].shape)
                ]
            )
            for name, dims in self.dims.items()
        }

    @cached_property
    def _probe(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Results for two images, and for three: a lone one may be tiled in another way."""
        one = self.medium.blank(self.medium.probes[0])
        two, three = (
            self._call(f"x{self.placeholder}" * number, [one] * number, return_tensors="pt")
            for number in (2, 3)
        )
        return two, three

    def _asked(
        self,
        text: str,
        sizes: Sequence[Size],
        blank: Callable[[Size], Any],
        **settings: Any,
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the growth of placeholders, empty if nothing is known, and ids."""
        blanks = [blank(size) for size in sizes]
        settings = {**settings, "return_text_replacement_offsets": True, "return_tensors": "pt"}
        given = self._call(text, blanks, **settings)
        offsets = given.get("text_replacement_offsets") or [[]]
        return list(offsets[0]), list(np.asarray(given["input_ids"][0]).tolist())

    def _call(self, text: str, pictures: Sequence[Any], **options: Any) -> Mapping[str, Any]:
        try:
            given: Mapping[str, Any] = self._processor(
                text=[text], add_special_tokens=False, **self._inputs(pictures), **options
            )
        except (ValueError, TypeError, RuntimeError, StopIteration, IndexError) as error:
            sizes = [getattr(one, "size", None) for one in pictures[:4]]
            raise DataError(
                f"the processor {self.name} refuses {len(pictures)} inputs of the sizes {sizes}: "
                f"{error}"
            ) from error
        return given

    def _inputs(self, pictures: Sequence[Any]) -> dict[str, Any]:
        if self.medium.argument == "images":
            return {"images": [list(pictures)]}
        rate = self._processor.feature_extractor.sampling_rate
        return {self.medium.argument: list(pictures), "sampling_rate": rate}
