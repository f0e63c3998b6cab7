"""Token losses: plain cross entropy, and the vocabulary-parallel one, which never gathers the logits.

The parallel form follows Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): the maximum, the sum of exponentials and
the target's logit are each reduced over the tensor-parallel ranks. All arithmetic is fp32; what is kept for backward are
the logits in their own dtype and one number a token.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CrossEntropy(nn.Module):
    """Per-token cross entropy in fp32; a plan swaps it for the vocabulary-parallel one.

    Args:
        ignore_index: Target whose loss and gradient are zero.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses [...] of ``logits`` [..., v] for ``targets`` [...]."""
        losses = F.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return losses.view(targets.shape)
