"""Samples, tokens and FLOPs of a batch, and values of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import num_logged_steps
from megatron_lightning.parallel.collectives import gather
from megatron_lightning.pipeline.batch.microbatches import batch_size_of
from megatron_lightning.strategies.megatron import MegatronStrategy

_USUAL_ENTRIES = ("tokens", "input_ids")


def num_samples(batch: Any) -> int:
    """Return the samples of this rank's batch. 1 for a batch without tensors."""
    return batch_size_of(batch) or 1


def num_tokens(
    trainer: pl.Trainer, module: pl.LightningModule, batch: Any, entry: str | None
) -> int:
    """Return the tokens of this rank's batch, padding included. 0 if unknown.

    Args:
        trainer: The Trainer.
        module: Declares ``sequence_dims``, or the data module does.
        batch: The batch.
        entry: Entry of the batch with one element for each token. None: samples times the declared
            sequence length, or else the elements of ``tokens`` or ``input_ids``.

    Raises:
        ConfigError: If the batch has no tensor ``entry``.
    """
    entries: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
    if entry is not None:
        if not isinstance(entries.get(entry), Tensor):
            listing = ", ".join(map(str, entries)) or f"of type {type(batch).__name__}"
            raise ConfigError(
                f"tokens is {entry!r}, and the batch has no tensor of that name: {listing}. Set "
                "tokens to the entry that holds one element for each token."
            )
        return int(entries[entry].numel())
    # From certain to likely: declared dims, then entries by their usual names.
    dims: Mapping[Any, int] | None = getattr(module, "sequence_dims", None)
    if dims is None:
        dims = getattr(getattr(trainer, "datamodule", None), "sequence_dims", None)
    if isinstance(batch, list | tuple):
        entries = dict(enumerate(batch))  # sequence_dims names these by their places
    lengths = [
        entries[name].shape[dim]
        for name, dim in (dims or {}).items()
        if isinstance(entries.get(name), Tensor)
    ]
    if lengths:
        return num_samples(batch) * int(max(lengths))
    usual = [entries[name] for name in _USUAL_ENTRIES if isinstance(entries.get(name), Tensor)]
    return int(usual[0].numel()) if usual else 0


def transformer_config(module: pl.LightningModule) -> TransformerConfig | None:
    """Return the sizes of the module's model. None: a model of another kind."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if isinstance(config, TransformerConfig):
            return config
    return None


def num_data_ranks(trainer: pl.Trainer) -> int:
    """Return how many ranks read different samples."""
    arguments: Mapping[str, Any] = (
        getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    )
    return int(arguments.get("num_replicas", trainer.world_size))


def values_of_ranks(trainer: pl.Trainer, values: Sequence[float]) -> list[list[float]]:
    """Return the values of every rank, in rank order and the same on all. A collective."""
    strategy = trainer.strategy
    own_values = torch.tensor([list(values)], dtype=torch.float64)
    if trainer.world_size == 1:
        return own_values.tolist()
    own_values = own_values.to(strategy.root_device)
    if isinstance(strategy, MegatronStrategy):
        return gather(own_values, strategy.context.axis("world"), dim=0).tolist()
    return strategy.all_gather(own_values[0]).tolist()


def log_values(
    trainer: pl.Trainer,
    values: Mapping[str, float],
    prefix: str,
    progress_bar: Sequence[str] = (),
) -> None:
    """Give values, equal on every rank, to the loggers, to ``trainer.callback_metrics`` and to the
    progress bar.

    ``LightningModule.log`` would cost some tenths of a millisecond a value, and round counts of
    tokens to fp32.

    Args:
        trainer: The Trainer, at the end of an optimizer step.
        values: Value by name.
        prefix: Text before the name. The narrow progress bar shows names alone.
        progress_bar: Names of the values shown by the progress bar.
    """
    prefixed = {prefix + name: value for name, value in values.items()}
    for logger in trainer.loggers:
        logger.log_metrics(prefixed, step=num_logged_steps(trainer) - 1)
    trainer.callback_metrics.update(
        {key: torch.tensor(value, dtype=torch.float64) for key, value in prefixed.items()}
    )
    trainer.progress_bar_metrics.update(
        {name: value for name, value in values.items() if name in progress_bar}
    )
