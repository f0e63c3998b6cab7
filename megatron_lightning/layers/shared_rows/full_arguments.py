"""Arguments of full rows for a model whose rows ranks share, of a call with a rank's part."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.mixers import SharingRanks, full_rows
from megatron_lightning.layers.shared_rows.places import tensors
from megatron_lightning.layers.shared_rows.probed_call import without_cache
from megatron_lightning.layers.shared_rows.ring import RingMixer
from megatron_lightning.layers.shared_rows.row_names import RowNames


@dataclass(frozen=True)
class Origins:
    """Where tensors of a batch come from, by their memory, which slices and views share."""

    parts: frozenset[int] = frozenset()
    """Of which a rank has its part."""
    whole: frozenset[int] = frozenset()

    @classmethod
    def of(cls, parts: Iterable[Tensor], whole: Iterable[Tensor]) -> Origins:
        """Return the origins of tensors that were divided, and of others."""
        return cls(frozenset(map(_memory, parts)), frozenset(map(_memory, whole)))

    def has_part(self, tensor: Tensor) -> bool | None:
        """Return whether a rank has a part of a tensor. None: the step has made it."""
        memory = _memory(tensor)
        return True if memory in self.parts else False if memory in self.whole else None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class FullArguments:
    """Makes the arguments of full rows, and knows what may be among them."""

    ranks: SharingRanks
    kinds: Mapping[str, str]
    """Path of a module that mixes tokens -> its way."""
    keeps_masks: bool = True
    """Whether the model makes masks, of which the ring reads none."""
    parts_documents: bool = False
    """Whether positions that begin again keep documents of a row apart."""
    origins: Origins = field(default_factory=Origins)

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> dict[str, Any]:
        """Return the arguments of full rows of ``length`` tokens. A collective.

        Raises:
            ConfigError: If there are arguments of unknown meaning, or of other rows.
        """
        given = _by_name(module, args, kwargs)
        name, names = type(module).__name__, RowNames.of(module)
        self._check_known(name, names, given)
        part_length = length // self.ranks.group.size
        whole = {
            key: value
            for key, value in given.items()
            if key in names.source or key not in (*names.rows, *names.of_logits)
        }
        self._check_whole(name, whole, part_length, names)
        for key in names.rows:
            value = given.get(key)
            if value is None:
                continue
            # Positions may be several for a token of an image.
            dim = -1 if key == names.positions else 1
            columns = value.shape[dim] if isinstance(value, Tensor) and value.ndim > 1 else None
            if columns not in (length, part_length):
                raise ConfigError(
                    f"{name} was called with {key} of {columns} columns, and rows have {length} "
                    f"positions, {part_length} on a rank. Declare the entry of the batch that it "
                    "comes from in sequence_dims, and do not cut sequences in the step."
                )
            if columns == part_length:
                given[key] = full_rows(value, self.ranks.group, dim % value.ndim, self.ranks.deal)
        mask, positions = given.pop(names.mask, None), given.pop(names.positions, None)
        if mask is not None and not bool(mask.all()):
            raise ConfigError(
                f"{names.mask} hides positions, and ranks that share sequences take no mask. Pad "
                "rows at their ends and leave the mask out: no token sees the padding behind it, "
                "and labels of -100 keep it out of the loss."
            )
        self._check_types(name, names.types, given.get(names.types))
        usual = torch.arange(length, device=None if positions is None else positions.device)
        if positions is not None and not bool((positions == usual).all()):
            if not self.parts_documents and not self._has_axes(positions):
                raise ConfigError(
                    f"{name} was given position_ids that begin documents within a row, and does "
                    "not keep such documents apart, in one process or on ranks that share its "
                    f"rows ({described(self.kinds)}). Leave position_ids out, do not pack, or see "
                    "whether ContextOptions(mixers=...) with another way for attention keeps them "
                    "apart."
                )
            given[names.positions] = positions
        return given | without_cache(module)

    def _check_known(self, name: str, names: RowNames, given: Mapping[str, Any]) -> None:
        known = (*names.rows, *names.source, *names.of_logits)
        unknown = [k for k, v in given.items() if k not in known and any(tensors(v))]
        if unknown and not self.ranks.takes_media:
            raise ConfigError(
                f"{name} was called with {unknown[0]}, and ranks that share its rows know "
                f"{', '.join(names.rows + names.source)} alone. Leave it out, or set "
                "context_parallel_size to 1."
            )
        if all(given.get(key) is None for key in (names.tokens, names.embeddings)):
            raise ConfigError(
                f"{name} was called without {names.tokens}, of whose rows ranks have a part, and "
                "would make tokens of other rows. Pass them, declared in sequence_dims."
            )

    def _check_whole(
        self, name: str, whole: Mapping[str, Any], part_length: int, names: RowNames
    ) -> None:
        """Check that an encoder, or a tower, gets what it reads in full.

        Raises:
            ConfigError: If a rank has a part of it. What a step has made of a batch for an encoder
                is told by its length.
        """
        for key, value in whole.items():
            for _, tensor in tensors(value):
                is_part = self.origins.has_part(tensor)
                if is_part is None and key in names.source and tensor.ndim > 1:
                    is_part = tensor.shape[1] == part_length
                if is_part:
                    raise ConfigError(
                        f"{name} was called with {key} of the size {list(tensor.shape)}, which is "
                        f"a rank's part of rows ({part_length} of their tokens), and ranks that "
                        "share rows give encoders and towers what they read in full. Leave the "
                        "entry of the batch out of sequence_dims, or pad it by a token if it is "
                        "full."
                    )

    def _has_axes(self, positions: Tensor) -> bool:
        """Return whether positions are those in images [3, b, s], which begin no documents: of
        four, the first do.
        """
        return self.ranks.takes_media and positions.ndim == 3 and positions.shape[0] == 3

    def _check_types(self, name: str, key: str, types: Tensor | None) -> None:
        reads_none = self.keeps_masks and RingMixer.kind in self.kinds.values()
        if self.ranks.takes_media:  # each mask is looked at
            return
        if reads_none and types is not None and bool(types.any()):
            raise ConfigError(
                f"{name} was given {key}, of which it may make a mask, and attention over the "
                "ranks reads none. Leave it out, or set context_parallel_size to 1."
            )


def described(kinds: Mapping[str, str]) -> str:
    """Return the ways of a model's modules, for the log."""
    by_kind = defaultdict(list)
    for path, kind in kinds.items():
        by_kind[kind].append(path)
    return ", ".join(f"{kind}: {len(paths)} ({paths[0]} …)" for kind, paths in by_kind.items())


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [*inspect.signature(inspect.unwrap(type(module).forward)).parameters][1:]
    return dict(zip(names, args, strict=False)) | kwargs
