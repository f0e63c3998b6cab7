"""A user's own modules that mix tokens, on ranks that share rows. The module's code stays.

Notation: ``s`` tokens of a row, ``c`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.attention.sequence_mixer import SequenceMixer
from megatron_lightning.layers.shared_rows.mixers import KeysOfRanks, full_rows
from megatron_lightning.layers.shared_rows.places import changed, tensors
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart

MASK, KEYS = "attention_mask", "past_key_values"


class TokenSharer(SequenceMixer):
    """Base of a user's module whose class is changed. The module's own class is the next base."""

    kind = "mixer of tokens"
    token_group: AxisGroup
    """The context-parallel ranks."""
    token_dim: int
    """Dim of the tokens in arguments and outputs."""

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks share the sequences."""
        return True

    @property
    def _own_name(self) -> str:
        bases = type(self).__mro__
        return bases[bases.index(SequenceMixer) + 1].__name__

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super()
        return own.forward(*args, **kwargs)

    def _part_length(self, args: Any, kwargs: Any) -> int:
        """Return the tokens of the rank's part, by the first argument that has them."""
        sizes = (x.shape[self.token_dim] for _, x in tensors((args, kwargs)) if self._has_dim(x))
        return next(sizes, 0)

    def _has_dim(self, tensor: Tensor) -> bool:
        return tensor.ndim > self.token_dim


class GatheringModule(TokenSharer):
    """A module that gets full rows on every rank, and returns the rank's part.

    Full rows are computed again in backward, so that a rank keeps its part only.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map a rank's part of arguments to its part of outputs. A collective.

        Raises:
            ShardingError: If no output runs over the tokens.
        """
        self.check_parts()
        if not torch.is_grad_enabled():
            return self._gathered(*args, **kwargs)
        return checkpoint(self._gathered, *args, use_reentrant=False, **kwargs)

    def _gathered(self, *args: Any, **kwargs: Any) -> Any:
        group, dim, own = self.token_group, self.token_dim, self._part_length(args, kwargs)
        length = own * group.size
        part = SequencePart(group.rank, group.size, self.deal)

        def gather(_: str, tensor: Tensor) -> Tensor:
            has_part = self._has_dim(tensor) and tensor.shape[dim] == own
            return full_rows(tensor, group, dim, self.deal) if has_part else tensor

        def split(_: str, tensor: Tensor) -> Tensor:
            is_full = self._has_dim(tensor) and tensor.shape[dim] == length
            return part.split(tensor, dim) if is_full else tensor

        args, kwargs = changed((args, kwargs), gather)
        output = self._own_forward(*args, **kwargs)
        if not any(self._has_dim(x) and x.shape[dim] == length for _, x in tensors(output)):
            shapes: Sequence[list[int]] = [list(x.shape) for _, x in tensors(output)]
            raise ShardingError(
                f"style GatheredTokens(dim={dim}) divides the outputs of a {self._own_name} over "
                f"{group.size} ranks, and none of {shapes} "
                f"has the {length} tokens of a row in this dim. Set dim to theirs."
            )
        return changed(output, split)


class RowsModule(TokenSharer):
    """Attention of a rank's queries to the keys of all ranks: the module gets a mask [1, 1, s / c,
    s], and an object whose ``update(keys, values)`` returns those of all ranks.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map a rank's part of arguments to its part of outputs. A collective."""
        self.check_parts()
        if kwargs.get(MASK) is not None:
            raise ShardingError(
                f"style DividedRows gives a {self._own_name} its {MASK}, and the "
                "call has one. Leave it out, or use GatheredTokens()."
            )
        group, own = self.token_group, self._part_length(args, kwargs)
        length = own * group.size
        device = next(x.device for _, x in tensors((args, kwargs)))
        rows = SequencePart(group.rank, group.size, self.deal).positions(length, device)
        mask = (rows[:, None] >= torch.arange(length, device=device))[None, None]
        keys = KeysOfRanks(group, self.deal)
        return self._own_forward(*args, **kwargs | {MASK: mask, KEYS: keys})
