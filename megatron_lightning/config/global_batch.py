"""The global batch: samples of an optimizer step over all data-parallel ranks, unchanged when a run
continues with another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lightning.errors import ConfigError


def replica_batch_size(global_batch_size: int, num_replicas: int, accumulated: int = 1) -> int:
    """Return the samples of a batch on a data-parallel rank.

    Args:
        global_batch_size: Samples of an optimizer step over all data-parallel ranks.
        num_replicas: Data-parallel ranks.
        accumulated: Batches of an optimizer step.

    Raises:
        ConfigError: If ranks and batches do not divide the global batch.
    """
    parts = num_replicas * accumulated
    if global_batch_size % parts:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of {num_replicas} "
            f"data-parallel ranks x accumulate_grad_batches={accumulated}. Set it to "
            f"{max(1, global_batch_size // parts) * parts}, or use another number of ranks."
        )
    return global_batch_size // parts


@dataclass(frozen=True)
class StepSize:
    """The factors of a run's global batch."""

    num_replicas: int
    """Data-parallel ranks."""
    batch_size: int
    """Samples of a batch on a data-parallel rank."""
    accumulated: int
    """Batches of an optimizer step."""

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        return self.num_replicas * self.batch_size * self.accumulated

    def describe(self) -> str:
        """Return the product in words."""
        return (
            f"{self.samples} samples ({self.num_replicas} data-parallel ranks x batch_size "
            f"{self.batch_size} x accumulate_grad_batches {self.accumulated})"
        )

    def accumulated_as(self, before: StepSize) -> int | None:
        """Return the batches per step to keep the global batch of ``before``. None: no change is
        needed, or the user has changed the batch.

        Raises:
            ConfigError: If no whole number of batches keeps the global batch.
        """
        is_user = (self.batch_size, self.accumulated) != (before.batch_size, before.accumulated)
        if is_user or self.num_replicas == before.num_replicas:
            return None
        batches, remainder = divmod(before.samples, self.num_replicas * self.batch_size)
        if remainder:
            raise ConfigError(
                f"a step of the checkpoint's run had {before.describe()}, and "
                f"{self.num_replicas} ranks x batch_size {self.batch_size} do not divide them. Set "
                "batch_size so that they do, or global_batch_size in a data module that has it, "
                "or use another number of ranks."
            )
        return batches

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "num_replicas": self.num_replicas,
            "batch_size": self.batch_size,
            "accumulated": self.accumulated,
        }
