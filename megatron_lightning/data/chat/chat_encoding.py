"""Supervised documents: rows rendered, tokenized, and cut to a length.

A document without any trained token is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_lightning.data.chat.chat_fields import DROPPABLE, drop
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer, Ids
from megatron_lightning.data.chat.chat_view import Rendered
from megatron_lightning.data.chat.conversations import PARSER_VERSION, Chat, Text, Tokens, parse_row
from megatron_lightning.data.chat.documents import Document, Marks
from megatron_lightning.data.images.document_images import DocumentImages
from megatron_lightning.data.images.image_encoder import ImageEncoder
from megatron_lightning.data.images.image_files import MissingImageError
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError, DataError

Truncation = Literal["drop", "left", "middle", "right"]
BadRows = Literal["refuse", "skip"]
_VERSION = 3
_ROWS_AT_ONCE = 512
UNENDED = "answers without an added token at their end"
DROPPED: Mapping[str, str] = {name: f"conversations without their {name}" for name in DROPPABLE}
"""Name of a dropped field -> key of the count."""
MERGED = "answers with characters of the prompt in their first token"
REWRITTEN = "conversations whose earlier answers keep the form of a last answer"
NULLS = "arguments of calls left out as null"
BROKEN = "rows left out as broken"
MISSING = "rows left out for a missing image"
UNCUT = "left out since text around a lost image has other tokens"
_SHOWN = 20
"""Broken rows named in an error."""
Characters = npt.NDArray[np.int64]
"""Start and end of every token of a text [n, 2]."""


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """How rows become documents."""

    sequence_length: int
    """Longest document, in tokens."""
    truncation: Truncation = "drop"
    """Treatment of a longer document: the document is left out (``drop``), or loses the start
    (``left``) or the middle (``middle``) of the prompt, or the document's end (``right``)."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """The trained part of a conversation."""
    bad_rows: BadRows = "refuse"
    """Treatment of rows that cannot be used: an error names them (``refuse``), or they are left out
    and counted (``skip``)."""

    def __post_init__(self) -> None:
        if self.bad_rows not in get_args(BadRows):
            raise ConfigError(
                f"bad_rows={self.bad_rows!r}; must be one of {', '.join(get_args(BadRows))}"
            )
        if self.truncation not in get_args(Truncation):
            raise ConfigError(
                f"truncation={self.truncation!r}; must be one of {', '.join(get_args(Truncation))}"
            )
        if self.sequence_length < 2:
            raise ConfigError(
                f"sequence_length={self.sequence_length}: a token is predicted from one before it; "
                "set it to 2 or more"
            )


def _check_characters(piece: Rendered | Tokens) -> None:
    """Refuse a text with half of a character, which tokenizers do not take.

    Raises:
        DataError: If there is one. JSON names characters beyond U+FFFF by two halves.
    """
    try:
        if isinstance(piece, Rendered):
            piece.text.encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise DataError(
            f"{piece.where}: the text has half of a character (U+{half:04X}), for instance of an "
            "emoji cut in two, which tokenizers do not take; write the character in full, or "
            "remove it"
        ) from error


class Encoder:
    """Makes documents of rows.

    Args:
        tokenizer: Of the model.
        template: Template of conversations. None: there is no template, and a conversation is an
            error.
        options: How rows become documents.
        ends: Ids at which generation stops, beside the tokenizer's end of text.
        images: Of the rows' source. None: an image is an error.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template: ChatTemplate | None,
        options: SupervisedOptions,
        ends: Collection[int] = (),
        images: ImageEncoder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = options
        self._ends = frozenset(ends)
        self._images = images
        self.counts: Counter[str] = Counter()
        """Row counts by outcome."""
        self._broken: list[DataError] = []

    @property
    def identity(self) -> dict[str, Any]:
        """All inputs to the documents, beside the rows."""
        return {
            "version": _VERSION,
            "parser": PARSER_VERSION,
            "tokenizer": self._tokenizer.identity,
            "template": None if self._template is None else self._template.identity,
            "ends": sorted(self._ends),
            **asdict(self._options),
            **({} if self._images is None else {"images": self._images.identity}),
        }

    def documents(self, rows: Iterable[Row]) -> Iterator[Document]:
        """Yield the documents of rows, in order.

        Raises:
            DataError: If rows cannot be used, with file and line of the first 20, when all rows are
                read.
        """
        remaining = iter(rows)
        while chunk := list(islice(remaining, _ROWS_AT_ONCE)):
            first = self.counts["rows"]
            self.counts["rows"] += len(chunk)
            pieces = [
                (number, piece)
                for number, row in enumerate(chunk, first)
                for piece in self._readable(row)
            ]
            # Many texts a call: tokenizers encode a batch faster than text by text.
            texts = [piece for _, piece in pieces if isinstance(piece, Rendered)]
            encoded = iter(self._tokenizer.encode([piece.text for piece in texts]))
            prompts = iter(self._tokenizer.encode([piece.prompt or "" for piece in texts]))
            for number, piece in pieces:
                if isinstance(piece, Rendered):
                    (ids, characters), (prompt_ids, _) = next(encoded), next(prompts)
                    full_document = (
                        self._placed(piece, ids, characters)
                        if piece.prompt is None
                        else self._completed(piece, ids, characters, prompt_ids)
                    )
                else:
                    full_document = Document(
                        np.array(piece.ids, np.int32), np.array(piece.labels) != -100
                    )
                document = self._cut(full_document)
                if document is not None:
                    yield document._replace(row=number)
        none_is_good = self.counts[BROKEN] == self.counts["rows"]  # another kind of file
        if self._broken and (none_is_good or self._options.bad_rows == "refuse"):
            raise self._broken_rows()

    def _readable(self, row: Row) -> list[Rendered | Tokens]:
        """Return the pieces of a row. Empty: the row is broken, and counted."""
        try:
            if row.error is not None:
                raise row.error
            pieces = [self._grown(piece) for piece in self._pieces(row)]
            for piece in pieces:
                _check_characters(piece)
            return pieces
        except DataError as error:
            is_missing = isinstance(error, MissingImageError)
            if is_missing and self._images is not None and self._images.drops_missing:
                self.counts[MISSING] += 1
                return []
            self.counts[BROKEN] += 1
            if len(self._broken) < _SHOWN:
                self._broken.append(error)
            return []

    def _broken_rows(self) -> DataError:
        """Return the error of all broken rows."""
        broken, rows = self.counts[BROKEN], self.counts["rows"]
        is_all = broken == rows
        way_out = "No other row is left" if is_all else "Set bad_rows=skip to train without"
        if broken == 1:
            first = str(self._broken[0]).rstrip(".")
            return DataError(f"{first}. {way_out}." if is_all else f"{first}. {way_out} this row.")
        more = broken - len(self._broken)
        lines = [str(error) for error in self._broken] + ([f"and {more:,} more."] if more else [])
        return DataError(
            f"{broken:,} of {rows:,} rows cannot be used. {way_out}"
            f"{'' if is_all else ' them, or mend them'}:\n  " + "\n  ".join(lines)
        )

    def _pieces(self, row: Row) -> Iterator[Rendered | Tokens]:
        parsed = parse_row(row)
        if self._images is not None and not isinstance(parsed, Chat):
            text = "" if isinstance(parsed, Tokens) else parsed.prompt + parsed.completion
            ids = parsed.ids if isinstance(parsed, Tokens) else ()
            self._images.check_without(row.where, row.fields, text, ids)
        if isinstance(parsed, Tokens):
            wrong_ids = [one for one in parsed.ids if not 0 <= one < len(self._tokenizer)]
            if wrong_ids:
                raise DataError(
                    f"{row.where}: input_ids has id {wrong_ids[0]}, and the tokenizer "
                    f"{len(self._tokenizer)} ids; it was made with another tokenizer"
                )
            yield parsed
        elif isinstance(parsed, Text):
            yield self._text(parsed)
        else:
            yield from self._samples(parsed)

    def _with_images(self, chat: Chat) -> Chat:
        """Return a conversation for templates, checked to have a place for every image.

        Raises:
            DataError: If the conversation has images and the data have none, an image has no place,
                or a place is there as words.
        """
        if self._images is None:
            if chat.images:
                first = chat.images[0]
                what, option = (
                    ("an image", "images") if first.kind == "image" else ("a sound", "audio")
                )
                raise DataError(
                    f"{first.where} has {what}, and only text can be trained here; set {option} of "
                    f"FinetuneDataModule to train {option}, or remove it"
                )
            return chat
        if chat.num_unplaced:
            raise DataError(
                f"{chat.where}: the row has {chat.num_unplaced} more images than the messages have "
                "places; write <image> where an image belongs, or parts of the type image"
            )
        for index, message in enumerate(chat.messages):
            self._images.check_words(f"{chat.where}: message {index}", message["content"])
        return replace(chat, placeholder=self._images.processor.placeholder)

    def _grown(self, piece: Rendered | Tokens) -> Rendered | Tokens:
        """Return a text with grown places of images."""
        if self._images is None or isinstance(piece, Tokens):
            return piece
        if piece.prompt is not None:
            return piece
        grown, images = self._images.grown(piece.where, piece.text, piece.images)
        if not piece.images:
            return piece
        return replace(
            piece,
            text=grown.text,
            spans=[(grown.shifted(begin), grown.shifted(end)) for begin, end in piece.spans],
            ends=[grown.shifted(end) for end in piece.ends],
            grown=images,
        )

    def _text(self, parsed: Text) -> Rendered:
        text = parsed.prompt + parsed.completion
        spans = [(len(parsed.prompt), len(text))]
        return Rendered(parsed.where, text, spans, prompt=parsed.prompt)

    def _samples(self, chat: Chat) -> Iterator[Rendered]:
        if self._template is None:
            raise ConfigError(
                f"{chat.where} is a conversation, and the tokenizer {self._tokenizer.source} has "
                "no chat template. Set chat_template to the text or the file of one."
            )
        options = self._options_of(chat)
        chat, dropped = drop(self._with_images(chat), options.drop_fields)
        self.counts.update(DROPPED[name] for name in dropped)
        if chat.nulls:
            self.counts[NULLS] += chat.nulls
        if not chat.trained:
            self.counts["rows without an answer"] += 1
        for sample in self._template.samples(chat, options):
            if sample.is_rewritten:
                self.counts[REWRITTEN] += 1
            yield sample

    def _options_of(self, chat: Chat) -> ChatOptions:
        """Return the trained part of a conversation."""
        return self._options.chat

    def _placed(self, text: Rendered, ids: Ids, characters: Characters) -> Document:
        """Return the document of a template's text. A token is trained if the token begins in a
        trained character, or has the first one.

        Templates such as GLM's write no end of a turn: generation stops at the next turn's header.
        A header right behind such an answer is trained, too.
        """
        begins, stops = characters.T
        trained = np.zeros(len(ids), np.bool_)
        for begin, end in text.spans:
            merged = (begins < begin) & (stops > begin)
            if merged.any():
                self.counts[MERGED] += 1
            trained |= merged | ((begins >= begin) & (begins < end))
        for end in text.ends:
            following = int(np.searchsorted(begins, end))
            is_adjacent = following < len(ids) and begins[following] == end
            if is_adjacent and not self._has_end(ids[:following][trained[:following]]):
                trained[following] = self._tokenizer.is_added(int(ids[following]))
        if trained.any() and not self._has_end(ids[trained]):
            self.counts[UNENDED] += 1
        if text.grown is None:
            return Document(ids, trained)
        images = text.grown.in_document(begins)
        return Document(ids, trained & ~images.is_image(len(ids)), images=images)

    def _completed(
        self, text: Rendered, ids: Ids, characters: Characters, prompt_ids: Ids
    ) -> Document:
        """Return the document of a text without a template. Begin and end of text are added unless
        the text has them, as a rendered text has.

        The completion begins at the first id that differs from the ids of the prompt alone: the end
        of the prompt may be a part of the completion's first token.
        """
        shared = min(len(ids), len(prompt_ids))
        differs = ids[:shared] != prompt_ids[:shared]
        first = int(np.argmax(differs)) if differs.any() else shared
        if first < np.searchsorted(characters[:, 0], len(text.prompt or "")):
            self.counts[MERGED] += 1
        trained = np.arange(len(ids)) >= first
        begin_ids = self._tokenizer.begin
        if ids[: len(begin_ids)].tolist() != begin_ids:
            ids, trained = np.append(begin_ids, ids), np.append([False] * len(begin_ids), trained)
        if not self._ends_text(ids):
            ids, trained = np.append(ids, self._tokenizer.end), np.append(trained, True)
        return Document(ids.astype(np.int32), trained)

    def _ends_text(self, ids: Ids) -> bool:
        """Return whether ids end where generation stops. White space may follow the end."""
        for token in ids[::-1]:
            if int(token) in self._stops:
                return True
            if self._tokenizer.decode([int(token)]).strip():
                return False
        return False

    @cached_property
    def _stops(self) -> frozenset[int]:
        """Ids at which generation stops: end of text, end of a turn, and those of the model."""
        behind = "" if self._template is None else self._template.behind_answer
        (ids, _), *_ = self._tokenizer.encode([behind])
        end_of_turn = [token for token in ids[:1].tolist() if self._tokenizer.is_added(token)]
        return self._ends | {self._tokenizer.end, *end_of_turn}

    def _has_end(self, trained_ids: npt.NDArray[np.int32]) -> bool:
        """Return whether trained ids end in an added token, such as an end of turn."""
        # A line break may follow the end of a turn.
        return any(map(self._tokenizer.is_added, trained_ids[-2:].tolist()))

    def _cut(self, document: Document) -> Document | None:
        """Return a document within the length limit, or None if the document is left out."""
        ids, trained, images = document.ids, document.trained.copy(), document.images
        trained[:1] = False  # the first token has no context
        length, limit = len(ids), self._options.sequence_length
        if length > limit:
            self.counts["too long"] += 1
            keep = self._kept(trained, length, limit)
            if keep is None:
                self.counts["left out as too long"] += 1
                return None
            if images is not None:
                keep = images.whole(keep)
                images = self._cut_images(images, keep, ids)
                if images is None:
                    self.counts[UNCUT] += 1
                    return None
            ids, trained = ids[keep], trained[keep]
            trained[:1] = False
            self.counts["cut tokens"] += length - len(ids)
        if not trained.any():
            self.counts["left out without a trained token"] += 1
            return None
        self.counts["documents"] += 1
        self.counts["tokens"] += len(ids)
        self.counts["trained tokens"] += int(trained.sum())
        if images is None or not images.images:
            return Document(ids, trained)
        self.counts["images"] += len(images.images)
        return Document(ids, trained, images=images)

    def _cut_images(
        self, images: DocumentImages, keep: npt.NDArray[np.int64], ids: Ids
    ) -> DocumentImages | None:
        """Return the images with a place in the positions ``keep``. None: the document cannot be
        made without the others.
        """
        if self._images is None or not len(keep):
            return None
        processor = self._images.processor
        cut = images.cut(keep, ids, processor.placeholder, self._ids_of_text, processor.growth)
        if cut is not None:
            self.counts["lost images"] += len(images.images) - len(cut.images)
        return cut

    def _ids_of_text(self, text: str) -> Ids:
        ((ids, _),) = self._tokenizer.encode([text])
        return ids

    def _kept(self, trained: Marks, length: int, limit: int) -> npt.NDArray[np.int64] | None:
        """Return the remaining positions [limit] of a document above the length limit. None: the
        document is left out.
        """
        everything, kind = np.arange(length), self._options.truncation
        if kind == "right":
            return everything[:limit]
        answer = int(np.argmax(trained)) if trained.any() else length
        remaining = answer - (length - limit)  # of the prompt
        if kind == "drop" or remaining < 1:
            return None
        if kind == "left":
            return everything[length - limit :]
        head = remaining - remaining // 2
        return np.concatenate([everything[:head], everything[answer - (remaining - head) :]])
