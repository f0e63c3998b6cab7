"""Checkpoints whose vocabulary has more rows than the model's, or fewer: Megatron pads it to a multiple of the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.manifest import Shape
from megatron_lightning.checkpoint.shard_file import Piece
from megatron_lightning.checkpoint.source import CheckpointSource, TensorInfo
from megatron_lightning.errors import CheckpointError
from megatron_lightning.layers.styles import VocabParallel
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.sharding import ShardingPlan, sharding_plans


class ResizedVocabulary:
    """A checkpoint whose tensors over the vocabulary look as large as the model's: rows are left out, or are zeros.

    Args:
        source: The checkpoint.
        rows: Global name of a tensor -> rows that the model has.
    """

    def __init__(self, source: CheckpointSource, rows: Mapping[str, int]) -> None:
        self.source, self._rows = source, rows

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        stored = self.source.tensors()
        return {n: i._replace(shape=(self._rows[n], *i.shape[1:])) if n in self._rows else i for n, i in stored.items()}

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`."""
        return self.source.state()

    def read(self, pieces: Iterable[Piece]) -> None:
        """See :class:`CheckpointSource`; rows that the checkpoint lacks become zeros."""
        stored = self.source.tensors()
        cut = [_stored_part(p, stored[p.name].shape[0]) if p.name in self._rows else p for p in pieces]
        self.source.read([piece for piece in cut if piece.view.numel()])


def fit_vocabulary(
    source: CheckpointSource, shapes: Mapping[str, Shape], context: ParallelContext, *, resize: bool
) -> CheckpointSource:
    """Return a source whose tensors over the vocabulary are as large as the model's; all ranks call this.

    Args:
        source: The checkpoint.
        shapes: Name of a parameter over the vocabulary that this rank holds -> its whole shape.
        context: Groups of this rank.
        resize: Whether rows may be cut or added.

    Raises:
        CheckpointError: On every rank, if the vocabularies differ and ``resize`` is False.
    """
    stored, rows = source.tensors(), {}
    for full, info in stored.items():
        shape = shapes.get(_parameter_of(full))
        if shape is not None and info.shape[1:] == shape[1:] and info.shape[:1] not in ((), shape[:1]):
            rows[full] = shape[0]
    texts = [f"{full}: {stored[full].shape[0]} rows in the checkpoint, {size} in the model" for full, size in rows.items()]
    together(context.axis("world"), "loading the checkpoint", lambda: _refuse([] if resize else texts))
    if not rows:
        return source
    if context.tp.rank == context.dp_cp.rank == 0:  # each stage for its own tensors
        warnings.warn(
            "The checkpoint's vocabulary has another size. Rows beyond the model's are left out, and rows that the checkpoint "
            f"lacks are zeros: {'; '.join(texts)}.",
            stacklevel=2,
        )
    return ResizedVocabulary(source, rows)


def vocabulary_parameters(module: nn.Module, plan: ShardingPlan | None, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` whose module a sharding plan declares :class:`VocabParallel`, under any number of ranks.

    Args:
        module: Whole, or this rank's part.
        plan: The table of the whole module; None: the ``sharding_plan()`` of the modules that have one.
        names: Names of parameters.
    """
    plans = sharding_plans(module) if plan is None else {"": plan}
    tables = [(f"{path}." if path else "", table) for path, table in plans.items()]
    return [name for name in names if any(_is_vocabulary(name, prefix, table) for prefix, table in tables)]


def _is_vocabulary(name: str, prefix: str, table: ShardingPlan) -> bool:
    path = name.removeprefix(prefix).rpartition(".")[0]
    return name.startswith(prefix) and isinstance(table.style_of(path), VocabParallel)


def _parameter_of(full: str) -> str:
    """Return the parameter to which a tensor of a checkpoint belongs (``checkpoint.naming``)."""
    key, _, name = full.partition(".")
    return name.partition(".state.")[2].rpartition(".")[0] if key == "optimizer_states" else name


def _stored_part(piece: Piece, rows: int) -> Piece:
    """Return the part of a piece that the checkpoint has, after filling the rest with zeros."""
    there = min(max(rows - piece.offset[0], 0), piece.view.shape[0])
    piece.view[there:].zero_()
    return piece._replace(view=piece.view[:there])


def _refuse(texts: Sequence[str]) -> None:
    if texts:
        listed = "\n  ".join(texts)
        raise CheckpointError(
            f"the checkpoint's vocabulary has another size than the model's:\n  {listed}\nIf the difference is padding, set "
            "MegatronStrategy(checkpoint_options=CheckpointOptions(resize_vocabulary=True)), which cuts rows or adds zeros."
        )
