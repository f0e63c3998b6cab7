"""Chats, texts and tokens as batches for supervised fine-tuning."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.data.chat.answer_ends import answer_ends
from megatron_lightning.data.chat.chat_encoding import (
    BadRows,
    Documents,
    Encoder,
    SupervisedOptions,
    Truncation,
)
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate, TrainOn
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.chat_view import Reasoning
from megatron_lightning.data.chat.template_texts import (
    PromptDate,
    newest_date,
    parse_date,
    without_marks,
    writes_date,
)
from megatron_lightning.data.order.resume_order import (
    OnChangedData,
    check_new_tokens,
    describe_changes,
)
from megatron_lightning.data.rows.cut_rows import CutRows
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
from megatron_lightning.data.rows.row_report import describe_documents
from megatron_lightning.data.rows.source_list import parse_sources
from megatron_lightning.data.rows.sources import source_files
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules.folder_data import (
    check_model,
    folder_tokenizer,
    generation_ends,
    tokenizer_files,
)
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.row_lengths import first_rows, row_multiple
from megatron_lightning.modules.run_data import Batch, RunDataModule
from megatron_lightning.modules.taught_texts import hand_over

Paths = str | list[str] | list[tuple[float, str]]


class FinetuneDataModule(RunDataModule):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "padding": [b, s]}`` from conversations,
    prompts with completions, texts or tokens. Packed batches also have ``document_ids`` and
    ``position_ids`` [b, s].

    Labels are already shifted. Labels are -100 without a loss: in prompts, in padding, and in
    answers left out by a row (``weight: 0``). A conversation is rendered by the tokenizer's chat
    template and tokenized once a node, into a cache mapped by all ranks. The keys of a row
    determine the schema: ``messages`` (OpenAI, with ``tools``), ``conversations`` (ShareGPT),
    ``instruction`` and ``output`` (Alpaca), ``prompt`` and ``completion``, ``text``, or
    ``input_ids`` with ``labels``.

    Args:
        path: File (JSON lines, JSON, CSV, Parquet, Arrow), folder, glob pattern, URL, or the name
            of a data set on the Hugging Face Hub. Of several sources a list, or a list of pairs of
            a weight and a path.
        sequence_length: Positions of a row (s), and the longest document.
        batch_size: Rows of a batch on a data-parallel rank (b).
        val_path: Data of validation, as ``path`` without weights.
        val_fraction: Fraction of the rows of ``path`` for validation. 0: none.
        split: Split of a data set on the Hub, with or without a slice such as ``train[:1000]``.
        subset: Configuration of a data set on the Hub.
        tokenizer: Folder, ``tokenizer.json`` or name of the tokenizer, or the tokenizer. Default:
            the model's.
        chat_template: Jinja template, or a file with a template. Default: the tokenizer's.
        template_options: Further values for the template, such as ``enable_thinking: false``.
        date: Date that a template with a date writes, such as 2026-11-28. Default: the newest
            modification date of the data files (UTC), so that all nodes and days have the same.
        packing: ``none``: a document is a row. ``offline``: documents are packed into rows once.
            ``online``: documents are packed anew in every epoch, in the order of the epoch.
        packing_window: Documents packed together with ``online``.
        balance_rows: Rows of a global batch. If set, the rows of a batch are ordered by the cost of
            attention (the sum of squares of the documents), so that data-parallel ranks wait less
            for each other. 0: rows keep the order.
        truncation: Treatment of a document longer than a row: the document is left out (``drop``),
            or loses the start (``left``) or the middle (``middle``) of the prompt, or the
            document's end (``right``).
        train_on: All answers of a conversation, or only the last answer.
        split_turns: Whether every answer becomes a separate sample, behind the earlier messages.
        reasoning: ``keep``: the template gets the reasoning of answers. ``drop``: the template does
            not. ``mask``: the template does, and reasoning has no loss. ``inline``: the template
            gets the reasoning inside of the content, as ``<think>…</think>``.
        drop_fields: Fields of rows and messages to leave out, such as ``tools`` or ``system``. A
            field that the template does not write is an error otherwise.
        bad_rows: Treatment of rows that cannot be used: an error names them (``refuse``), or they
            are left out and counted (``skip``).
        new_tokens: Texts to add as new tokens. A folder's model without rows for them grows.
        seed: Seed of the order, and of the choice of validation rows.
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        reading_thread: Whether a thread of the training process reads the next two batches while
            a step waits for its device. Replaces ``num_workers``, and is faster for small samples.
        pad_to: Rows of documents of their own are cut to the longest row of a batch, up to a
            multiple of this and of what layout and precision divide. Default: 64, and with
            ``compile`` the ``sequence_length``, which cuts nothing. The first batch of a run keeps
            the full length, so that the first step shows the most memory.
        cache_dir: Folder of the tokenized documents. Default: ``~/.cache/megatron_lightning``.
        on_changed_data: Reaction of a resumed run if the order of training rows has changed since
            the checkpoint. ``refuse`` raises an error. ``reorder`` reads on at the same position of
            the new order with a warning.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If data or tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {"tokens": 1, "labels": 1, "padding": 1, "position_ids": 1, "document_ids": 1}
    )
    """Sequence dim of each batch entry."""

    def __init__(
        self,
        path: Paths,
        *,
        sequence_length: int,
        batch_size: int,
        val_path: str | list[str] | None = None,
        val_fraction: float = 0.0,
        split: str = "train",
        subset: str | None = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        date: str | None = None,
        packing: Packing = "none",
        packing_window: int = 10_000,
        balance_rows: int = 0,
        truncation: Truncation = "drop",
        train_on: TrainOn = "answers",
        split_turns: bool = False,
        reasoning: Reasoning = "keep",
        drop_fields: Sequence[str] = (),
        bad_rows: BadRows = "refuse",
        new_tokens: Sequence[str] = (),
        seed: int = 1234,
        num_workers: int = 0,
        reading_thread: bool = False,
        pad_to: int | None = None,
        cache_dir: str | None = None,
        on_changed_data: OnChangedData = "refuse",
    ) -> None:
        super().__init__(num_workers, reading_thread=reading_thread)
        self.paths, self.weights = parse_sources(path)
        self.val_paths = [] if val_path is None else parse_sources(val_path)[0]
        self.options = SupervisedOptions(
            sequence_length=sequence_length,
            truncation=truncation,
            bad_rows=bad_rows,
            chat=ChatOptions(
                train_on=train_on,
                split_turns=split_turns,
                reasoning=reasoning,
                drop_fields=tuple(drop_fields),
            ),
        )
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.packing: Packing = packing
        self.packing_window = packing_window
        self.balance_rows = balance_rows
        self.seed = seed
        self.on_changed_data: OnChangedData = on_changed_data
        self.new_tokens = tuple(new_tokens)
        self._tokens_of_checkpoint: dict[str, int] = {}
        self._tokenizer = tokenizer
        self._template = chat_template
        self._template_options = template_options
        self._date = None if date is None else parse_date(date)
        self.pad_to = pad_to
        self._cache = DocumentCache(cache_dir, split=split, subset=subset)
        self._known: dict[str, Documents] = {}
        self._check()
        self._train: Sources | None = None
        self._validate: Sources | None = None
        self._order_of_rows: RowOrder | None = None

    def _check(self) -> None:
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("packing_window", self.packing_window, 1),
            ("balance_rows", self.balance_rows, 0),
            ("num_workers", self.num_workers, 0),
            ("pad_to", 1 if self.pad_to is None else self.pad_to, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}: set it to {least} or more")
        for name, choice, values in (
            ("packing", self.packing, Packing),
            ("on_changed_data", self.on_changed_data, OnChangedData),
        ):
            if choice not in get_args(values):
                raise ConfigError(
                    f"{name}={choice!r}; must be one of {', '.join(get_args(values))}"
                )
        if self.on_changed_data in ("continue", "restart"):
            raise ConfigError(
                f"on_changed_data={self.on_changed_data!r} is an option of PretrainDataModule: "
                "changed conversations are packed in another way. Set it to refuse or reorder."
            )
        if not 0.0 <= self.val_fraction < 1.0:
            raise ConfigError(f"val_fraction={self.val_fraction}: set it to 0 or more, and below 1")
        if self.val_fraction and self.val_paths:
            raise ConfigError(f"val_fraction={self.val_fraction} beside val_path: set one of them")
        if self.packing == "offline" and self.weights is not None:
            raise ConfigError(
                "packing=offline packs every document once, and weights repeat some and leave out "
                "others. Set packing to online, or leave the weights out."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: set it to 0 or more, below 2**32")

    @property
    def sequence_length(self) -> int:
        """Positions of a row."""
        return self.options.sequence_length

    @property
    def vocab_size(self) -> int | None:
        """Number of ids of the tokenizer, new tokens included. None: not yet known."""
        is_known = self._tokenizer is not None or self._module is not None
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
        tokenizer = folder_tokenizer(self._run_module(), self.new_tokens)
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
        prompt_date = PromptDate(self.date)
        options = {
            **prompt_date.options(self._templates.values(), asked=self._date is not None),
            **(self._template_options or {}),
        }
        preamble = prompt_date.preamble(self._templates.values())
        return ChatTemplate(self._templates, self.tokenizer.special_tokens, options, preamble)

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
        source = self.tokenizer.chat_template or {}
        return {"default": source} if isinstance(source, str) else source

    def check_files(self, stage: str, module: pl.LightningModule) -> None:
        """Check files, tokenizer and ids before the strategy starts a process, without reading
        rows.

        Args:
            stage: The Trainer's next action.
            module: The module of the action. If no tokenizer is set, the module's is used.

        Raises:
            ConfigError: If the model has no embedding for an id of the tokenizer, or a validation
                has no data.
            DataError: If something is missing.
        """
        if stage == "validate" and not (self.val_fraction or self.val_paths):
            raise ConfigError(
                "validate reads the validation data, and there are none. Set val_path, or "
                "val_fraction=0.02 to hold out some of the training data."
            )
        for path in (*self.paths, *self.val_paths):
            source_files(path)
        self.use_model(module)
        is_packed, num_new = self.packing != "none", len(self.tokenizer.added)
        check_model(module, len(self.tokenizer), packed=is_packed, num_new=num_new)
        _ = self.template

    def prepare_data(self) -> None:
        """Render and tokenize, unless the result is cached. Lightning calls this once on every
        node.
        """
        self._known.clear()
        for path in (*self.paths, *self.val_paths):
            self._cache.look_up(path)
            self._documents(path)

    def setup(self, stage: str) -> None:
        """Map the documents into memory, and pack the documents. Tell the model its new tokens."""
        module = self._run_module()
        if self.new_tokens and isinstance(module, FolderModule):
            module.new_tokens = self.tokenizer.added
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
                num_full=first_rows(self.trainer, self.batch_size) if self._cuts else 0,
            )
            rank_zero_info(self.describe())

    @property
    def _cuts(self) -> CutRows | None:
        """Collates batches cut to their longest rows. None: rows keep their length."""
        if self.packing != "none":
            return None
        module, length = self._run_module(), self.sequence_length
        multiple = row_multiple(self.trainer, module, length, self.pad_to)
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

    def _encoder(self) -> Encoder:
        """Return what makes documents of the rows of a source."""
        return Encoder(self.tokenizer, self.template, self.options, self._ends)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Ids at which generation stops, beside the tokenizer's end of text."""
        return generation_ends(self._run_module(), self._tokenizer)

    def _parts(self) -> Sequence[Part]:
        """Return the samples of each source: training sources first, then validation sources."""
        return [self._documents(path) for path in (*self.paths, *self.val_paths)]

    def _documents(self, path: str) -> Documents:
        """Return the tokenized documents of a source. Files changed during a fit have no effect."""
        if path not in self._known:
            self._known[path], note = self._cache.documents(path, self._encoder())
            if note is not None:
                rank_zero_warn(note)
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
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return
        warning = describe_changes(
            self._order(),
            state_dict["order"],
            on_changed_data=self.on_changed_data,
            consumed_samples=state_dict["consumed_samples"],
        )
        if warning is not None:
            rank_zero_warn(warning)

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
            sources, self.sequence_length, self.tokenizer.padding, rows, packed=packed
        )

    def text_record(self) -> TextRecord:
        """Return what the data teach a model about texts, to travel with the weights.

        Raises:
            DataError: Before ``setup``, if documents cannot be made.
        """
        sources = [self._documents(path) for path in self.paths]
        files = tokenizer_files(
            self._run_module(), self.tokenizer, is_given=self._tokenizer is not None
        )
        return TextRecord(
            chat_template=(
                None if self._template is None else without_marks(self._templates["default"])
            ),
            end_of_turn=answer_ends(sources, self.tokenizer, self.options),
            ends_before=self._ends,
            date=None if self.date is None else self.date.isoformat(),
            tokenizer=files,
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the training loader, without incomplete batches. The model of the run gets the
        record of the texts.
        """
        module = self._run_module()
        if module is not None:
            hand_over(module, self.text_record())
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
            collate_fn=self._cuts,
        )

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the validation loader. Without validation data return an empty list."""
        if self._validate is None:
            return []
        packed = self.packing != "none"
        rows = pack(self._validate.lengths, self.sequence_length) if packed else None
        dataset = self._dataset(self._validate, rows)
        return self._loader_of(
            dataset, batch_size=self.batch_size, shuffle=False, collate_fn=self._cuts
        )
