"""Frozen weights that checkpoints leave out, because the module itself makes the weights again.

A checkpoint without frozen weights lists the weights in the entry ``"left_out"`` of its state: name
-> digest of the values, or None where nothing is compared (copies of tied weights). Before such a
checkpoint is loaded, the module has the values again, from its folder or its constructor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.shards.digest import hash_of, hashes_by_name

LEFT_OUT = "left_out"
"""Entry of a checkpoint's state."""
_LISTED = 5


class _Hashes(NamedTuple):
    rounded: int
    """Of the values in bf16: equal in every precision."""
    exact: int
    """Of every bit."""


class FrozenWeights:
    """Frozen weights of a run with the values that the module has made, and not a checkpoint or a
    hook. Methods are collectives of all ranks.
    """

    def __init__(self) -> None:
        self._made: Mapping[str, int] | None = None
        self._begun: Mapping[str, _Hashes] | None = None

    def before_load(self, state: ModuleState) -> None:
        """Record the module's values before a checkpoint replaces values."""
        if self._begun is None and self._made is None:
            self._made = _sums(state, frozen_parameters(state.module), exact=True)

    def begin(self, state: ModuleState) -> None:
        """Record the values at the begin of the run, unless recorded by an earlier call."""
        if self._begun is None:
            names = [*frozen_parameters(state.module)]
            rounded, exact = _sums(state, names), _sums(state, names, exact=True)
            self._begun = {
                name: _Hashes(value, exact[name])
                for name, value in rounded.items()
                if self._made is None or self._made.get(name) == exact[name]
            }

    def unchanged(self, state: ModuleState) -> dict[str, str]:
        """Return name -> digest of the weights that the module makes again: frozen now and at the
        begin, with the same values.
        """
        self.begin(state)
        begun = self._begun or {}
        now = _sums(state, frozen_parameters(state.module), exact=True)
        return {
            name: as_digest(begun[name].rounded)
            for name, value in now.items()
            if name in begun and begun[name].exact == value
        }


def frozen_parameters(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters without gradients. A tied parameter has a single name."""
    return (name for name, one in module.named_parameters() if not one.requires_grad)


def as_digest(total: int) -> str:
    """Return a digest as text."""
    return f"{total & (1 << 64) - 1:016x}"


def left_out_digests(state: Mapping[str, Any], where: str = "the checkpoint") -> dict[str, Any]:
    """Return name -> digest of the weights that a checkpoint leaves out. Empty: none.

    Raises:
        CheckpointError: If the entry is damaged.
    """
    entry = state.get(LEFT_OUT) or {}
    if not isinstance(entry, Mapping) or not all(
        isinstance(name, str) and (digest is None or isinstance(digest, str))
        for name, digest in entry.items()
    ):
        raise CheckpointError(f"{where}: what it says of weights left out is damaged ({entry!r}).")
    return dict(entry)


def refuse_partial(state: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint that leaves weights to its module, where there is no module.

    Raises:
        CheckpointError: Naming what to do.
    """
    left_out = [*left_out_digests(state, where)]
    if left_out:
        raise CheckpointError(
            f"{where} leaves {len(left_out)} frozen weights to the trained module "
            f"({_listed(left_out)}), so that it does not hold the model. Write all weights by the "
            "module: YourModule.load_from_checkpoint(...).save_hf_pretrained(...), or "
            "save_checkpoint of a Trainer without trainable_only."
        )


def check_parts(state: ModuleState, digests: Mapping[str, str | None]) -> None:
    """Check the values of left-out weights on the ranks. A collective of all ranks.

    Raises:
        CheckpointError: On every rank, naming the weights with other values.
    """
    compared = {name: digest for name, digest in digests.items() if digest is not None}
    if compared:
        found = _sums(state, compared.keys())
        _refuse_others(compared, {name: as_digest(total) for name, total in found.items()})


def check_full(module: nn.Module, digests: Mapping[str, str | None]) -> None:
    """Check the values of left-out weights of a full module.

    Raises:
        CheckpointError: Naming the weights with other values.
    """
    compared = {name: digest for name, digest in digests.items() if digest is not None}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = {name: as_digest(hash_of(parameters[name])) for name in compared if name in parameters}
    _refuse_others(compared, found)


def load_beside(checkpoint: Mapping[str, Any], load: Callable[..., Any]) -> Any:
    """Return a full LightningModule loaded from a checkpoint. If the checkpoint leaves out frozen
    weights, the module keeps its own, and a line says which.

    Args:
        checkpoint: The checkpoint, with full tensors.
        load: Makes the module and loads ``checkpoint["state_dict"]``, with an option ``strict``.

    Raises:
        CheckpointError: If other weights than the left-out are missing, the checkpoint has weights
            of another module, or the module's frozen weights are not as in training.
    """
    digests = left_out_digests(checkpoint)
    if not digests:
        return load()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are")
        module = load(strict=False)  # Lightning knows no weights that may be missing
    names, stored = module.state_dict().keys(), checkpoint["state_dict"].keys()
    missing = [name for name in names if name not in stored and name not in digests]
    unexpected = [name for name in stored if name not in names]
    for problem, found in (("lacks", missing), ("has weights unknown to the module", unexpected)):
        if found:
            raise CheckpointError(
                f"the checkpoint leaves {len(digests)} frozen weights to the module, and also "
                f"{problem}: {_listed(found)}. strict=False loads the others."
            )
    check_full(module, digests)
    left_out = [name for name in digests if name not in stored]
    rank_zero_info(
        f"{len(left_out)} frozen weights are not in the checkpoint: {_listed(left_out)}. "
        f"{type(module).__name__} makes them itself, with the values of the training."
    )
    return module


def _refuse_others(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    others = [name for name, digest in expected.items() if found.get(name) != digest]
    if not others:
        return
    first = others[0]
    has = f"the digest {found[first]}" if first in found else "no such parameter"
    raise CheckpointError(
        f"the checkpoint leaves {len(expected)} frozen weights to the module, and was trained on "
        f"other weights than the module has in {_listed(others)}. {first} had the digest "
        f"{expected[first]}, and the module has {has}. Load the same folder or weights as then, "
        "in the constructor or in configure_model, which run before a checkpoint is loaded."
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sums(state: ModuleState, names: Iterable[str], *, exact: bool = False) -> dict[str, int]:
    """Return name -> hash of the parameters of all ranks. A collective of all ranks."""
    chosen = set(names)
    shards = (
        state.shards(name, name, parameter.detach())
        for name, parameter in state.module.named_parameters()
        if name in chosen and name not in state.part.tied
    )
    own = hashes_by_name(shards, exact=exact)
    world = state.context.axis("world")
    ordered = sorted({name for names in world.all_gather_object([*own]) for name in names})
    # Sums wrap around, as hashes do.
    totals = [_signed(own.get(name, 0)) for name in ordered]
    sums = torch.tensor(totals, dtype=torch.int64, device=state.context.device)
    return dict(zip(ordered, all_reduce(sums, world).tolist(), strict=True))


def _signed(total: int) -> int:
    """Return the 64 bits of a hash as a signed number."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
