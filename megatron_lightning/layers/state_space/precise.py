"""Parameters that stay in fp32 in a model of half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)


class PreciseParameters(nn.Module):
    """Base of modules whose parameters :attr:`precise` stay in fp32 when the module is moved to
    bf16 or fp16: decay rates and step sizes are exponentials of the parameters.
    """

    precise: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        parameters = {name: self._parameters[name] for name in self.precise}
        values = {name: p.data for name, p in parameters.items() if p is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in values.items():
            parameter = self._parameters[name]
            if parameter is not None and parameter.dtype in _HALF and value.dtype not in _HALF:
                if value.is_meta and not parameter.is_meta:
                    parameter.data = torch.empty_like(parameter.data, dtype=value.dtype)
                else:
                    parameter.data = value.to(parameter.device)
        return self
