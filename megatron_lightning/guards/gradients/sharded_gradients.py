"""Verdict on user code that changes or measures sharded gradients before an optimizer step.

The training itself follows the gradients (``step/gradients/gradient_guard.py``), since
it also clears sharded gradients that user code sets to None.
"""

from __future__ import annotations

from megatron_lightning.guards.guard import Guard


class ShardedGradients(Guard):
    """Name and verdict. The gradients of a fit are followed by the training."""

    sentence = (
        "code between backward and the optimizer step changes `p.grad`, or takes norms of it, and "
        "each rank holds a part of the gradients"
    )
