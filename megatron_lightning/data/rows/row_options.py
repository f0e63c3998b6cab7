"""Options of the data of fine-tuning: chats, texts, tokens, and pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

from megatron_lightning.data.chat.chat_encoding import BadRows, Truncation
from megatron_lightning.data.chat.chat_template import TrainOn
from megatron_lightning.data.chat.chat_view import Reasoning
from megatron_lightning.data.images.image_options import AudioOptions, ImageOptions
from megatron_lightning.data.order.resume_order import OnChangedData
from megatron_lightning.data.rows.packed_rows import Packing
from megatron_lightning.data.rows.source_list import parse_sources
from megatron_lightning.errors import ConfigError

Paths = str | list[str] | list[tuple[float, str]]


@dataclass(frozen=True)
class RowOptions:
    """Options common to chats and to pairs of answers.

    Args:
        path: File (JSON lines, JSON, CSV, Parquet, Arrow), folder, glob pattern, URL, or the name
            of a data set on the Hugging Face Hub. Of several sources a list, or a list of pairs of
            a weight and a path.
        sequence_length: Positions of a row (s), and the longest document. If one answer of a pair
            is left out as too long, the other is as well.
        batch_size: Rows, or pairs, of a batch on a data-parallel rank (b).
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
        truncation: Treatment of a document longer than a row: the document is left out (``drop``),
            or loses the start (``left``) or the middle (``middle``) of the prompt, or the
            document's end (``right``).
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
    """

    path: Paths
    _: KW_ONLY
    sequence_length: int
    batch_size: int
    val_path: str | list[str] | None = None
    val_fraction: float = 0.0
    split: str = "train"
    subset: str | None = None
    tokenizer: Any = None
    chat_template: str | None = None
    template_options: dict[str, Any] | None = None
    date: str | None = None
    truncation: Truncation = "drop"
    reasoning: Reasoning = "keep"
    drop_fields: Sequence[str] = ()
    bad_rows: BadRows = "refuse"
    new_tokens: Sequence[str] = ()
    seed: int = 1234
    num_workers: int = 0
    reading_thread: bool = False
    pad_to: int | None = None
    cache_dir: str | None = None
    on_changed_data: OnChangedData = "refuse"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("num_workers", self.num_workers, 0),
            ("pad_to", 1 if self.pad_to is None else self.pad_to, 1),
        ):
            check_least(name, value, least)
        check_choice("on_changed_data", self.on_changed_data, OnChangedData)
        if self.on_changed_data in ("continue", "restart"):
            raise ConfigError(
                f"on_changed_data={self.on_changed_data!r} is an option of PretrainDataModule: "
                "changed conversations are packed in another way. Set it to refuse or reorder."
            )
        if not 0.0 <= self.val_fraction < 1.0:
            raise ConfigError(f"val_fraction={self.val_fraction}: set it to 0 or more, and below 1")
        if self.val_fraction and self.val_path:
            raise ConfigError(f"val_fraction={self.val_fraction} beside val_path: set one of them")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: set it to 0 or more, below 2**32")


@dataclass(frozen=True)
class FinetuneOptions(RowOptions):
    """Options of the data of supervised fine-tuning.

    Args:
        packing: ``none``: a document is a row. ``offline``: documents are packed into rows once.
            ``online``: documents are packed anew in every epoch, in the order of the epoch.
        packing_window: Documents packed together with ``online``.
        balance_rows: Rows of a global batch. If set, the rows of a batch are ordered by the model's
            operations, of text and of images, so that data-parallel ranks wait less for each other.
            0: rows keep the order.
        train_on: All answers of a conversation, or only the last answer.
        split_turns: Whether every answer becomes a separate sample, behind the earlier messages.
        images: Images in conversations, for models of ``transformers`` with a vision tower.
            Default: an image is an error.
        audio: Sounds in conversations, for models of ``transformers`` with an audio tower. Default:
            a sound is an error.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    _: KW_ONLY
    packing: Packing = "none"
    packing_window: int = 10_000
    balance_rows: int = 0
    train_on: TrainOn = "answers"
    split_turns: bool = False
    images: ImageOptions | None = None
    audio: AudioOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images is not None and self.audio is not None:
            raise ConfigError(
                "images and audio are both set, and a processor is asked about one of them; leave "
                "one out"
            )
        check_least("packing_window", self.packing_window, 1)
        check_least("balance_rows", self.balance_rows, 0)
        check_choice("packing", self.packing, Packing)
        if self.packing == "offline" and parse_sources(self.path)[1] is not None:
            raise ConfigError(
                "packing=offline packs every document once, and weights repeat some and leave out "
                "others. Set packing to online, or leave the weights out."
            )


@dataclass(frozen=True)
class PreferenceOptions(RowOptions):
    """Options of the data of preferences.

    Args:
        scores: File with the log-probabilities of the answers under a reference. ``predict`` writes
            the file, ``fit`` reads the file if the module's reference is "scores". Default: none.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    _: KW_ONLY
    scores: str | None = None


def check_least(name: str, value: float, least: int) -> None:
    """Check a number.

    Raises:
        ConfigError: If it is below ``least``.
    """
    if value < least:
        raise ConfigError(f"{name}={value}: set it to {least} or more")


def check_choice(name: str, choice: object, values: Any) -> None:
    """Check a choice of a ``Literal``.

    Raises:
        ConfigError: If it is another one.
    """
    if choice not in get_args(values):
        raise ConfigError(f"{name}={choice!r}; must be one of {', '.join(get_args(values))}")
