"""Named random streams for use inside layers.

The names and seed offsets are from megatron/core/tensor_parallel/random.py:

    model-parallel-rng   seed + 100 pp + 2718 + tp        different on each tensor rank of a stage
    expert-parallel-rng  seed + 100 pp + 1024 + 100 ep + etp
    data-parallel-rng    seed + 100 pp                    equal on the tensor ranks of a stage

``quantization-rng`` (seed + 100 pp + 8191 + tp) is ours: the bits of stochastic rounding. Ranks
with different parts of a sequence draw from different seeds, except for experts, which see the
tokens of many ranks. Two more streams are ours, equal on all ranks and on the CPU. The streams give
the seeds of forwards, so that an evaluation does not change the draws of training:

    training-seeds       seed
    evaluation-seeds     seed + 1

Code outside layers draws from torch's default generator, kept equal by all ranks of a model
replica.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

EXPERTS = "expert-parallel-rng"
"""Stream of the experts, equal on ranks with the same experts."""
QUANTIZATION = "quantization-rng"
"""Stream of stochastic rounding."""


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def get_generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator for ``device``."""
    return _default_generator(device).get_state()


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the default generator for ``device``."""
    _default_generator(device).set_state(state)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generators of the CPU and of ``device`` inside the block. Outside, the
    generators continue as if nothing had been drawn.
    """
    generators = {_default_generator(place) for place in (torch.device("cpu"), device)}
    states = [(generator, generator.get_state()) for generator in generators]
    for generator in generators:  # torch.manual_seed formats the stack for devices not yet in use
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def seeded_host(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's default generators inside the block, as :func:`seeded` does
    torch's.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def host_state() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's default generators, for comparisons."""
    of_numpy: Any = np.random.get_state(legacy=False)
    numpy_state = of_numpy["state"]
    return random.getstate(), numpy_state["pos"], numpy_state["key"].tobytes()


class _Replay(AbstractContextManager[None]):
    def __init__(self, streams: RngStreams, states: dict[str, torch.Tensor]) -> None:
        self._streams = streams
        self._recorded = states
        self._outside: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._outside.append(self._streams._states)
        self._streams._states = dict(self._recorded)

    def __exit__(self, *exception: object) -> None:
        self._streams._states = self._outside.pop()


class RngStreams:
    """Generator states by name. :meth:`fork` makes a state the default temporarily."""

    def __init__(
        self,
        seed: int,
        *,
        device: torch.device,
        tp_rank: int = 0,
        cp_rank: int = 0,
        pp_rank: int = 0,
        ep_rank: int = 0,
        etp_rank: int = 0,
    ) -> None:
        self.device = device
        stage = seed + 100 * pp_rank
        base = stage + 1_000_003 * cp_rank
        self._states = {
            "model-parallel-rng": self._seeded(base + 2718 + tp_rank),
            EXPERTS: self._seeded(stage + 1024 + 100 * ep_rank + etp_rank),
            "data-parallel-rng": self._seeded(base),
            QUANTIZATION: self._seeded(base + 8191 + tp_rank),
            "training-seeds": torch.Generator().manual_seed(seed).get_state(),
            "evaluation-seeds": torch.Generator().manual_seed(seed + 1).get_state(),
        }
        self._register()

    def _register(self) -> None:
        self._number = torch.tensor(id(self), device="cpu")
        _STREAMS[id(self)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()  # a copy has a number of its own

    def _seeded(self, seed: int) -> torch.Tensor:
        return torch.Generator(device=self.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from stream ``name`` inside the block. The default generator stays untouched."""
        outer_state = get_generator_state(self.device)
        set_generator_state(self.device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = get_generator_state(self.device)
            set_generator_state(self.device, outer_state)

    def draw_kept(self, like: torch.Tensor, p: float, name: str) -> torch.Tensor:
        """Return the entries kept by dropout of a tensor like ``like``, drawn from stream ``name``:
        a bool tensor, and a single operation in compiled graphs.

        Args:
            like: Any shape.
            p: Probability of False.
            name: Of the stream.
        """
        mask: torch.Tensor = torch.ops.megatron_lightning.draw_kept(like, p, name, self._number)
        return mask

    def draw_seed(self, name: str) -> int:
        """Return the next seed of stream ``name``."""
        generator = torch.Generator()
        generator.set_state(self._states[name])
        drawn = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        self._states[name] = generator.get_state()
        return drawn

    def replay(self) -> AbstractContextManager[None]:
        """Return a reusable context manager. Inside the context the streams draw the same numbers
        as from now on.
        """
        return _Replay(self, dict(self._states))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of every stream's state."""
        return {name: state.clone() for name, state in self._states.items()}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Resume from :meth:`state_dict`."""
        self._states.update({name: state.clone() for name, state in states.items()})


# Operators take tensors and numbers, so a number represents the streams.
_STREAMS: weakref.WeakValueDictionary[int, RngStreams] = weakref.WeakValueDictionary()


@torch.library.custom_op(
    "megatron_lightning::draw_kept",
    mutates_args=(),
    schema="(Tensor like, float p, str name, Tensor number) -> Tensor",
    tags=[torch.Tag.nondeterministic_seeded],  # two equal calls must not be merged
)
def _draw_kept(like: torch.Tensor, p: float, name: str, number: torch.Tensor) -> torch.Tensor:
    with _STREAMS[int(number)].fork(name):
        return F.dropout(torch.ones_like(like), p) != 0


@_draw_kept.register_fake
def _(like: torch.Tensor, p: float, name: str, number: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, dtype=torch.bool)
