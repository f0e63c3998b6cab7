"""Refusals beside a frozen base in 8 or 4 bits."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.stored_weight import stored_weights
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.step.options import StrategyOptions
from megatron_lightning.strategies.checkpoint.finetuning import announces_unfreezing
from megatron_lightning.strategies.fp8 import quantizing


def base_formats(module: nn.Module) -> set[str]:
    """Return the formats of the frozen bases in a module, built or still to be built."""
    methods = [applied.method for applied in applied_to(module).values()]
    own_method = getattr(module, "peft", None)
    methods += [own_method] if isinstance(own_method, AdapterMethod) else []
    return {method.base for method in methods if method.base is not None}


def check_base(options: StrategyOptions, module: nn.Module, trainer: pl.Trainer | None) -> None:
    """Check that nothing needs the values of a base kept in 8 or 4 bits.

    Raises:
        ConfigError: If something does.
    """
    formats = base_formats(module)
    if not formats:
        return
    base = f"base={min(formats)!r} of LoRA keeps frozen weights as quantized data"
    if options.checkpoint.also_save_hf is not None:
        raise ConfigError(
            f"{base}, and also_save_hf={options.checkpoint.also_save_hf!r} writes the values of "
            "all weights. Leave it out; megatron-lightning adapters merge writes a folder from a "
            "checkpoint and the base's own folder."
        )
    for name, weight in stored_weights(module).items():
        if weight.requires_grad:
            raise ConfigError(
                f"{base}, and {name} is to be trained (requires_grad). Train it by "
                "modules_to_save, which keeps its values, or freeze it."
            )
    if trainer is None:
        return
    plugin = quantizing(trainer.precision_plugin)
    if plugin is not None and plugin.backend == "transformer_engine":
        raise ConfigError(
            f'{base}, and backend="transformer_engine" quantizes weights in layers of its own. Set '
            "backend to auto, or base to None."
        )
    if announces_unfreezing(trainer):
        raise ConfigError(
            f"{base}, and a BaseFinetuning callback trains frozen weights later. Leave out the "
            "callback, or set base to None."
        )
