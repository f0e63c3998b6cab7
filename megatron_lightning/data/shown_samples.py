"""Training samples printed as text, with the lengths of the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from megatron_lightning.data.images.row_entries import IMAGES
from megatron_lightning.data.indexed.data_inspection import length_picture
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.remote import written_path
from megatron_lightning.data.masked.masked_data import MaskedData
from megatron_lightning.data.pretraining.indexed_data import IndexedData
from megatron_lightning.data.pretraining.pretrain_data import PretrainData
from megatron_lightning.data.rollouts.rollout_data import RolloutData
from megatron_lightning.data.rows.cut_rows import FULL
from megatron_lightning.data.rows.finetune_data import FinetuneData
from megatron_lightning.data.rows.packed_rows import RowDataset
from megatron_lightning.data.rows.preference_rows import SIDES
from megatron_lightning.data.rows.row_view import (
    as_numbers,
    histogram,
    sample_note,
    sample_text,
    stream_text,
)
from megatron_lightning.data.text.tokenizers import Tokenizer
from megatron_lightning.errors import ConfigError

_INPUTS = (("text", "padding_mask"), ("text_enc", "enc_mask"), ("text_dec", "dec_mask"))
"""Inputs of masked samples with their masks of padding."""


def show_samples(console: Any, data: object, samples: int) -> None:
    """Print the first training samples of data that are set up.

    Args:
        console: Console of ``rich``.
        data: The data.
        samples: Number of samples.

    Raises:
        ConfigError: If the data are of another kind.
    """
    if isinstance(data, FinetuneData):
        _show_conversations(console, data, samples)
    elif isinstance(data, PretrainData):
        _show_stream(console, data, samples)
    elif isinstance(data, MaskedData):
        _show_masked(console, data, samples)
    elif isinstance(data, RolloutData):
        _show_rollouts(console, data, samples)
    else:
        raise _unknown(data)


def _unknown(data: object) -> ConfigError:
    return ConfigError(
        f"data is a {type(data).__name__}, and what can be shown is a FinetuneDataModule, a "
        "PretrainDataModule, a MaskedDataModule or a RolloutDataModule. Set data.class_path to "
        "one of megatron_lightning.modules."
    )


def _show_conversations(console: Any, data: FinetuneData, samples: int) -> None:
    rows = data.train_dataset()
    order = list(data.row_order())
    for number, row in enumerate(order[:samples]):
        values = rows[row].items()
        arrays = {name: value.numpy() for name, value in values if name not in (FULL, IMAGES)}
        images = rows.image_places(row) if isinstance(rows, RowDataset) else []
        for name, sample in _samples(arrays).items():
            note = f"row {number + 1} of {len(order)}{name}: {sample_note(sample)}"
            console.rule(note, align="left")
            console.print(sample_text(sample, data.tokenizer.decode, images))
    console.rule("lengths", align="left")
    console.print(histogram(data.lengths, data.sequence_length))


def _show_stream(console: Any, data: PretrainData, samples: int) -> None:
    """Print samples of pre-training, and the lengths of the documents of each data set."""
    dataset, tokenizer = data.train_dataset(), data.tokenizer
    decode = as_numbers if tokenizer is None else tokenizer.decode
    for number in range(min(samples, len(dataset))):
        sample = dataset[number]
        source = f", data set {int(sample['dataset_id'])}" if "dataset_id" in sample else ""
        title = f"sample {number + 1} of {len(dataset)}: {data.sequence_length} tokens{source}"
        console.rule(title, align="left")
        end = None if tokenizer is None else tokenizer.eod
        console.print(stream_text(sample["tokens"].tolist(), end, decode))
    _show_lengths(console, data)


def _show_masked(console: Any, data: MaskedData, samples: int) -> None:
    """Print inputs of masked samples, of a decoder too, and the lengths of the documents."""
    dataset, tokenizer = data.train_dataset(), data.tokenizer
    decode = as_numbers if tokenizer is None else tokenizer.decode
    for number in range(min(samples, len(dataset))):
        sample = dataset[number]
        for text, mask in _INPUTS:
            if text in sample:
                ids = sample[text][: int(sample[mask].nonzero().max()) + 1].tolist()
                num_counted = int(sample["loss_mask"].sum())
                title = f"sample {number + 1} of {len(dataset)}: {text}, {num_counted} labels"
                console.rule(title, align="left")
                console.print(decode(ids), markup=False)
    _show_lengths(console, data)


def _show_rollouts(console: Any, data: RolloutData, samples: int) -> None:
    """Print rows of the first recorded generation with their rewards, or prompts to sample."""
    tokenizer = data.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return f"{as_numbers(ids)} " if tokenizer is None else tokenizer.decode(ids)

    if data.samples:
        for number, prompt in enumerate(data.prompts[:samples], 1):
            title = f"prompt {number} of {len(data.prompts)}: {len(prompt.ids)} ids"
            console.rule(title, align="left")
            console.print(decode(prompt.ids), markup=False)
        return
    rows = data.generation(0).rows
    for number, row in enumerate(rows[:samples], 1):
        rewards = ", ".join(f"{name} {value}" for name, value in row.rewards.items())
        file = PurePath(data.file(0)).name
        title = f"{file}, row {number} of {len(rows)}: group {row.group}, {rewards}"
        console.rule(title, align="left")
        console.print(sample_text(row.arrays(), decode))


def _show_lengths(console: Any, data: IndexedData) -> None:
    for prefix in data.train_prefixes():
        console.rule("lengths", align="left")
        console.print(prefix)
        console.print(length_picture(IndexedDataset(prefix, data.config.block_cache)))


def show_documents(console: Any, prefix: str, tokenizer: Tokenizer | None, samples: int) -> None:
    """Print documents of an indexed data set, and the lengths of all."""
    indexed = IndexedDataset(written_path(prefix, "prefix"))
    decode = as_numbers if tokenizer is None else tokenizer.decode
    bounds = indexed.document_indices.tolist()
    for number in range(min(samples, indexed.num_documents)):
        sequences = [indexed[i] for i in range(bounds[number], bounds[number + 1])]
        tokens = [token for sequence in sequences for token in sequence.tolist()]
        title = f"document {number + 1} of {indexed.num_documents}: {len(tokens)} tokens"
        console.rule(title, align="left")
        end = None if tokenizer is None else tokenizer.eod
        console.print(stream_text(tokens, end, decode))
    console.rule("lengths", align="left")
    console.print(length_picture(indexed))


def sample_values(data: object, samples: int) -> dict[str, Any]:
    """Return the first training samples of data that are set up, as plain values.

    Raises:
        ConfigError: If the data are of another kind.
    """
    order: Sequence[Any]
    dataset: Any
    if isinstance(data, RolloutData):
        rows: Sequence[Any] = data.prompts if data.samples else data.generation(0).rows
        return {"num_samples": len(rows), "samples": [asdict(row) for row in rows[:samples]]}
    if isinstance(data, FinetuneData):
        dataset, order = data.train_dataset(), list(data.row_order())
    elif isinstance(data, PretrainData | MaskedData):
        dataset = data.train_dataset()
        order = range(len(dataset))
    else:
        raise _unknown(data)
    tokenizer = data.tokenizer
    decode = None if tokenizer is None else tokenizer.decode
    found = []
    for row in order[:samples]:
        arrays = {
            name: value.tolist()
            for name, value in dataset[row].items()
            if name not in (FULL, IMAGES) and hasattr(value, "tolist")
        }
        text = (
            {} if decode is None or "tokens" not in arrays else {"text": decode(arrays["tokens"])}
        )
        found.append({**arrays, **text})
    return {"num_samples": len(order), "samples": found}


def document_values(prefix: str, tokenizer: Tokenizer | None, samples: int) -> dict[str, Any]:
    """Return the first documents of an indexed data set, as plain values."""
    indexed = IndexedDataset(written_path(prefix, "prefix"))
    bounds = indexed.document_indices.tolist()
    found: list[dict[str, Any]] = []
    for number in range(min(samples, indexed.num_documents)):
        sequences = [indexed[i] for i in range(bounds[number], bounds[number + 1])]
        tokens = [token for sequence in sequences for token in sequence.tolist()]
        text = {} if tokenizer is None else {"text": tokenizer.decode(tokens)}
        found.append({"tokens": tokens, **text})
    return {"num_samples": indexed.num_documents, "samples": found}


def _samples(arrays: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the samples in a row by their names: one, or the answers of a pair."""
    if "tokens" in arrays:
        return {"": arrays}
    return {
        f", {side}": {"tokens": arrays[side], "labels": arrays[f"{side}_labels"]} for side in SIDES
    }
