"""Checks of the Trainer's plugins for precision, checkpoints and batch norm, on ranks with a part
of the model each.
"""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.precision.assignment import recipes_of_layers
from megatron_lightning.precision.served.qat import described, qat_of
from megatron_lightning.precision.transformer_engine.build import check_layer
from megatron_lightning.strategies.fp8 import quantizing

SUPPORTED_PRECISION = ("32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true", "64-true")


def check_precision(plugin: Precision | None, world_size: int) -> None:
    """Check the Trainer's precision.

    Raises:
        ConfigError: If the precision is not known to be right for parts of a model on several
            ranks.
    """
    precision = getattr(plugin, "precision", "32-true")
    if world_size > 1 and str(precision).startswith("transformer-engine"):
        raise ConfigError(
            f"precision={precision!r} is Lightning's, which replaces layers by Transformer "
            f"Engine's for one device, and here are {world_size} ranks, whose layers are parallel "
            "ones. Set plugins=[MegatronFP8Precision(recipe=FP8Recipe(...))] instead of it."
        )
    if world_size > 1 and precision not in SUPPORTED_PRECISION:
        raise ConfigError(
            f"precision={precision!r} of {type(plugin).__name__} is not supported on {world_size} "
            "ranks: it is made for full models on one device, and here each rank has a part. Set "
            f"it to one of {', '.join(SUPPORTED_PRECISION)}."
        )


def check_recipe_of(plugin: Precision | None, module: nn.Module, layout: ParallelLayout) -> None:
    """Check the recipe of FP8 layers against a full module. Sharding keeps the names of layers.

    Raises:
        ConfigError: If a pattern matches nothing, no layer is quantized, or Transformer Engine
            rejects the size of a layer.
    """
    fp8 = quantizing(plugin)
    if fp8 is None:
        return
    if rounded := qat_of(module):
        raise ConfigError(
            f"MegatronFP8Precision quantizes the layers of a module that is trained with "
            f"{described(next(iter(rounded.values())).qat)}: a layer multiplies by one or by the "
            'other. Leave the plugin out (precision="bf16-mixed"), or qat.'
        )
    recipes = recipes_of_layers(module, fp8.recipe, will_divide=layout.tp > 1)
    if fp8.backend != "transformer_engine":
        return
    for path, recipe in recipes.items():
        layer = module.get_submodule(path)
        # Over tensor ranks a plain layer may become a vocabulary layer, and so stay in bf16.
        if recipe is not None and (layout.tp == 1 or type(layer) is not nn.Linear):
            check_layer(path, layer, recipe.scaling)


def check_compiled_precision(plugin: Precision | None, data_parallel: str) -> None:
    """Check the Trainer's precision for compiled blocks.

    Raises:
        ConfigError: If Transformer Engine computes the layers of the blocks, or FSDP2 gathers 8-bit
            quantized data.
    """
    if keeps_quantized(plugin) and data_parallel == "fsdp":
        raise ConfigError(
            'compile="block" and fp8_param_gather=True with data_parallel="fsdp": the graph of a '
            "block would round gradients to the 8 bits of the weights that FSDP2 gathers. Set "
            'data_parallel to "zero1", or leave compile out.'
        )
    if getattr(plugin, "backend", None) == "transformer_engine":
        raise ConfigError(
            'compile="block" and MegatronFP8Precision(backend="transformer_engine"): its layers '
            "are kernels already, with which torch.compile makes no graph of a block. Leave "
            "compile out, or set backend to native."
        )


def keeps_quantized(plugin: Precision | None) -> bool:
    """Return whether weights are kept and gathered as 8-bit quantized data."""
    fp8 = quantizing(plugin)
    return fp8 is not None and fp8.recipe.fp8_param_gather


def check_quantized_storage(plugin: Precision | None, data_parallel: str) -> None:
    """Check that weights to be kept as quantized data have main params elsewhere.

    Raises:
        ConfigError: If every rank steps the full parameters, or FSDP2 would have to gather
            Transformer Engine's tensors.
    """
    if keeps_quantized(plugin) and data_parallel == "ddp":
        raise ConfigError(
            'fp8_param_gather=True and data_parallel="ddp": every rank steps its full parameters, '
            'so that there is nothing to gather. Set data_parallel to "zero1" or "fsdp", or '
            "fp8_param_gather to False."
        )
    is_engine = getattr(plugin, "backend", None) == "transformer_engine"
    if keeps_quantized(plugin) and is_engine and data_parallel == "fsdp":
        raise ConfigError(
            'fp8_param_gather=True, backend="transformer_engine" and data_parallel="fsdp": FSDP2 '
            "frees a layer's full weight after use, and Transformer Engine keeps its quantized "
            "data, and their transpose, in a tensor for as long as the layer lives. Set "
            'data_parallel to "zero1", or backend to native or emulation, or '
            "fp8_param_gather to False."
        )


def check_checkpoint_io(plugin: CheckpointIO | None, world_size: int) -> None:
    """Check the user's checkpoint plugin.

    Raises:
        ConfigError: With several ranks, since each rank holds a part of the checkpoint.
    """
    if plugin is not None and world_size > 1:
        raise ConfigError(
            f"plugins has a {type(plugin).__name__}, which saves one dict from one process, and "
            f"here {world_size} ranks hold a part each. Remove it (checkpoints are sharded "
            "directories; `megatron-lightning checkpoint consolidate` makes one file of them), or "
            "use one device."
        )


def check_layer_sync(
    layer_sync: LayerSync | None, device: torch.device, data_parallel_size: int
) -> None:
    """Check whether BatchNorm can see the samples of all replicas.

    Raises:
        ConfigError: On devices without support by torch's layer.
    """
    if (
        isinstance(layer_sync, TorchSyncBatchNorm)
        and data_parallel_size > 1
        and device.type == "cpu"
    ):
        raise ConfigError(
            "sync_batchnorm=True replaces BatchNorm by torch's SyncBatchNorm, which has no CPU "
            f"kernels, and {data_parallel_size} data-parallel ranks train on CPUs. Set "
            "sync_batchnorm=False: every rank then normalizes by its own samples, and keeps the "
            "first rank's running statistics."
        )


def check_storage_options(storage_options: object) -> None:
    """Check the user's options for saving a checkpoint.

    Raises:
        ConfigError: For any option, since nothing reads options.
    """
    if storage_options is not None:
        raise ConfigError(
            f"storage_options={storage_options!r} has no meaning for a checkpoint directory. Leave "
            "it out, or, on one device, pass a CheckpointIO plugin that understands it: "
            "Trainer(plugins=[...])."
        )
