"""Base of mixers with a state along the sequence."""

from __future__ import annotations

from megatron_lightning.layers.attention.sequence_mixer import SequenceMixer
from megatron_lightning.layers.state_space.precise import PreciseParameters
from megatron_lightning.parallel.grid.context import AxisGroup


class StateMixer(SequenceMixer, PreciseParameters):
    """A mixer with a state along the sequence."""

    context_group: AxisGroup | None = None
    """Ranks with parts of the same sequences. None: this rank has full sequences."""

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks share the sequences."""
        return self.context_group is not None
