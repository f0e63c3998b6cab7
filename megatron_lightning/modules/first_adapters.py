"""The adapters that a training began with, as its frozen reference.

The values are a copy of the adapters' parameters, by name, on each rank of its own part. Adapters
that begin at zero need no copy: the reference is the model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers, adapters_disabled
from megatron_lightning.layers.adapters.magnitude import has_magnitude
from megatron_lightning.parallel.grid.context import ParallelContext

ENTRY = "reference_adapters"
"""Entry of a checkpoint: name of a parameter of adapters -> first values. Empty: zero."""


class FirstAdapters:
    """The first values of a module's adapters.

    Args:
        module: The module, or this rank's part.
        context: Groups of this rank. None: there is one process, or another strategy.
        values: Name in the module -> first values, from a checkpoint. None: the current values. A
            collective of all ranks.

    Raises:
        ConfigError: If the values are not of this rank's part.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ParallelContext | None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        own = _parameters(module)
        if values is None:
            values = {name: parameter.detach().clone() for name, parameter in own.items()}
            if not _any_rank(context, begins=_is_trained(module)):
                values = {}
        self.values = dict(values)
        """Name -> first values. Empty: the adapters began at zero."""
        for name, parameter in own.items() if values else ():
            if name not in values or values[name].shape != parameter.shape:
                raise ConfigError(
                    f"the reference has no first values for {name} on this rank. Load the "
                    "checkpoint with the fit: trainer.fit(module, ckpt_path=...)."
                )
        self._module = module

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Compute with the first values inside the block, without gradients."""
        if not self.values:
            with adapters_disabled(self._module):
                yield
            return
        own = _parameters(self._module)
        trained = {name: parameter.detach().clone() for name, parameter in own.items()}
        # In place, since FSDP2 gathers from the parameters' memory.
        _copy(self.values, own)
        try:
            yield
        finally:
            _copy(trained, own)

    def set_first_values(self) -> None:
        """Give the layers their first values, for the first half of the rows inside of
        :func:`adapters_for_second_half`. Replaces values given before.

        Raises:
            ConfigError: If FSDP2 shards the adapters.
        """
        for path, adapters in adapted_layers(self._module).items():
            adapters.first = {}
            if not self.values:
                continue
            if any(isinstance(parameter, DTensor) for parameter in adapters.parameters()):
                raise ConfigError(
                    'the reference is "adapters" that the training began with, on several pipeline '
                    "ranks with data_parallel=fsdp, which gathers the trained values alone. Set "
                    'data_parallel to "zero1", or reference to "scores" or "model".'
                )
            adapters.first = {
                name: self.values[f"{path}.adapters.{name}"].to(parameter.device)
                for name, parameter in adapters.named_parameters()
            }


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all adapters by name."""
    return {
        f"{path}.adapters.{name}": parameter
        for path, adapters in adapted_layers(module).items()
        for name, parameter in adapters.named_parameters()
    }


def _is_trained(module: nn.Module) -> bool:
    """Return whether adapters add anything to their layers. Lengths of rows (DoRA) always count."""
    return any(
        has_magnitude(adapters)
        or any(
            bool(_local(tensor).any())
            for part in adapters.parts.values()
            for name, tensor in part.named_parameters()
            if name in part.kind.zeros
        )
        for adapters in adapted_layers(module).values()
    )


def _any_rank(context: ParallelContext | None, *, begins: bool) -> bool:
    """Return whether a statement is true on any rank."""
    if context is None:
        return begins
    return any(context.axis("world").all_gather_object(begins))


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        _local(parameter).copy_(_local(values[name]))
