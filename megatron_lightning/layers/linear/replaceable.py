"""Check that a parallel layer may replace a module's computation.

User attachments stay, because the object stays and only its class changes. A replacement is refused
if it would drop an attachment, or hand a rank's shard to a hook that expects the full tensor. In
the messages ``target`` is the parallel class or the style.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.adapters.weight_adapters import HOOKS_OF_ADAPTERS
from megatron_lightning.parallel.shards.parameters import check_gradient_hooks

_WAY_OUT = (
    "Leave it out of the sharding plan: it then stays full on every rank, as "
    'sharding_plan="auto" leaves it.'
)

Side = Literal["input", "output"]


def check_replaceable(module: nn.Module, plain: Collection[type[nn.Module]], target: str) -> None:
    """Check that ``module`` computes like one of the classes ``plain``, from a weight parameter.

    Raises:
        ShardingError: If the module is of another class, has a custom forward, or computes the
            weight from other parameters.
    """
    kind = type(module)
    if not isinstance(module, tuple(plain)):
        first = next(iter(plain))
        name = kind.__name__
        if name == first.__name__:  # of another library
            name = f"{kind.__module__}.{name}"
        raise ShardingError(
            f"{target} takes the place of a {first.__name__}, and the plan points it at a {name}. "
            "Correct the pattern, or give this module another style."
        )
    if has_computed_weight(module):
        raise ShardingError(
            f"{target} splits a weight, and that of this {kind.__name__} is computed from other "
            "parameters (weight_norm, spectral_norm, pruning or another parametrization), "
            f"which would have to be split, too. {_WAY_OUT}"
        )
    check_forward(module, plain, target)


def check_forward(module: nn.Module, plain: Collection[type[nn.Module]], target: str) -> None:
    """Check that ``module`` has the forward of one of the classes ``plain``.

    Raises:
        ShardingError: If the module has a custom forward.
    """
    if has_own_forward(module, plain):
        where = "this module" if "forward" in vars(module) else f"class {type(module).__qualname__}"
        raise ShardingError(
            f"{target} computes a {next(iter(plain)).__name__} on shards, and {where} has a "
            f"forward of its own, which would not be called. {_WAY_OUT} Or move what the forward "
            "adds into a module around it."
        )


def has_own_forward(module: nn.Module, plain: Collection[type[nn.Module]]) -> bool:
    """Return whether ``module`` computes otherwise than the classes ``plain`` do."""
    forwards = [kind.forward for kind in plain]
    return "forward" in vars(module) or type(module).forward not in forwards


def has_computed_weight(module: nn.Module) -> bool:
    """Return whether the weight of ``module`` is no parameter: parametrized (weight and spectral
    norm, old and new), or pruned.
    """
    if getattr(module, "borrows_weight", False):  # and takes its boxes of the full one
        return False
    return is_parametrized(module) or module._parameters.get("weight") is None


def check_hooks(module: nn.Module, target: str, shards: Collection[str]) -> None:
    """Check that no user hook would see a shard of the input or the output.

    Args:
        module: The module with the hooks.
        target: Class or style of the replacement, for the message.
        shards: Sides with sharded activations or partial gradients on a rank.

    Raises:
        ShardingError: If a hook would see a shard.
    """
    # Adapters add results to local shards, and are divided with the layer.
    hooks = [hook for hook in module._forward_hooks.values() if hook not in HOOKS_OF_ADAPTERS]
    pre_hooks = [
        hook for hook in module._forward_pre_hooks.values() if hook not in HOOKS_OF_ADAPTERS
    ]
    sides_of_hooks = {
        "register_forward_pre_hook": ("input",) if pre_hooks else (),
        "register_forward_hook": ("input", "output") if hooks else (),
        "register_full_backward_hook": ("input", "output") if module._backward_hooks else (),
        "register_full_backward_pre_hook": ("output",) if module._backward_pre_hooks else (),
    }
    for name, sides in sides_of_hooks.items():
        sharded_sides = [side for side in sides if side in shards]
        if sharded_sides:
            raise ShardingError(
                f"this {type(module).__name__} has a hook ({name}), and as a {target} its "
                f"{' and its '.join(sharded_sides)} would be a shard of the rank, where the hook "
                f"expects the full tensor. {_WAY_OUT} Or register the hook on a module around it."
            )


def check_parameter_hooks(module: nn.Module, *names: str) -> None:
    """Check that no hook would be called with a shard of a parameter's gradient.

    Raises:
        ShardingError: If a hook would be called with a shard.
    """
    for name in names:
        check_gradient_hooks(name, module._parameters.get(name))
