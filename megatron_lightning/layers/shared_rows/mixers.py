"""Ways in which a module that mixes tokens works on a rank's part of the rows.

A way is called with the module's own forward and arguments, and returns the rank's part of what the
forward returns for full rows. Arguments that the module's block handed on from its own caller are
of full rows, the others are a rank's part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lightning.layers.context.backends import ContextBackend
from megatron_lightning.layers.shared_rows.other_names import bind_names, bound_names, forward_of
from megatron_lightning.layers.shared_rows.places import Places, changed, tensors
from megatron_lightning.layers.wrapped_methods import wrap
from megatron_lightning.parallel.collectives import gather_sequence
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart, join
from megatron_lightning.parallel.sequence_exchange import gather_parts

_CACHE, _MASK = "past_key_values", "attention_mask"


def full_rows(part: Tensor, group: AxisGroup, dim: int, deal: Deal | None = None) -> Tensor:
    """Return the rows of all ranks in order. The gradient of the part is summed over the ranks. A
    collective.
    """
    if not part.is_floating_point():
        return gather_parts(part.contiguous(), group, dim, deal)
    parts = gather_sequence(part.contiguous(), group, dim)
    return join(list(parts.chunk(group.size, dim)), dim, deal)


class Arguments(NamedTuple):
    """Arguments and outputs of a module that mixes tokens."""

    inputs: Places
    outputs: Places
    full: frozenset[str]
    """Places of arguments of full rows."""


@dataclass
class SharingRanks:
    """The ranks that share rows."""

    group: AxisGroup
    """The context-parallel ranks."""
    attention: ContextBackend | None = None
    """Attention over the ranks. None: no ring."""
    documents: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Positions of full rows -> their documents."""
    masks: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Masks that a ring leaves out -> whether the last token sees the first one."""
    deal: Deal | None = None
    """Chunks of the micro-batch at hand. None: zigzag."""
    takes_media: bool = False
    """Whether rows may hold images or sounds, whose tokens may see one another."""
    usual: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Masks of rows that may hold media -> window and documents -> whether they say the same."""
    left_out: tuple[Tensor, ...] = ()
    """Masks of the module at hand that the ring leaves out."""

    @property
    def part(self) -> SequencePart:
        """The rank's part of a row."""
        return SequencePart(self.group.rank, self.group.size, self.deal)


@dataclass
class MixerSlot:
    """Wrapper of the forward of a module that mixes tokens: its way, or the module's own code."""

    way: SharedMixer
    is_off: bool = False
    """Whether calls get full rows."""

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs."""
        return forward(*args, **kwargs) if self.is_off else self.way(forward, *args, **kwargs)


@dataclass
class SharedMixer(ABC):
    """Computes a module that mixes tokens."""

    kind: ClassVar[str]
    """Name of the way, for messages."""
    divides: ClassVar[bool]
    """Whether a rank computes its part alone."""

    arguments: Arguments
    ranks: SharingRanks

    @classmethod
    @abstractmethod
    def suits(cls, module: nn.Module, arguments: Arguments) -> bool:
        """Return whether the way may work for the module. What it computes is compared."""

    @abstractmethod
    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's part of the outputs."""

    def other_names(self, module: nn.Module) -> Mapping[str, Any]:
        """Return what the module's code finds under some of its global names."""
        return {}

    def bind(self, module: nn.Module, slot: MixerSlot | None = None) -> MixerSlot:
        """Have the module's calls get and return the rank's part, in place of another way's.

        Args:
            module: The module.
            slot: What binding another way has returned. None: no way was bound.
        """
        bind_names(module, self.other_names(module))
        if slot is None:
            slot = MixerSlot(self)
            # Exchanges make no graph: a compiled block runs the module uncompiled.
            uncompiled: Any = torch.compiler.disable(slot)  # type: ignore[no-untyped-call]
            wrap(module, "forward", uncompiled)
        slot.way = self
        return slot

    def bound(self, module: nn.Module) -> AbstractContextManager[None]:
        """Give the module its other names, until the end of the context."""
        return bound_names(module, self.other_names(module))

    def split_full(self, values: Any) -> Any:
        """Return the arguments with the rank's part of those of full rows."""
        known = self.arguments

        def split(place: str, tensor: Tensor) -> Tensor:
            dim = known.inputs.dims.get(place) if place in known.full else None
            return tensor if dim is None else self.ranks.part.split(tensor, dim)

        return changed(values, split)


@dataclass
class GatheredMixer(SharedMixer):
    """Computes full rows on every rank, and keeps the rank's part.

    Right for any module: the ranks' gradients of parameters add up to the gradient of full rows.
    Full rows are computed again in backward, so that a rank keeps its part only.
    """

    kind = "gather"
    divides = False

    @classmethod
    def suits(cls, module: nn.Module, arguments: Arguments) -> bool:
        """Return True."""
        return True

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's part of the outputs."""
        if not torch.is_grad_enabled():
            return self._run(forward, args, kwargs)
        return checkpoint(self._run, forward, args, kwargs, use_reentrant=False)

    def _run(self, forward: Any, args: Any, kwargs: Any) -> Any:
        known = self.arguments

        def gather(place: str, tensor: Tensor) -> Tensor:
            dim = known.inputs.dims.get(place)
            return (
                tensor
                if dim is None or place in known.full
                else full_rows(tensor, self.ranks.group, dim, self.ranks.deal)
            )

        def split(place: str, tensor: Tensor) -> Tensor:
            dim = known.outputs.dims.get(place)
            return tensor if dim is None else self.ranks.part.split(tensor, dim)

        args, kwargs = changed((args, kwargs), gather)
        if _CACHE in kwargs:  # a recomputation would add its keys once more
            kwargs[_CACHE] = None
        return changed(forward(*args, **kwargs), split)


@dataclass
class DividedRows(SharedMixer):
    """Attention of the rank's queries to the keys of all ranks.

    Attention of ``transformers`` takes a cache of earlier keys, and copes with more keys than
    queries. Here the cache returns the keys of all ranks, and the mask has the rank's rows of the
    model's own mask. The module's code stays: windows, sinks, caps, biases of positions and the
    choice of keys by an indexer need nothing else.
    """

    kind = "rows"
    divides = True

    @classmethod
    def suits(cls, module: nn.Module, arguments: Arguments) -> bool:
        """Return whether the module takes a cache."""
        parameters = signature(forward_of(module)).parameters
        places = arguments.inputs.masks
        return _CACHE in parameters and _MASK in parameters and places <= {f"[1]['{_MASK}']"}

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's part of the outputs."""
        args, kwargs = self.split_full((args, kwargs))
        mask = kwargs.get(_MASK)
        if mask is None:  # the model leaves plain causality to a kernel
            mask = self._causal(kwargs)
        elif mask.shape[2] > 1:
            mask = self.ranks.part.split(mask, 2)
        keys = KeysOfRanks(self.ranks.group, self.ranks.deal)
        return forward(*args, **kwargs | {_MASK: mask, _CACHE: keys})

    def _causal(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the rank's rows of a causal mask [1, 1, s / c, s]."""
        dims = self.arguments.inputs.dims
        for place, tensor in tensors(((), kwargs)):
            if place in dims and place not in self.arguments.full:
                length = tensor.shape[dims[place]] * self.ranks.group.size
                own = self.ranks.part.positions(length, tensor.device)
                return (own[:, None] >= torch.arange(length, device=tensor.device))[None, None]
        return None


class KeysOfRanks:
    """A cache of ``transformers`` with the keys of the other ranks in place of earlier tokens."""

    is_compileable = False

    def __init__(self, group: AxisGroup, deal: Deal | None) -> None:
        self._group = group
        self._deal = deal

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, n, s, d] of all ranks. A collective."""
        return self._full(keys, 2), self._full(values, 2)

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return an indexer's keys [b, ..., s, d] of all ranks. A collective."""
        return self._full(keys, keys.ndim - 2)

    update_index = update_indexer

    @property
    def layers(self) -> _EveryLayer:
        """Some indexers ask for their own layer."""
        return _EveryLayer(self)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return 0: no token was there before."""
        return 0

    def _full(self, part: Tensor, dim: int) -> Tensor:
        return full_rows(part, self._group, dim, self._deal)


class _EveryLayer:
    """Gives one cache for every layer."""

    def __init__(self, cache: KeysOfRanks) -> None:
        self._cache = cache

    def __getitem__(self, _: int) -> KeysOfRanks:
        return self._cache
