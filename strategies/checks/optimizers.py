"""Gradients where ``configure_optimizers`` returns None, and hooks step optimizers of their own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.config import DataParallel
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies.lightning_internals import steps_nothing


def effective_data_parallel(
    data_parallel: DataParallel, optimizers: Sequence[object], replicas: int
) -> DataParallel:
    """Return how the data-parallel ranks keep gradients: without an optimizer there is none to be
    sharded, and hooks may step full gradients.

    Raises:
        ConfigError: If the parameters themselves are sharded, of which hooks see no gradient.
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
