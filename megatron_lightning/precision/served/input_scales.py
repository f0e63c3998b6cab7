"""Scales of inputs that servers read from the folder (``nvfp4``, ``fp8_tensor``).

The first steps of a training note the largest input of each layer in an amax history and do not
round. Then the scales stay. All ranks know the amax of all layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.precision.delayed_scaling import AmaxHistory
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.precision.scaling import scales_of
from megatron_lightning.precision.served.values import ServedFormat, outer_scale

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Completed(NamedTuple):
    """Amax of all layers."""

    amax: dict[str, float]
    experts: tuple[str, ...]
    """Layers of experts without tokens, which have the largest amax of the layer's experts."""
    missing: tuple[str, ...]
    """Other layers without tokens."""


def completed(amax: Mapping[str, float], paths: Iterable[str]) -> Completed:
    """Return the amax of all layers. An expert without tokens has the largest of the experts.

    Args:
        amax: Path of a layer -> largest absolute input. 0, or no entry: no token.
        paths: All layers. Experts have paths such as ``layers.1.mlp.experts.7.down_proj``.
    """
    of_experts: dict[str, float] = {}
    for path, value in amax.items():
        layer = _EXPERT.sub(".experts.*.", path)
        of_experts[layer] = max(of_experts.get(layer, 0.0), value)
    found = {path: amax.get(path, 0.0) for path in paths}
    lacking = [path for path, value in found.items() if not value]
    for path in lacking:
        found[path] = of_experts.get(_EXPERT.sub(".experts.*.", path), 0.0)
    missing = tuple(path for path in lacking if not found[path])
    return Completed(found, tuple(path for path in lacking if found[path]), missing)


def input_scale(amax: Tensor, form: ServedFormat) -> Tensor:
    """Return the scale of inputs in fp32, by which codes and block scales are multiplied. A power
    of two.
    """
    if form.name == "nvfp4":
        return outer_scale(amax)
    return scales_of(amax, "e4m3", power_of_two=True)[1]


class InputScales:
    """The largest inputs of a model's layers.

    Args:
        paths: The layers, in the same order on all ranks.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        # Notes of recomputed and compiled forwards are right in a history.
        self._histories = {p: AmaxHistory(FP8Recipe(scaling="delayed"), "input") for p in paths}
        self.amax: dict[str, float] = {}
        """Path -> largest absolute input so far."""
        self.is_shared = False
        """Whether a strategy takes the notes, and shares them between ranks."""

    def note(self, path: str, x: Tensor) -> None:
        """Note the inputs of a layer that are not rounded yet."""
        amax = x.detach().abs().amax() if x.numel() else x.new_zeros(())
        self._histories[path].note(amax.float())

    def take(self, group: AxisGroup | None = None, device: torch.device | None = None) -> None:
        """Take over the notes of a step. All ranks of the group call this together.

        Raises:
            ConfigError: If there are ranks whose group is unknown.
        """
        noted = {path: history.take_noted() for path, history in self._histories.items()}
        if group is None:
            if not any(noted.values()):
                return
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise ConfigError(
                    f"{dist.get_world_size()} ranks find scales of inputs, which only "
                    "MegatronStrategy shares between them. Use it, or one device."
                )
        largest = torch.tensor([self.amax.get(path, 0.0) for path in noted], device=device)
        for number, values in enumerate(noted.values()):
            for value in values:
                largest[number] = torch.maximum(largest[number], value.to(largest.device))
        largest = largest if group is None else all_reduce(largest, group, "max")
        found = zip(noted, largest.tolist(), strict=True)
        self.amax = {path: value for path, value in found if value}

    def complete(self, step: int) -> str | None:
        """Give experts without tokens a scale, before inputs are rounded. Return a line about it.
        None: nothing is new.

        Raises:
            ConfigError: If no step has found the scales of a layer.
        """
        amax, experts, missing = completed(self.amax, self._histories)
        if missing:
            raise ConfigError(
                f"the inputs of {len(missing)} of {len(amax)} layers have no scale at step {step} "
                f"({missing[0]}): no step before it has found values other than 0. Set "
                f"fake_quant_after_n_steps of qat above {step}, or give layers that see no token "
                "bf16 in its modules."
            )
        if amax == self.amax:
            return None
        self.amax = amax
        return f"{len(experts)} experts without tokens have the largest input scale of their layer."

    def of(self, path: str, like: Tensor) -> Tensor | None:
        """Return the amax [1, 1] of a layer's inputs. None: no step has found one."""
        amax = self.amax.get(path)
        return None if amax is None else torch.full((1, 1), amax, device=like.device)
