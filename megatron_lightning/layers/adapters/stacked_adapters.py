"""Adapters of stacked experts that are parameters of a module, as in ``transformers`` 5.

Such experts read a parameter [E, out, in] inside their forward, so that no layer's output can be
added to. During a call of the module, the parameter's name holds the sum

    W + scale B A,    A [E, r, in],  B [E, out, r]

as in ``peft`` (``target_parameters``). The sum exists for one call, and for the call's backward.

    experts.gate_up_proj                             [E, 2f, h], frozen
    experts.adapters.gate_up_proj.lora_A.weight      [E, r, h]
    experts.adapters.gate_up_proj.lora_B.weight      [E, 2f, r]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import Adapters, adapters_of
from megatron_lightning.layers.linear.gemm import add_products
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.stored_weight import StoredWeight


class StackedAdapters(Adapters):
    """The adapters of a module's parameters, by the parameters' names."""

    def sums(self, module: nn.Module) -> dict[str, Tensor]:
        """Return name -> W + scale B A of the adapted parameters of ``module``."""
        result = {}
        for name, part in self.parts.items():
            weight: Any = module._parameters[name]
            if isinstance(weight, StoredWeight):
                weight = weight.dequantized()
            [first], [second] = (map(_weight, layers) for layers in (part.inputs, part.outputs))
            result[name] = add_products(weight, second, first, part.scale)
        return result


def _weight(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    return weight


def is_stack(module: nn.Module, name: str) -> bool:
    """Return whether a direct parameter of a module is a matrix [out, in] for each expert."""
    parameter = module._parameters.get(name)
    return (
        parameter is not None
        and parameter.dim() == 3
        and getattr(module, "num_experts", None) == len(parameter)
        and not isinstance(module, GroupedLinear)
    )


def attach_stacked(module: nn.Module, adapters: StackedAdapters) -> None:
    """Make ``adapters`` a child of a module of experts, and its parameters sums during calls.

    Raises:
        ConfigError: If the module has another attribute of the name.
    """
    if hasattr(module, "adapters"):
        raise ConfigError(
            f"a {type(module).__name__} has an attribute 'adapters' already, under which LoRA "
            "keeps its adapters. Apply LoRA once to a model; to another model, or rename it."
        )
    module.add_module("adapters", adapters)
    module.register_forward_pre_hook(set_sums)
    module.register_forward_hook(remove_sums, always_call=True)


def set_sums(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: make the names of the adapted parameters hold sums.

    Raises:
        ConfigError: If only half of the rows have adapters.
    """
    adapters = adapters_of(module)
    if not isinstance(adapters, StackedAdapters) or not adapters.enabled:
        return
    if adapters.half_dim is not None:
        raise ConfigError(
            f"a {type(module).__name__} gets rows of several sequences mixed, so that its "
            "adapters cannot leave out the rows of a reference. Leave out target_parameters of "
            'LoRA, or set the reference of DPOModule to "model" or "scores".'
        )
    # Before _parameters, which keep the parameter, in the lookup of an attribute.
    # A rounding of the sums has come first.
    vars(module).update({n: x for n, x in adapters.sums(module).items() if n not in vars(module)})


def remove_sums(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: make the names hold parameters again."""
    adapters = adapters_of(module)
    for name in () if adapters is None else adapters.parts:
        vars(module).pop(name, None)


def detach_stacked(module: nn.Module) -> None:
    """Remove the adapters of a module of experts."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if hook in (set_sums, remove_sums):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    del module._modules["adapters"]
