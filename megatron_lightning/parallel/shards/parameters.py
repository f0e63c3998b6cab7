"""Give a parameter other data, or another parameter its place. Attributes attached by the user
stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_lightning.compat import GradientHooks
from megatron_lightning.errors import ShardingError
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.parallel.shards.stored_weight import StoredWeight


def num_names(module: nn.Module) -> Counter[int]:
    """Return id -> number of names of the parameters in a module: above 1 for shared parameters."""
    return Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def copy_attributes(attributes: Mapping[str, object], parameter: Tensor) -> None:
    """Set the user's attributes of a parameter on the replacing parameter."""
    for name, value in attributes.items():
        if name not in vars(parameter):
            setattr(parameter, name, value)


def check_gradient_hooks(name: str, parameter: nn.Parameter | None) -> None:
    """Check that no hook of the user's waits for the gradient of a parameter to be sharded.

    Raises:
        ShardingError: Naming the parameter.
    """
    if parameter is not None and any(not is_library(hook) for hook in GradientHooks(parameter)):
        raise ShardingError(
            f"{name} has a gradient hook (register_hook or register_post_accumulate_grad_hook), "
            "which would be called with the gradient of a rank's shard instead of the full "
            "parameter's. Leave this module out of the sharding plan (it then stays full on every "
            "rank), or change the gradient in on_before_optimizer_step, where "
            "strategy.gradients() has each shard."
        )


def rebind(parameter: nn.Parameter, data: Tensor) -> None:
    """Give ``parameter`` other data, of any shape, and no gradient."""
    parameter.grad = None
    if isinstance(data, StoredWeight):  # the memory is not the parameter's own
        attributes = dict(vars(parameter))
        replacement = nn.Parameter(data, requires_grad=False)
        names_inside = vars(replacement).keys()
        torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
        copy_attributes({n: v for n, v in attributes.items() if n not in names_inside}, parameter)
        return
    # A graph still alive keeps torch's record of the parameter's shape. Another dtype makes torch
    # forget the record.
    other_dtype = torch.float16 if data.dtype != torch.float16 else torch.float32
    parameter.data = data.new_empty(0, dtype=other_dtype)
    parameter.data = data
