"""Our named random streams in the form of Transformer Engine's ``CudaRNGStatesTracker``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from megatron_lightning.parallel.random.rng import RngStreams


class StreamTracker:
    """Draws from a named stream of ours.

    Args:
        streams: The streams of this rank.
        name: Stream of dropout.
    """

    def __init__(self, streams: RngStreams, name: str = "model-parallel-rng") -> None:
        self._streams = streams
        self._name = name

    def fork(self, name: str | None = None) -> AbstractContextManager[None]:
        """Draw from a stream inside the block."""
        return self._streams.fork(self._name if name is None else name)

    def get_states(self) -> dict[str, Tensor]:
        """Return the states of all streams."""
        return self._streams.state_dict()

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Restore the states."""
        self._streams.load_state_dict(states)
