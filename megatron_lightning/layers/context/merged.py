"""Merge the attention of several blocks of keys, by the log-sum-exps of their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.layers.context.kernels import Output


class Merged:
    """Output and log-sum-exp over the blocks so far, in fp32 (fp64 for inputs in fp64)."""

    def __init__(self, q: Tensor) -> None:
        wide = wide_dtype(q.dtype)
        self.out = torch.zeros_like(q, dtype=wide)
        self.log_sum = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)

    def add(self, queries: slice, output: Output) -> None:
        """Merge what a block has given for ``queries``."""
        out, log_sum = output
        earlier, whole = self.log_sum[:, :, queries], self.out[:, :, queries]
        both = torch.logaddexp(earlier, log_sum)
        seen = both.masked_fill(both == -torch.inf, 0.0)  # so far these queries saw nothing
        whole *= (earlier - seen).exp().unsqueeze(-1)
        whole += out * (log_sum - seen).exp().unsqueeze(-1)
        earlier.copy_(both)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
