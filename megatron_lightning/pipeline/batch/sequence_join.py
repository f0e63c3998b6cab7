"""Predictions of ranks that share sequences, joined to the predictions of full sequences."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_unflatten

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence_exchange import gather_parts
from megatron_lightning.pipeline.batch.context_mean import gather_rows


def join_outputs(
    output: Any,
    dims: Mapping[Any, int],
    part_length: int,
    group: AxisGroup,
    *,
    hook: str = "predict_step",
    deal: Deal | None = None,
) -> Any:
    """Return the output of a step, with sequences joined in order. A collective of ``group``.

    A tensor is a part of sequences if the sequence dim has a rank's number of positions. The
    sequence dim is the dim declared by ``sequence_dims`` for the tensor's key, or else for the
    first entry of a batch.

    Args:
        output: Output for this rank's tokens.
        dims: The declaration.
        part_length: Positions of this rank's part of a sequence.
        group: The context-parallel ranks.
        hook: The step.
        deal: Chunks of the ranks. None: zigzag.

    Raises:
        ConfigError: If another tensor differs between the ranks.
    """
    leaves, spec = tree_flatten_with_path(output)
    plain_leaves = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, Tensor)]
    _check_equal_values(plain_leaves, group, hook)
    usual = next(iter(dims.values()))
    joined: list[Any] = []
    for path, leaf in leaves:
        key = path[0].key if path and isinstance(path[0], MappingKey) else None
        if not isinstance(leaf, Tensor):
            joined.append(leaf)
            continue
        dim = dims.get(key, usual)
        # By length alone: an output of another length is the same on all ranks, which is checked.
        if -leaf.ndim <= dim < leaf.ndim and leaf.shape[dim] == part_length:
            joined.append(gather_parts(leaf, group, dim % leaf.ndim, deal))
        else:
            _check_equal(leaf, "".join(map(str, path)), group, hook)
            joined.append(leaf)
    return tree_unflatten(joined, spec)


def _check_equal_values(leaves: Sequence[tuple[Any, Any]], group: AxisGroup, hook: str) -> None:
    """Check that values other than tensors are the same on all ranks."""
    pickled = [pickle.dumps(leaf) for _, leaf in leaves]
    for pickled_there in group.all_gather_object(pickled) if pickled else ():
        for (path, leaf), mine, theirs in zip(leaves, pickled, pickled_there, strict=True):
            if mine != theirs:
                raise ConfigError(
                    f"{hook} returned at {''.join(map(str, path)) or 'its top'} a "
                    f"{type(leaf).__name__} that differs between the {group.size} ranks that share "
                    "a sequence. Return tensors of every token, which are joined, or set "
                    "context_parallel_size to 1."
                )


def _check_equal(value: Tensor, name: str, group: AxisGroup, hook: str) -> None:
    ranks = gather_rows(value[None], group)
    if not torch.allclose(ranks, value[None].expand_as(ranks), rtol=0, atol=0, equal_nan=True):
        place = f" at {name}" if name else ""
        raise ConfigError(
            f"{hook} returned{place} a tensor {list(value.shape)} that differs between the "
            f"{group.size} ranks that share a sequence, and is no sequence. Return values of "
            "every token (their dim is declared in sequence_dims, under the same key, where it is "
            "not that of the batch), or set context_parallel_size to 1."
        )
