"""Equal random states on all ranks of a model replica, for code of a step outside of the layers.

Code before the pipelined call (a random mask, say) runs on every stage and must draw the same
numbers on every stage. Every micro-batch therefore starts from a recorded state: the state when the
previous micro-batch reached the pipelined call. Draws of layers and the loss do not count, since
only some stages run layers and loss. A module that draws only before the call sees the same numbers
as on a single device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lightning.parallel.random.rng import get_generator_state, set_generator_state


class ReplicaRng:
    """States of the default generators (torch's of CPU and device, Python's and NumPy's) along the
    micro-batches of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
        self._starts: list[tuple[list[Tensor], Any, Any]] = []

    def begin_step(self) -> None:
        """Record the start state of micro-batch 0."""
        self._starts = [self.everything()]

    def begin_microbatch(self, microbatch: int) -> None:
        """Restore the start state of ``microbatch``, equal on every stage."""
        if microbatch < len(self._starts):
            self.restore(self._starts[microbatch])

    def at_call(self, microbatch: int) -> None:
        """Record that ``microbatch`` reached the pipelined call: the next micro-batch starts from
        here.
        """
        if microbatch + 1 == len(self._starts):
            self._starts.append(self.everything())

    def end_step(self) -> None:
        """Set a state equal on all stages."""
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
        """Set torch's states. States of devices missing on this rank are ignored."""
        for device, state in zip(self._devices, states, strict=False):
            set_generator_state(device, state)


def host_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state()


def plain_host_states(states: tuple[Any, Any]) -> dict[str, Any]:
    """Return :func:`host_states` as plain values for a checkpoint, without NumPy arrays."""
    python, (kind, words, *others) = states
    return {"python": python, "numpy": (kind, torch.from_numpy(words.astype(np.int64)), *others)}


def set_host_states(states: Mapping[str, Any]) -> None:
    """Set the states of :func:`plain_host_states`."""
    random.setstate(states["python"])
    kind, words, *others = states["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *others))


class ReplicaStreams:
    """Two random streams of torch on a rank. Steps draw other numbers on every data-parallel
    replica (dropout). Hooks outside of steps draw the same numbers on all replicas.

    Replicas stay equal when a hook initializes a layer again, or adds noise to gradients. With a
    single replica there is a single stream, as on a single device. Replica 0's steps continue from
    the state after the hooks before the first step, as on a single device.
    """

    def __init__(self, device: torch.device) -> None:
        self._rng = ReplicaRng(device)
        self._are_two = False
        self._steps: list[Tensor] | None = None  # the state of steps. None: so far the hooks' state
        self._hooks: list[Tensor] | None = None  # the state of hooks, while a step runs

    def separate(self, data_rank: int, num_replicas: int) -> None:
        """Give steps a stream of their own, if there are several replicas."""
        self._are_two = num_replicas > 1
        if self._are_two and data_rank:
            shared_state = self._rng.state()
            torch.manual_seed(torch.initial_seed() + 1_000_003 * data_rank)
            self._steps = self._rng.state()
            self._rng.set_state(shared_state)

    @contextmanager
    def in_step(self, *, isolated: bool = False) -> Iterator[None]:
        """Draw from the stream of steps in the block.

        Args:
            isolated: Whether later steps draw as if there had been no block.
        """
        if not self._are_two or self._hooks is not None:
            yield
            return
        previous_state = self._steps
        self._hooks = self._rng.state()
        if self._steps is not None:
            self._rng.set_state(self._steps)
        try:
            yield
        finally:
            self._steps = previous_state if isolated else self._rng.state()
            self._rng.set_state(self._hooks)
            self._hooks = None

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        """Draw from the stream of hooks in the block, inside of a step."""
        if self._hooks is None:
            yield
            return
        self._steps = self._rng.state()
        self._rng.set_state(self._hooks)
        self._hooks = None
        try:
            yield
        finally:
            self._hooks = self._rng.state()
            self._rng.set_state(self._steps)

    def states(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states of steps and of hooks, outside of a step."""
        hooks = self._rng.state()
        return hooks if self._steps is None else self._steps, hooks

    def restore(self, steps: list[Tensor] | None, hooks: list[Tensor] | None) -> None:
        """Set the states of steps and of hooks. None: leave a state unchanged. With a single
        replica steps have the only stream.
        """
        if not self._are_two:
            hooks = steps or hooks
        elif steps is not None:
            self._steps = steps
        if hooks is not None:
            self._rng.set_state(hooks)
