"""Loaders and the reading of their batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import DataLoader, Sampler


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of ``fit`` after :meth:`process_dataloader`. The public property returns
    nested loaders.
    """
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def restart_fetching(trainer: pl.Trainer) -> None:
    """Restart reading the training data: the fetcher of an epoch has read ahead before
    ``on_train_start``.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    iter(fetcher)


def load_loader_states(trainer: pl.Trainer) -> None:
    """Load the states of loaders that Lightning has left out, and restart reading.

    Lightning loads the states when it makes the loaders. Loaders made before the checkpoint was
    read (``trainer.estimated_stepping_batches`` makes them) and loaders at the end of an epoch
    would begin anew.
    """
    loop = trainer.fit_loop
    states, combined = loop._combined_loader_states_to_load, loop._combined_loader
    if states and combined is not None:
        combined._load_state_dicts(states)
        vars(loop)["_combined_loader_states_to_load"] = []
        restart_fetching(trainer)


def enter_pass(trainer: pl.Trainer) -> None:
    """Read one batch beside the fetcher's count, so that loaders enter the pass of their restored
    states. The next pass can begin only afterwards.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if fetcher.length is not None:  # otherwise the fetcher has read ahead
        next(fetcher.iterator, None)


def is_reading(trainer: pl.Trainer) -> bool:
    """Whether the training loaders are open: from their making to the teardown of a fit."""
    return trainer.fit_loop._data_fetcher is not None


def with_sampler(
    loader: DataLoader[Any], sampler: Sampler[int], mode: RunningStage | None = None, **options: Any
) -> DataLoader[Any]:
    """Rebuild ``loader`` with another sampler, for any arguments of the loader's class. ``options``
    replace further arguments.
    """
    args, arguments = _get_dataloader_init_args_and_kwargs(loader, sampler, mode)
    copy: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, *args, **{**arguments, **options})
    return copy


def unwrapped_batch_sampler(loader: DataLoader[Any]) -> Any:
    """Return the loader's own batch sampler. For ``predict``, Lightning wraps the batch sampler to
    record the indices of every batch.
    """
    return getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
