"""Random numbers drawn by hooks into layers of pipeline stages.

A loop of ``nn.init.kaiming_uniform_`` over ``self.parameters()`` in a hook draws on every stage
from the random stream shared by the ranks of a replica. Each stage has other layers, and all layers
receive the first numbers of the stream: layers of different stages become equal. Stages with
unequal numbers of draws are found by the stages' random states.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.checks.replicas import fingerprints
from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.parallel.grid.context import ParallelContext


class StageDraws:
    """Find layers of different stages made equal by hooks.

    Layers already equal when the strategy set up the fit, such as copies of a layer, may stay
    equal.

    Args:
        module: This rank's part of the module.
        part: Knows the units of this stage.
        context: Groups of this rank.
    """

    def __init__(self, module: nn.Module, part: Part, context: ParallelContext) -> None:
        self._module = module
        self._part = part
        self._group = context.pp
        self._before = set(self._marks().values())

    def check(self) -> None:
        """Compare the parameters changed since setup. A collective.

        Raises:
            ShardingError: If parameters of different stages are equal and not constant.
        """
        if self._group.process_group is None:
            return
        changed = {name: mark for name, mark in self._marks().items() if mark not in self._before}
        first: dict[int, str] = {}
        alike: list[str] = []
        for marks in self._group.all_gather_object(changed):
            pairs = [sorted((first[mark], name)) for name, mark in marks.items() if mark in first]
            alike += [" = ".join(pair) for pair in pairs]
            first |= {mark: name for name, mark in marks.items() if mark not in first}
        if alike:
            raise ShardingError(
                f"{', '.join(alike[:3])}{', …' if len(alike) > 3 else ''}: parameters of different "
                "pipeline stages hold equal values. A hook drew random numbers into the "
                "parameters (nn.init, normal_), and every stage drew the same ones for other "
                "layers. Initialize the weights in __init__ or configure_model, where all layers "
                "exist."
            )

    def _marks(self) -> dict[str, int]:
        """Return fingerprints of the non-constant parameters of this stage's units."""
        if self._group.process_group is None:
            return {}
        own_parameters = dict(self._own())
        if not own_parameters:
            return {}
        varies = torch.stack(
            [(tensor != tensor.flatten()[0]).any() for tensor in own_parameters.values()]
        )
        marks = fingerprints(list(own_parameters.values()))
        pairs = zip(own_parameters, varies.tolist(), marks.tolist(), strict=True)
        return {name: mark for name, is_varied, mark in pairs if is_varied}

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            spec = self._part.specs.get(name)
            is_tied = name in self._part.tied or (spec is not None and spec.tied_to is not None)
            local_tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            is_compared = (
                local_tensor.numel() > 1
                and not is_quantized(local_tensor.dtype)
                and not local_tensor.is_meta
            )
            if is_compared and self._part.in_unit(name) and not is_tied:
                yield name, local_tensor.detach()
