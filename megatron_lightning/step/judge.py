"""Verdict of one guard, by the options of the user: an error, a warning, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from megatron_lightning.config import GuardOptions
from megatron_lightning.errors import MegatronLightningError


class Judge:
    """The verdict of one guard.

    Args:
        name: Name of the guard, for messages.
        options: The user's.
        fired: Number of findings by guard. Counted here.
        may_warn: Whether training can continue after a finding.
    """

    def __init__(
        self, name: str, options: GuardOptions, fired: dict[str, int], *, may_warn: bool
    ) -> None:
        self.name = name
        self._refuses = options.mode == "refuse" or not may_warn
        self._fired = fired
        self._has_warned = False

    def refuse(self, error: MegatronLightningError) -> None:
        """Raise the error, or warn once on each rank with a finding.

        Raises:
            MegatronLightningError: The error, with the guard's name.
        """
        self._count()
        error.args = (self._named(str(error)),)
        if self._refuses:
            raise error
        if not self._has_warned:
            self._has_warned = True
            rank = getattr(rank_zero_only, "rank", 0)
            warnings.warn(f"[rank {rank}] {error}" if rank else str(error), stacklevel=3)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Enter around a check that raises its finding."""
        try:
            yield
        except MegatronLightningError as error:
            self.refuse(error)

    def warn(self, text: str) -> None:
        """Warn on rank 0. All ranks call this, or rank 0 alone."""
        self._count()
        rank_zero_warn(self._named(text))

    def _count(self) -> None:
        self._fired[self.name] = self._fired.get(self.name, 0) + 1

    def _named(self, text: str) -> str:
        return f"{text} [guard: {self.name}]"
