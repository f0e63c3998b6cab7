"""Gradients for hooks with optimizers of their own, if ``configure_optimizers`` returns None."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.config import DataParallel
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import steps_nothing


def effective_data_parallel(
    data_parallel: DataParallel, optimizers: Sequence[object], replicas: int
) -> DataParallel:
    """Return the data-parallel mode of the gradients. Without an optimizer there is no optimizer to
    shard, and hooks may step full gradients.

    Raises:
        ConfigError: If the parameters themselves are sharded. Hooks then see no gradients.
    """
    if replicas == 1 or not steps_nothing(optimizers):
        return data_parallel
    if data_parallel == "fsdp":
        raise ConfigError(
            'configure_optimizers returned None, and data_parallel="fsdp" shards parameters and '
            f"gradients over {replicas} ranks: an optimizer that hooks step themselves would find "
            "no gradients, and train nothing. Return the optimizer from configure_optimizers, "
            'with automatic_optimization=False if hooks step it, or set data_parallel="ddp".'
        )
    return "ddp"
