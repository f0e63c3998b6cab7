"""A warning about hooks that write into sharded parameters.

``weight.div_(weight.norm(dim=0))`` in a hook divides by the norm of a shard. ``weight.mul_(0.9)``
is right. The two cannot be distinguished, so neither is refused. A changed version of a tensor
shows a write by a hook. Versions are host integers and need no work on a device. Writes through
``tensor.data`` are not seen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext


class ShardWrites(Guard):
    """Versions of the sharded parameters between two optimizer steps, until a hook has written.

    Schedule-free optimizers write weights in ``train()`` and ``eval()``, element by element, and
    are not watched.
    """

    sentence = (
        "a hook writes into shards of parameters: elements are right, norms, means and sums are of "
        "the shard"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        optimizers = () if fit is None else fit.optimizers
        watches = not any(hasattr(optimizer, "eval") for optimizer in optimizers)
        specs = scope.part.specs
        self._sharded: dict[str, Tensor] = {
            name: parameter
            for name, parameter in scope.module.named_parameters()
            if watches and name in specs and specs[name].sharded_over
        }
        self._versions: list[int] = []
        self._loads = _Loads()
        if self._sharded:
            handle = scope.module.register_load_state_dict_post_hook(self._loads)  # type: ignore[no-untyped-call]
            scope.undo.callback(handle.remove)

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a fit has shards of parameters."""
        return fit is not None and scope.context.layout.model_parallel_size > 1

    def after_update(self, *, stepped: bool) -> None:
        """Record the versions after an optimizer step."""
        self._loads.seen = False
        self._versions = [parameter._version for parameter in self._sharded.values()]

    def hooks_ran(self, batch: StepBatch) -> None:
        """Warn, once, if a parameter was written since the last optimizer step."""
        if not batch.trains:
            return
        # load_state_dict takes full tensors, and gives each rank the rank's shards.
        if not self._versions or self._loads.seen:
            return
        versions = [parameter._version for parameter in self._sharded.values()]
        if versions == self._versions:
            return
        pairs = zip(self._sharded, versions, self._versions, strict=True)
        names = [name for name, version, version_before in pairs if version != version_before]
        self._sharded, self._versions = {}, []
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        self.judge.warn(
            f"a hook has written into {', '.join(names[:5])}{more}, of which each tensor-parallel "
            "(or expert-parallel) rank holds a shard. What the hook computes element by element is "
            "right. A norm, mean, quantile or sum is the shard's, and differs from one device. "
            "Compute those from strategy.full_tensors(), which all ranks call, and write full "
            "tensors with load_state_dict of the LightningModule. See docs/differences.md."
        )


class _Loads:
    """Hook after ``load_state_dict``."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, module: nn.Module, keys: Any) -> None:
        self.seen = True
