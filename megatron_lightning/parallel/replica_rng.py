"""Equal random states on all ranks of a model replica, for the code of a step that runs outside the
layers.

Code before the pipelined call (a random mask, say) runs on every stage and must draw the same
numbers there. Every micro-batch therefore starts from a recorded state: the one in which the
previous micro-batch reached the pipelined call. Draws of layers and the loss do not count, since
only some stages run them; a module that draws only before the call sees the same numbers as on one
device.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lightning.parallel.rng import get_generator_state, set_generator_state


class ReplicaRng:
    """States of the default generators (torch's of CPU and device, Python's and NumPy's) along the
    micro-batches of one step.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
        self._starts: list[tuple[list[Tensor], Any, Any]] = []

    def begin_step(self) -> None:
        """Record the state in which micro-batch 0 starts."""
        self._starts = [self.everything()]

    def begin_microbatch(self, microbatch: int) -> None:
        """Restore the state in which ``microbatch`` starts on every stage."""
        if microbatch < len(self._starts):
            self.restore(self._starts[microbatch])

    def at_call(self, microbatch: int) -> None:
        """Record that ``microbatch`` reached the pipelined call: the next one starts from here."""
        if microbatch + 1 == len(self._starts):
            self._starts.append(self.everything())

    def end_step(self) -> None:
        """Set the state that is equal on all stages."""
        self.restore(self._starts[-1])

    def everything(self) -> tuple[list[Tensor], Any, Any]:
        """Return all current states, for :meth:`restore`."""
        return self.state(), random.getstate(), np.random.get_state()

    def restore(self, states: tuple[list[Tensor], Any, Any]) -> None:
        """Set all states."""
        tensors, python, numpy = states
        self.set_state(tensors)
        random.setstate(python)
        np.random.set_state(numpy)

    def state(self) -> list[Tensor]:
        """Return torch's current states."""
        return [get_generator_state(device) for device in self._devices]

    def set_state(self, states: list[Tensor]) -> None:
        """Set torch's states; those of devices this rank lacks are ignored."""
        for device, state in zip(self._devices, states, strict=False):
            set_generator_state(device, state)

    def separate_replicas(self, data_rank: int) -> None:
        """Seed each data-parallel replica differently; replica 0 continues like a single device."""
        if data_rank:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * data_rank)
