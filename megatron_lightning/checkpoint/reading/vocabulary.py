"""Checkpoints with more or fewer vocabulary rows than the model: Megatron pads the vocabulary to a
multiple of the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_lightning.checkpoint.agreement import together
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import Shape, Shard

_STATES = "optimizer_states."


class ResizedVocabulary:
    """Wrap the source to resize vocabulary tensors to the model's: rows are left out, or are
    zeros.
    """

    def __init__(self, source: CheckpointSource, rows: Mapping[str, int]) -> None:
        self.source = source
        self._rows = rows

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`CheckpointSource`."""
        stored = self.source.tensors()
        resized = {
            name: TensorInfo((rows, *stored[name].shape[1:]), stored[name].dtype)
            for name, rows in self._rows.items()
        }
        return {**stored, **resized}

    def state(self) -> dict[str, Any]:
        """See :class:`CheckpointSource`."""
        return self.source.state()

    def read(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """See :class:`CheckpointSource`. Rows missing in the checkpoint become zeros."""
        stored = self.source.tensors()
        clipped = [
            (n, _stored_rows(s, stored[n].shape[0]) if n in self._rows else s) for n, s in shards
        ]
        self.source.read([(name, shard) for name, shard in clipped if shard.data.numel()])


def fit_vocabulary(
    source: CheckpointSource, shapes: Mapping[str, Shape], context: ParallelContext, *, resize: bool
) -> CheckpointSource:
    """Return a source with vocabulary tensors of the model's size. All ranks call this.

    Args:
        source: The checkpoint.
        shapes: Name of a vocabulary parameter on this rank -> the global shape.
        context: Groups of this rank.
        resize: Whether rows may be left out or added.

    Raises:
        CheckpointError: On every rank, if the vocabularies differ and ``resize`` is False.
    """
    stored = source.tensors()
    rows = _other_rows(stored, shapes)
    texts = [
        f"{name}: {stored[name].shape[0]} rows in the checkpoint, {size} in the model"
        for name, size in rows.items()
    ]
    # Every rank refuses: tensors of the vocabulary are on the first and last stage alone.
    together(
        context.axis("world"), "loading the checkpoint", lambda: _refuse([] if resize else texts)
    )
    if not rows:
        return source
    if context.tp.rank == context.dp_cp.rank == 0:  # each stage for the stage's tensors
        warnings.warn(
            "The checkpoint's vocabulary has another size. Rows beyond the model's are left out, "
            f"and rows that the checkpoint lacks are zeros: {'; '.join(texts)}.",
            stacklevel=2,
        )
    return ResizedVocabulary(source, rows)


def _other_rows(stored: Mapping[str, TensorInfo], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the rows in the model of every tensor that has others in the checkpoint."""
    rows, of_weights = dict[str, int](), set[tuple[str, int]]()
    # An optimizer's state may have shapes of its own, such as one row of means: it is divided by
    # the vocabulary only if it has the rows of the weight.
    for full in sorted(stored, key=_is_state):
        parameter, shape = _parameter_of(full, shapes), stored[full].shape
        expected = shapes.get(parameter)
        if expected is None or not shape or shape[1:] != expected[1:] or shape == expected:
            continue
        if not _is_state(full):
            of_weights.add((parameter, shape[0]))
        if (parameter, shape[0]) in of_weights:
            rows[full] = expected[0]
    return rows


def _is_state(full: str) -> bool:
    return full.startswith(_STATES)


def _parameter_of(full: str, shapes: Mapping[str, Shape]) -> str:
    """Return the parameter of a checkpoint's tensor (for names see ``checkpoint.naming``). Copies
    stand deeper in a checkpoint. Empty: no parameter of the vocabulary.
    """
    name = full.partition(".")[2]
    if _is_state(full):
        name = name.partition(".state.")[2].rpartition(".")[0]
    while name and name not in shapes:
        name = name.partition(".")[2]
    return name


def _stored_rows(shard: Shard, rows: int) -> Shard:
    """Return the rows of a shard present in the checkpoint, after filling the other rows with
    zeros.
    """
    num_rows = min(max(rows - shard.offset[0], 0), shard.data.shape[0])
    shard.data[num_rows:].zero_()
    return Shard(shard.offset, shard.data[:num_rows])


def _refuse(texts: Sequence[str]) -> None:
    if texts:
        listed = "\n  ".join(texts)
        raise CheckpointError(
            f"the checkpoint's vocabulary has another size than the model's:\n  {listed}\nIf the "
            "difference is padding, set "
            "MegatronStrategy(checkpoint_options=CheckpointOptions(resize_vocabulary=True)), which "
            "drops rows or adds zeros."
        )
