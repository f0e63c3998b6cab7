"""Conversations with images, or sounds, as prompts: ids, and entries for the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.conversations import Chat, parse_row
from megatron_lightning.data.images.document_images import GrownText
from megatron_lightning.data.images.image_files import ImageFiles, Size, named
from megatron_lightning.data.images.image_parts import (
    IMAGE,
    TAG,
    WORDS,
    ImageSource,
    with_article,
)
from megatron_lightning.data.images.image_processor import ImageProcessor
from megatron_lightning.data.images.processor_parts import NoProcessorError, kind_of_folder
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError, DataError


@dataclass(frozen=True)
class PromptImages:
    """Images of a prompt as files. Their pixels are many times as large."""

    processor: ImageProcessor
    text: str
    """The prompt, with a placeholder for each image."""
    ids: Sequence[int]
    """Ids of the prompt."""
    pictures: Callable[[], Sequence[Any]]
    """Decodes the images."""
    num_bytes: int
    """Bytes of the files."""

    def entries(self) -> Mapping[str, Any]:
        """Return the entries for the model, tensors by name.

        Raises:
            DataError: If an image cannot be decoded, or the processor makes other ids than the
                prompt's.
        """
        ids, entries = self.processor.document(self.text, self.pictures())
        if ids != self.ids:
            raise DataError(
                f"{self.processor.name} makes {len(ids)} tokens of the prompt with its images, "
                f"which are others than those of blank images of the same sizes ({len(self.ids)} "
                "tokens); take another processor"
            )
        return entries


@dataclass(frozen=True)
class Prompt:
    """A prompt of a model with a vision tower."""

    ids: list[int]
    images: PromptImages | None = None
    """None: the prompt is text."""

    @property
    def entries(self) -> Mapping[str, Any] | None:
        """Entries of images for the model, made anew. None: the prompt is text."""
        return None if self.images is None else self.images.entries()


Check = Callable[[str, int], object]
"""Called with the text around images and the number of tokens of all images."""
_MAX_GROWTHS = 256
"""Remembered sizes of images, at most: clients choose them."""


def prompts_if_any(load: Callable[[], ImagePrompts]) -> ImagePrompts | None:
    """Return the prompts of a model. None: the model reads text alone. If the reason is another one
    than a folder without a processor, the reason is printed.
    """
    try:
        return load()
    except NoProcessorError:
        return None
    except (ConfigError, DataError) as error:
        warnings.warn(
            f"images cannot be read, and the model gets text alone: {error}", stacklevel=2
        )
        return None


class ImagePrompts:
    """Makes prompts of conversations with images.

    Args:
        processor: Of the model.
        template: Chat template.
        max_images: Images, or sounds, of a conversation, at most. None: any number.
        max_pixels: Pixels of an image, at most. None: as many as Pillow takes for harmless.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        template: ChatTemplate,
        *,
        max_images: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self.processor = processor
        self._template = template
        self._limits = max_images, max_pixels
        processor.max_growths = _MAX_GROWTHS
        processor.find_placeholder(template.with_image(processor.kind))

    @classmethod
    def load(
        cls, folder: Path, tokenizer: Any, kind: str = "image", **limits: int | None
    ) -> ImagePrompts:
        """Return the prompts of a folder's model.

        Args:
            folder: Folder of a model.
            tokenizer: Tokenizer of ``transformers``.
            kind: ``image`` or ``audio``, of models that read both.
            limits: See the class.

        Raises:
            ConfigError: If the folder has no processor, or no chat template.
        """
        tokens = ChatTokenizer.load(tokenizer)
        kind = kind_of_folder(folder, kind)
        processor = ImageProcessor.load(folder, tokens.tokenizer, {}, medium=kind)
        source: str | Mapping[str, str] | None = processor.chat_template
        own = tokens.chat_template
        # In training too: a template of the user's own wins, then the processor's.
        if (
            own
            and own != source
            and (not source or own != ChatTokenizer.load(folder).chat_template)
        ):
            source = own
        if not source:
            raise ConfigError(
                f"{folder} has no chat template, which prompts with images need; add "
                "chat_template.jinja"
            )
        return cls(processor, ChatTemplate(source, tokens.special_tokens), **limits)

    def of_messages(
        self,
        where: str,
        messages: Sequence[Any],
        folder: Path | None = None,
        *,
        check: Check | None = None,
        **fields: Any,
    ) -> Prompt:
        """Return the prompt of a conversation, for the model to answer.

        Args:
            where: Place of the conversation, for messages.
            messages: Messages in OpenAI's form.
            folder: Folder of image files. None: images are data URLs and bytes.
            check: Raises if the prompt is too long, before any pixel is decoded.
            fields: Further fields of the row, such as ``images`` or ``tools``.

        Raises:
            DataError: If a message or an image cannot be used.
        """
        chat = parse_row(Row(where, {**fields, "messages": list(messages)}))
        if not isinstance(chat, Chat):
            raise DataError(f"{where}: a prompt with images needs messages")
        return self.of_chat(chat, folder, check)

    def of_question(self, text: str, images: Sequence[str]) -> Prompt:
        """Return the prompt of a user's message: files of images or sounds, and a text behind them.

        Raises:
            DataError: If a file cannot be used.
        """
        kind = self.processor.kind
        parts: list[Any] = [{"type": kind, kind: str(Path(one).resolve())} for one in images]
        content = [*parts, {"type": "text", "text": text}]
        return self.of_messages("the prompt", [{"role": "user", "content": content}], Path("/"))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation as a text, with the model's placeholder for each ``<image>``."""
        turns = [{**one, "content": one["content"].replace(TAG, IMAGE)} for one in messages]
        num_images = sum(one["content"].count(IMAGE) for one in turns)
        images = [ImageSource("the conversation")] * num_images
        placeholder = self.processor.placeholder
        return self._template.prompt(
            Chat("the conversation", turns, images=images, placeholder=placeholder)
        )

    def of_text(self, text: str, pictures: Sequence[Any]) -> Prompt:
        """Return the prompt of a text with a placeholder, or ``<image>``, for each picture of
        Pillow.

        Raises:
            DataError: If there is another number of places, or words stand for an image.
        """
        if self.processor.placeholder not in text:
            text = text.replace(TAG, self.processor.placeholder)
        self._check_places("a prompt", text, len(pictures))
        sizes = [(one.height, one.width) for one in pictures]
        return self._made("a prompt", text, sizes, partial(_in_rgb, pictures))

    def _check_places(self, where: str, text: str, num_images: int) -> None:
        processor, placeholder = self.processor, self.processor.placeholder
        # Of the whole text: a template writes roles, tools and calls as well as content.
        rest, number = text.replace(placeholder, ""), text.count(placeholder)
        word = next((word for word in processor.words if word in rest), placeholder)
        if word in rest or number > num_images:
            raise DataError(
                f"{where} has {word} as words, which {processor.name} reads as "
                f"{with_article(processor.kind)}; write other words"
            )
        if number < num_images:
            raise DataError(
                f"{where} has {number} places {placeholder} for {num_images} "
                f"{WORDS[processor.kind]}s; a chat template writes one for each, so take another "
                "template"
            )

    def _made(
        self,
        where: str,
        text: str,
        sizes: Sequence[Size],
        pictures: Callable[[], Sequence[Any]],
        num_bytes: int = 0,
    ) -> Prompt:
        processor = self.processor
        if not sizes:
            return Prompt(processor.tokens(text))
        grown = processor.growth(sizes)
        ids = processor.tokens(GrownText.of(text, processor.placeholder, grown).text)
        if self._num_words(ids) != sum(self._num_words(processor.tokens(one)) for one in grown):
            raise DataError(
                f"{where} has words which {processor.name} reads as "
                f"{with_article(processor.kind)}; write other words"
            )
        return Prompt(ids, PromptImages(self._decoding, text, ids, pictures, num_bytes))

    @cached_property
    def _decoding(self) -> ImageProcessor:
        """A processor that another thread may use: tokenizers are for one thread at a time."""
        return deepcopy(self.processor)

    def _num_words(self, ids: Sequence[int]) -> int:
        """Return the number of ids that stand for images."""
        return sum(map(self.processor.word_ids.__contains__, ids))

    def of_chat(self, chat: Chat, folder: Path | None = None, check: Check | None = None) -> Prompt:
        """Return the prompt of a parsed conversation. See :meth:`of_messages`."""
        if chat.num_unplaced:
            raise DataError(
                f"{chat.where}: {chat.num_unplaced} {WORDS[self.processor.kind]}s have no place in "
                "the messages"
            )
        text = self._template.prompt(replace(chat, placeholder=self.processor.placeholder))
        self._check_places(chat.where, text, len(chat.images))
        images = self._opened(chat, ImageFiles(folder))
        if check is not None:
            grown = self.processor.growth([size for _, _, size in images]) if images else []
            num_tokens = sum(len(self.processor.tokens(one)) for one in grown)
            check(text.replace(self.processor.placeholder, ""), num_tokens)
        return self._made(
            chat.where,
            text,
            [size for _, _, size in images],
            partial(_decoded, self.processor.medium.decoded, images),
            sum(len(data) for _, data, _ in images),
        )

    def _opened(self, chat: Chat, files: ImageFiles) -> list[tuple[str, bytes, Size]]:
        """Return place, bytes and size of each image or sound. Nothing is decoded."""
        processor, (most, most_pixels) = self.processor, self._limits
        kind, number = processor.kind, len(chat.images)
        if most is not None and number > most:
            raise DataError(f"{chat.where} has {number} {WORDS[kind]}s; at most {most} are taken")
        images = []
        for source in chat.images:
            if source.kind != kind:
                raise DataError(
                    f"{source.where} has {with_article(source.kind)}, and {WORDS[kind]}s alone are "
                    "read beside text; leave it out"
                )
            data, path = files.read(source)
            where = named(source.where, path)
            size = processor.medium.size_of(where, data)
            processor.check_size(where, size)
            if kind == "image" and most_pixels is not None and size[0] * size[1] > most_pixels:
                raise DataError(
                    f"{where}: an image has {size[1]} x {size[0]} pixels; at most {most_pixels:,} "
                    "are taken"
                )
            images.append((where, data, size))
        return images


# Ranks of another process get prompts, so that these are functions of the module.
def _decoded(decode: Callable[[str, bytes], Any], images: Sequence[tuple[str, bytes, Size]]) -> Any:
    return [decode(where, data) for where, data, _ in images]


def _in_rgb(pictures: Sequence[Any]) -> Any:
    return [one.convert("RGB") for one in pictures]
