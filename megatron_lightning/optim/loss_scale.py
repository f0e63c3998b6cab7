"""Dynamic loss scaling for fp16: updates of the scale, and the unscaling of gradients.

As in Megatron-Core's ``DynamicGradScaler``, an overflow decrements the hysteresis counter and, once
the counter is used up, halves the scale. A run of clean steps doubles the scale and resets the
counter. An overflow never resets the counter, so a scale much too high falls at every step (mixed
precision training, https://arxiv.org/abs/1710.03740, section 3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config import LossScaleOptions


class DynamicLossScale:
    """The factor to keep small fp16 gradients above zero. Equal on all ranks, because all ranks see
    the same overflows.
    """

    def __init__(self, options: LossScaleOptions | None = None) -> None:
        self.options = options or LossScaleOptions()
        self.scale = float(self.options.initial_scale)
        """Factor of the losses."""
        self._clean_steps = 0
        self._overflows_left = self.options.hysteresis

    @property
    def is_lowest(self) -> bool:
        """Whether the scale is at the minimum."""
        return self.scale <= self.options.min_scale

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step, with or without an infinite or NaN gradient on any
        rank.
        """
        options = self.options
        if overflowed:
            self._clean_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * options.backoff_factor, options.min_scale)
            return
        self._clean_steps += 1
        # More: the resumed run had a longer interval.
        if self._clean_steps >= options.growth_interval:
            self._clean_steps = 0
            self._overflows_left = options.hysteresis
            self.scale *= options.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state under Megatron-Core's names."""
        return {
            "scale": self.scale,
            "growth_tracker": self._clean_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def torch_state_dict(self) -> dict[str, Any]:
        """Return the state of an equivalent ``torch.amp.GradScaler``, without hysteresis."""
        return {
            "scale": self.scale,
            "growth_factor": self.options.growth_factor,
            "backoff_factor": self.options.backoff_factor,
            "growth_interval": self.options.growth_interval,
            "_growth_tracker": self._clean_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`, or from the state of a ``torch.amp.GradScaler``."""
        self.scale = float(state["scale"])
        self._clean_steps = int(
            state["growth_tracker"] if "growth_tracker" in state else state["_growth_tracker"]
        )
        self._overflows_left = int(state.get("hysteresis_tracker", self.options.hysteresis))


@torch.no_grad()
def unscale_(gradients: Iterable[Tensor], scale: float, device: torch.device) -> Tensor:
    """Divide the gradients by ``scale`` in place, and look for infinities and NaN in the same pass.

    Returns:
        A float tensor of shape [1] on ``device``: 1 if a gradient is not finite, else 0.
    """
    found_inf = torch.zeros(1, device=device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_kind[gradient.device, gradient.dtype].append(gradient)
    for (where, _), tensors in by_kind.items():
        overflow = found_inf.to(where)
        # 1 / scale in fp32 is exact: the scale is a power of two with the usual factors.
        inverse = torch.full((1,), 1.0 / scale, device=where)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, overflow, inverse)
        found_inf = torch.maximum(found_inf, overflow.to(device))
    return found_inf
