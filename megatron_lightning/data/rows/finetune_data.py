"""Chats, texts and tokens as rows for supervised fine-tuning."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.chat.chat_encoding import Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.documents import Documents
from megatron_lightning.data.chat.template_texts import (
    PromptDate,
    newest_date,
    parse_date,
    writes_date,
)
from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.images.image_encoder import ImageEncoder
from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.images.image_positions import POSITION_ROWS
from megatron_lightning.data.images.image_processor import ImageProcessor
from megatron_lightning.data.images.row_entries import Collate, CollateImages, RowEntries
from megatron_lightning.data.order.resume_order import (
    OnChangedData,
    check_new_tokens,
    describe_changes,
)
from megatron_lightning.data.rows.cut_rows import CutRows, row_multiple
from megatron_lightning.data.rows.document_cache import DocumentCache
from megatron_lightning.data.rows.packed_rows import (
    Packing,
    Part,
    RowDataset,
    RowOrder,
    Sources,
    held_out,
)
from megatron_lightning.data.rows.packing import Numbers, Rows, efficiency, pack
from megatron_lightning.data.rows.row_costs import RowCosts, Values
from megatron_lightning.data.rows.row_options import FinetuneOptions
from megatron_lightning.data.rows.row_report import describe_documents
from megatron_lightning.data.rows.source_list import parse_sources
from megatron_lightning.data.rows.sources import images_folder, source_files
from megatron_lightning.data.run_data import Batch, RunData
from megatron_lightning.errors import ConfigError, DataError


class FinetuneData(RunData):
    """Rows of ``FinetuneDataModule``, read without a Trainer."""

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {
            "tokens": 1,
            "labels": 1,
            "padding": 1,
            "position_ids": 1,
            "document_ids": 1,
            POSITION_ROWS: 2,
        }
    )
    """Sequence dim of each batch entry."""

    @takes(FinetuneOptions)
    def __init__(self, options: FinetuneOptions) -> None:
        super().__init__(options.num_workers, reading_thread=options.reading_thread)
        self.paths, self.weights = parse_sources(options.path)
        self.val_paths = [] if options.val_path is None else parse_sources(options.val_path)[0]
        self.options = SupervisedOptions(
            sequence_length=options.sequence_length,
            truncation=options.truncation,
            bad_rows=options.bad_rows,
            chat=ChatOptions(
                train_on=options.train_on,
                split_turns=options.split_turns,
                reasoning=options.reasoning,
                drop_fields=tuple(options.drop_fields),
            ),
        )
        self.batch_size = options.batch_size
        self.val_fraction = options.val_fraction
        self.packing: Packing = options.packing
        self.packing_window = options.packing_window
        self.balance_rows = options.balance_rows
        self.seed = options.seed
        self.on_changed_data: OnChangedData = options.on_changed_data
        self.new_tokens = tuple(options.new_tokens)
        self.pad_to = options.pad_to
        self._tokens_of_checkpoint: dict[str, int] = {}
        self._tokenizer = options.tokenizer
        self._template = options.chat_template
        self._template_options = options.template_options
        self._date = None if options.date is None else parse_date(options.date)
        self._cache = DocumentCache(options.cache_dir, split=options.split, subset=options.subset)
        self.images: ImageOptions | None = getattr(options, "images", None) or getattr(
            options, "audio", None
        )
        """Options of images, or of sounds."""
        self._known: dict[str, Documents] = {}
        self._train: Sources | None = None
        self._validate: Sources | None = None
        self._order_of_rows: RowOrder | None = None

    @property
    def sequence_length(self) -> int:
        """Positions of a row."""
        return self.options.sequence_length

    @property
    def vocab_size(self) -> int | None:
        """Number of ids of the tokenizer, new tokens included. None: not yet known."""
        is_known = self._tokenizer is not None or self._has_model
        return len(self.tokenizer) if is_known else None

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer of the data.

        Raises:
            ConfigError: If neither the data module nor the model names a tokenizer.
            DataError: If the tokenizer cannot be loaded.
        """
        if self._tokenizer is not None:
            return ChatTokenizer.load(self._tokenizer, new_tokens=self.new_tokens)
        tokenizer = self._model().tokenizer(self.new_tokens)
        if tokenizer is None:
            raise ConfigError(
                "tokenizer of FinetuneDataModule is not set, and the model comes with none. Set it "
                "to a folder with a tokenizer.json, or to a name on the Hugging Face Hub."
            )
        return tokenizer

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Chat template. None: there is no template."""
        if not self._templates:
            return None
        special = self.tokenizer.special_tokens
        preamble = PromptDate(self.date).preamble(self._templates.values())
        template = ChatTemplate(self._templates, special, self.template_values, preamble)
        if self.processor is not None:
            kind = "image" if self.images is None else self.images.kind
            self.processor.find_placeholder(template.with_image(kind))
        return template

    @property
    def template_values(self) -> dict[str, Any]:
        """Further values for the chat template, such as a date."""
        asked = self._date is not None
        date = PromptDate(self.date).options(self._templates.values(), asked=asked)
        return {**date, **(self._template_options or {})}

    @cached_property
    def processor(self) -> ImageProcessor | None:
        """Processor of images. None: the data have no images.

        Raises:
            ConfigError: If the model has none.
        """
        if self.images is None:
            return None
        return self._model().image_processor(self.tokenizer, self.images)

    @cached_property
    def date(self) -> datetime.date | None:
        """Date of the prompts. None: no template writes a date, or the data have none."""
        if not writes_date(self._templates.values(), asked=self._date is not None):
            return None
        return self._date or newest_date([*self.paths, *self.val_paths])

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        """Name -> text of the chat templates. Empty: there is none."""
        if self._template is not None:
            return ChatTemplate.load(self._template, {}).sources
        source = (self.processor and self.processor.chat_template) or (
            self.tokenizer.chat_template or {}
        )
        return {"default": source} if isinstance(source, str) else source

    def check_sources(self, stage: str) -> None:
        """Check that the files of a stage exist, without reading rows.

        Args:
            stage: The Trainer's next action.

        Raises:
            ConfigError: If a validation has no data.
            DataError: If a file is missing.
        """
        if stage == "validate" and not (self.val_fraction or self.val_paths):
            raise ConfigError(
                "validate reads the validation data, and there are none. Set val_path, or "
                "val_fraction=0.02 to hold out some of the training data."
            )
        for path in (*self.paths, *self.val_paths):
            source_files(path)

    def prepare_data(self) -> None:
        """Render and tokenize, unless the result is cached. Lightning calls this once on every
        node.
        """
        self._known.clear()
        for path in (*self.paths, *self.val_paths):
            self._cache.look_up(path)
            self._documents(path)

    def setup(self, stage: str) -> None:
        """Map the documents into memory, and pack the documents."""
        self._known.clear()
        # Training files come first, and validation files behind them.
        parts = self._parts()[: len(self.paths)]
        chosen = (
            [None, None] if not self.val_fraction else held_out(parts, self.val_fraction, self.seed)
        )
        self._train = Sources(parts, chosen[0], self.weights)
        self._validate = None
        if self.val_fraction:
            self._validate = Sources(parts, chosen[1])
        elif self.val_paths:
            self._validate = Sources(self._parts()[len(self.paths) :])
        for name, sources in (("training", self._train), ("validation", self._validate)):
            if sources is not None and not len(sources):
                counts = self._counts([self._documents(path) for path in self.paths])
                if not counts:
                    raise DataError(f"the {name} data have no row: the files are empty")
                raise DataError(
                    f"the {name} data have no document with a trained token: "
                    f"{counts}. Set truncation or sequence_length so that some stay."
                )
        if stage == "fit":
            self._order_of_rows = RowOrder(
                self._train,
                self.sequence_length,
                self.packing,
                seed=self.seed,
                window=self.packing_window,
                balanced=self.balance_rows,
                costs=self._costs_of(self._train),
                num_full=self.batch_size * self._num_replicas() if self._cuts else 0,
            )

    @cached_property
    def _row_costs(self) -> RowCosts | None:
        """Operations of the model, by which rows are balanced. None: they are not, or by the
        squares of lengths.
        """
        return self._model().row_costs(self.sequence_length) if self.balance_rows else None

    def _costs_of(self, sources: Sources) -> Values | None:
        costs = self._row_costs
        if costs is None:
            return None
        return costs.of_documents(sources.lengths, sources.image_tokens())

    @property
    def _cuts(self) -> CutRows | None:
        """Collates batches cut to their longest rows. None: rows keep their length."""
        if self.packing != "none":
            return None
        if self._model().fills_experts:
            return None
        length, pad_to = self.sequence_length, self.pad_to
        if pad_to is None and self._is_compiled():
            pad_to = length
        multiple = row_multiple(length, pad_to, divisor=self._row_divisor())
        names = tuple(self.sequence_dims)
        flags = tuple(name for name in names if name.endswith("padding"))
        return None if multiple is None else CutRows(names, flags, multiple)

    def describe(self) -> str:
        """Describe in a few lines the outcome of the rows, and how full the rows of a batch are.

        Raises:
            ConfigError: Before ``setup("fit")``.
        """
        rows = self.row_order().rows(0)
        lines = [
            describe_documents(path, self._documents(path))
            for path in (*self.paths, *self.val_paths)
        ]
        fill = efficiency(self.lengths, rows, self.sequence_length)
        lines.append(
            f"packing={self.packing}: {len(self.lengths)} documents in {len(rows)} rows of "
            f"{self.sequence_length} tokens, {fill:.1%} full"
        )
        if self.date is not None:
            source = "of the data files" if self._date is None else "as set"
            lines.append(f"the chat template writes the date {self.date} ({source}) in prompts")
        if self.packing == "online":
            lines.append(
                f"every epoch has {len(rows)} rows, as many as the first pass; the next one goes "
                "on where it ends"
            )
        return "\n".join(lines)

    def _counts(self, parts: Sequence[Documents]) -> str:
        return "; ".join(
            f"{name}: {count}" for part in parts for name, count in part.report.items()
        )

    def _encoder(self, path: str) -> Encoder:
        """Return what makes documents of the rows of a source."""
        template, images = self.template, None
        if self.images is not None and self.processor is not None:
            images = ImageEncoder(self.processor, images_folder(path, self.images), self.images)
        return Encoder(self.tokenizer, template, self.options, self._ends, images)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Ids at which generation stops, beside the tokenizer's end of text."""
        return self._model().generation_ends(self._tokenizer)

    def _parts(self) -> Sequence[Part]:
        """Return the samples of each source: training sources first, then validation sources."""
        return [self._documents(path) for path in (*self.paths, *self.val_paths)]

    def _documents(self, path: str) -> Documents:
        """Return the tokenized documents of a source. Files changed during a fit have no effect."""
        if path not in self._known:
            self._known[path], note = self._cache.documents(path, self._encoder(path))
            if note is not None:
                self._warn(note)
        return self._known[path]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the order of training rows and the new tokens, as plain values."""
        return {
            "order": self._order(),
            "consumed_samples": self._consumed_samples(),
            "new_tokens": self._new_token_ids(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a run from a checkpoint has the checkpoint's new tokens, and that a resumed
        fit reads the rows in the checkpoint's order.

        Raises:
            CheckpointError: If the new tokens differ, or the order has changed, unless
                ``on_changed_data`` accepts the change.
        """
        tokens: dict[str, int] | None = state_dict.get("new_tokens")
        if tokens is not None:
            vocabulary, added = self.tokenizer.vocabulary, self.tokenizer.added
            check_new_tokens(tokens, vocabulary=vocabulary, added=added)
            self._tokens_of_checkpoint = tokens
        if self._stage() != "fit":
            return
        warning = describe_changes(
            self._order(),
            state_dict["order"],
            on_changed_data=self.on_changed_data,
            consumed_samples=state_dict["consumed_samples"],
        )
        if warning is not None:
            self._warn(warning)

    def _new_token_ids(self) -> dict[str, int]:
        """Return text -> id of the new tokens, of a run before this run as well."""
        vocabulary = self.tokenizer.vocabulary if self.new_tokens else {}
        return self._tokens_of_checkpoint | {text: vocabulary[text] for text in self.new_tokens}

    def _order(self) -> dict[str, Any]:
        date = {} if self.date is None else {"date": self.date.isoformat()}
        return {
            **date,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "packing": self.packing,
            "packing_window": self.packing_window if self.packing == "online" else None,
            "balance_rows": self.balance_rows,
            "row_costs": self._row_costs and self._row_costs.digest,
            "val_fraction": self.val_fraction,
            "weights": None if self.weights is None else list(self.weights),
            "documents": [self._documents(path).digest[:16] for path in self.paths],
        }

    def row_order(self) -> RowOrder:
        """Return the sampler of the training rows.

        Raises:
            ConfigError: Before ``setup("fit")``.
        """
        if self._order_of_rows is None:
            raise ConfigError("the data are not set up; call setup('fit') before")
        return self._order_of_rows

    @property
    def lengths(self) -> Numbers:
        """Tokens of every training document.

        Raises:
            ConfigError: Before ``setup``.
        """
        if self._train is None:
            raise ConfigError("the data are not set up; call setup('fit') before")
        return self._train.lengths

    def train_dataset(self) -> Dataset[Batch]:
        """Return the training rows, indexed by tuples of documents.

        Raises:
            ConfigError: Before ``setup``.
        """
        if self._train is None:
            raise ConfigError("the data are not set up; call setup('fit') before")
        return self._dataset(self._train)

    def _dataset(self, sources: Sources, rows: Rows | None = None) -> Dataset[Batch]:
        """Return samples. ``rows``: documents of each row. None: each document is a row."""
        packed = self.packing != "none"
        return RowDataset(
            sources,
            self.sequence_length,
            self.tokenizer.padding,
            rows,
            packed=packed,
            entries=self._entries,
        )

    @property
    def _entries(self) -> RowEntries | None:
        """Makes entries of images. None: the data have no images."""
        if self.processor is None:
            return None
        positions = None if self.packing == "none" else self._model().image_positions()
        return RowEntries(self.processor, positions)

    @property
    def _collate(self) -> Collate | None:
        entries = self._entries
        return self._cuts if entries is None else CollateImages(entries, self._cuts)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the training loader, without incomplete batches."""
        order = self.row_order()
        if len(order) < self.batch_size:
            raise ConfigError(
                f"{', '.join(self.paths)}: there are {len(order)} rows of {self.sequence_length} "
                f"tokens, and batch_size={self.batch_size}: there is no full batch. Set batch_size "
                f"to {len(order)} or less."
            )
        return self._loader_of(
            self.train_dataset(),
            batch_size=self.batch_size,
            sampler=order,
            drop_last=True,
            collate_fn=self._collate,
        )

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the validation loader. Without validation data return an empty list."""
        if self._validate is None:
            return []
        packed = self.packing != "none"
        rows = pack(self._validate.lengths, self.sequence_length) if packed else None
        dataset = self._dataset(self._validate, rows)
        return self._loader_of(
            dataset, batch_size=self.batch_size, shuffle=False, collate_fn=self._collate
        )
