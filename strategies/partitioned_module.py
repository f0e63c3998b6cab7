"""A LightningModule in one run: reduced to this rank's part, described, and placed."""

from __future__ import annotations

from contextlib import ExitStack

import lightning.pytorch as pl
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision

from megatron_lightning.assembly.assemble import is_assembled
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.assembly.state.part_loading import FullStateLoading
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.strategies.fp8 import parameter_storage, quantizing
from megatron_lightning.strategies.module import assemble_module, place_module
from megatron_lightning.strategies.summary import summarize_full


class PartitionedModule:
    """The module of a run, from its assembly on.

    Args:
        module: The LightningModule.
        context: Groups of this rank.
        options: The strategy's.
        undo: Restores replaced attributes of the module.
        layer_sync: Lightning's plugin for BatchNorm over the replicas.
        earlier: The same module in the run before: FSDP2's units stay sharded.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        context: ParallelContext,
        options: StrategyOptions,
        undo: ExitStack,
        *,
        layer_sync: LayerSync | None,
        earlier: PartitionedModule | None,
    ) -> None:
        self._module = module
        self._context = context
        self._options = options
        self._undo = undo
        self._layer_sync = layer_sync
        self._part: Part | None = None
        self._earlier_part = None if earlier is None else earlier._part

    @property
    def part(self) -> Part:
        """Description of this rank's part.

        Raises:
            ConfigError: Before the module is assembled.
        """
        if self._part is None:
            raise ConfigError(
                "the module has not been sharded yet; it is in or after configure_model."
            )
        return self._part

    def assemble(self) -> None:
        """Reduce the module to this rank's part, unless the module already is this part and no hook
        has built layers since.
        """
        if self._part is None or not self._part.describes(self._module):
            self.assemble_built()

    def assemble_built(self) -> None:
        """Reduce a complete module to this rank's part. From then on the module loads full state
        dicts.
        """
        earlier_part = self._part or self._earlier_part
        if not is_assembled(self._module):
            summarize_full(self._module, self._undo)
        self._part = assemble_module(
            self._module, earlier_part, self._context, self._options, self._layer_sync
        )
        is_divided = self._context.layout.model_parallel_size > 1
        if is_divided or self._options.data_parallel == "fsdp":
            FullStateLoading.attach(self._module, self.state)

    def state(self) -> ModuleState:
        """Return the state of the module as shards."""
        return ModuleState(self._module, self.part, self._context)

    def forget(self) -> None:
        """Describe the module again at the next assembly."""
        self._part = None

    def place(self, precision: Precision) -> None:
        """Bring the module into its dtype, onto this rank's device and, with ``fsdp``, into this
        rank's shards. Quantize the layers of the module.
        """
        self._part = part = place_module(
            self._module, self.part, self._context, self._options, precision
        )
        if (plugin := quantizing(precision)) is not None:
            caches = part.units is None
            plugin.quantize_layers(self._module, self._context, self._undo, caches_weights=caches)
        if part.units is not None:
            part.units.store(parameter_storage(self._module, part, precision))
