"""Bytes and operations of a tower of images and its projector, before the layers of text. No torch
here.

Both are in full on every rank of the first stage. Of P parameters, T of them trained, on n
data-parallel ranks, with weights of w bytes and main params of m bytes (4 or 0), under ``fsdp`` as
under ``zero1``, because ranks without images do not gather them:

    weights    gradients    optimizer
    w P        4 T          (8 + m) T / n, with ddp n = 1

From the first trained layer on, every linear layer keeps its input and its output for each of its
rows. Rows are patches in the blocks of a tower, and tokens behind. Frozen layers before it keep
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lightning.config import DataParallel, DataParallelOptions, TransformerConfig
from megatron_lightning.models.blueprint import unit_names
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.layer_tapes import Sizes
from megatron_lightning.planning.ledger.optimizer_memory import State, shards_of
from megatron_lightning.planning.ledger.precision_bytes import Precision
from megatron_lightning.planning.ledger.rank_parameters import (
    ParameterCount,
    count_unit,
    layer_of,
)
from megatron_lightning.planning.ledger.tape import Profile

TOWER = "tower"
"""Name of tower and projector among the units of the first stage."""
_SMALLEST_COST = 0.1  # of a layer, as where a run divides the model
_FORWARD_SHARE = 1 / 3


class TowerLinear(NamedTuple):
    """A linear layer of a tower or projector."""

    path: str
    features_in: int
    features_out: int
    is_in_block: bool
    """Whether rows are patches. False: tokens."""
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True)
class TowerSizes:
    """Tower and projector of a model, and the images of a sample."""

    parameters: int
    trained: int
    """Parameters that are trained, without adapters."""
    linears: tuple[TowerLinear, ...]
    patches_per_token: float
    """Patches of a tower that become one token of text."""
    num_blocks: int = 0
    """Blocks of the tower."""
    width: int = 0
    """Features of a patch between blocks."""
    tile_patches: int | None = None
    """Patches of a picture or tile of fixed size. None: an image is processed as one."""
    image_tokens: int = 0
    """Tokens of the images of a sample."""

    @property
    def num_patches(self) -> int:
        """Patches of the images of a sample."""
        return round(self.image_tokens * self.patches_per_token)

    def multiply_adds(self) -> float:
        """Return the multiply-adds of the linear layers for a sample. Attention is left out."""
        return float(sum(rows * one.features_in * one.features_out for rows, one in self._rows()))

    def trained_work(self, adapters: AdapterSizes | None) -> float:
        """Return the multiply-adds of forward and backward for a sample, in units of a trained
        layer's. A third each are the forward, the gradient of inputs from the first trained layer
        on, and the gradient of a trained weight.
        """
        first = self._first_trained(adapters)
        work = 0.0
        for number, (rows, one) in enumerate(self._rows()):
            has_backward = first is not None and number >= first
            thirds = 1 + has_backward + (one.is_trained and adapters is None)
            work += thirds * rows * one.features_in * one.features_out / 3
        return work

    def mixing(self) -> float:
        """Return the multiply-adds of full attention over one image, or over each tile of it."""
        patches = self.num_patches
        seen = patches if self.tile_patches is None else min(patches, self.tile_patches)
        return 2.0 * self.num_blocks * self.width * patches * seen

    def cost(self, config: TransformerConfig) -> float:
        """Return the cost beside the layers of text, in layers, by parameters. 0: too small to move
        a layer to another stage.
        """
        names = [name for name in unit_names(config) if layer_of(name) is not None]
        total = sum(count_unit(config, ParallelLayout(), name).total for name in names)
        work = self.trained + _FORWARD_SHARE * (self.parameters - self.trained)
        cost = len(names) * work / total
        return cost if cost >= _SMALLEST_COST else 0.0

    def num_trained(self, adapters: AdapterSizes | None) -> int:
        """Return the trained parameters, with adapters."""
        if adapters is None:
            return self.trained
        adapted = [one for one in self.linears if adapters.adapts_path(one.path)]
        return adapters.r * sum(one.features_in + one.features_out for one in adapted)

    def state(
        self,
        grid: RankGrid,
        adapters: AdapterSizes | None,
        precision: Precision,
        mode: DataParallel,
        options: DataParallelOptions,
    ) -> State:
        """Return weights, gradients and optimizer of a rank."""
        trained = self.num_trained(adapters)
        state = State(
            ParameterCount(trained), {}, {}, shards=shards_of(grid, mode, options),
            precision=precision, options=options, num_microbatches=1,
        )  # fmt: skip
        total = self.parameters + (0 if adapters is None else trained)
        state.parameters = ParameterCount(total)
        state.weights_bytes = precision.weight_bytes * total
        return state

    def added_to(self, first: Profile, sizes: Sizes, adapters: AdapterSizes | None) -> Profile:
        """Return the bytes of a micro-batch on the first stage with those of the tower."""
        each = sizes.micro_batch_size * sizes.element
        widths = [rows * (one.features_in + one.features_out) for rows, one in self._rows()]
        working = each * max(widths, default=0)
        first_trained = self._first_trained(adapters)
        kept = 0 if first_trained is None else each * sum(widths[first_trained:])
        forward = max(kept + working, kept + first.forward_peak)
        backward = max(kept + 2 * working if kept else 0, kept + first.backward_peak)
        return replace(first, kept=first.kept + kept, forward_peak=forward, backward_peak=backward)

    def _first_trained(self, adapters: AdapterSizes | None) -> int | None:
        trained = (
            one.is_trained if adapters is None else adapters.adapts_path(one.path)
            for one in self.linears
        )
        return next((n for n, is_trained in enumerate(trained) if is_trained), None)

    def _rows(self) -> Iterator[tuple[int, TowerLinear]]:
        """Yield every linear layer and the number of its rows in a sample."""
        for one in self.linears:
            yield (self.num_patches if one.is_in_block else self.image_tokens), one
