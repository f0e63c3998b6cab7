"""Refuse a training in which parameters that should learn never receive a gradient.

A parameter may be trained in vain: a kernel replaces a layer and bypasses the layer's adapters, a
checkpointed block without a differentiable input has no backward, a layer is never called. The loss
stays finite, and no error appears. Only the module knows whether a parameter may be unused.
``expects_gradients = True`` on a module declares that all trainable parameters inside of the module
receive gradients in the first updates. Other modules are left alone.
"""

from __future__ import annotations

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.run_context import RunContext

NUM_UPDATES = 4
"""Updates of every optimizer, or all updates of a shorter fit, within which a parameter must have a
gradient. Experts rarely chosen by a router get no tokens in many updates.
"""


class TrainedParameters(Guard):
    """Look for gradients in the first updates, until every expected parameter has had a gradient.

    In every update, ranks agree on the parameters with a gradient, so that no value is read. The
    ranks exchange names once a fit, if modules expect gradients.
    """

    sentence = (
        "parameters of a module with `expects_gradients = True`, such as LoRA's, get no gradient "
        "in the first optimizer steps, and would be trained in vain"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._module = scope.module
        self._world = scope.context.axis("world")
        self._fit = fit
        expecting = [
            f"{path}." if path else ""
            for path, child in scope.module.named_modules()
            if getattr(child, "expects_gradients", False)
        ]
        self._is_over = not expecting  # modules are the same on all ranks
        self._seen: set[str] = set()
        self._expected = {
            name
            for name, parameter in scope.module.named_parameters()
            if parameter.requires_grad and name.startswith(tuple(expecting))
        }
        self._num_updates = 0

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a module of a fit expects gradients."""
        modules = scope.module.modules()  # the same on all ranks
        return fit is not None and any(getattr(m, "expects_gradients", False) for m in modules)

    def before_update(self) -> bool:
        """Look for gradients of the update. Never a veto."""
        if self._fit is not None and not self._is_over and self._seen != self._expected:
            self._seen |= self._expected & self._fit.accumulation.reducer.gradients().keys()
        return True

    def after_update(self, *, stepped: bool) -> None:
        """Judge after the first updates. A collective of all ranks, once.

        Raises:
            ConfigError: On all ranks, with the names of the parameters without a gradient.
        """
        self._num_updates += stepped
        if self._num_updates == NUM_UPDATES * len(self._module.trainer.optimizers):
            self._judge()

    def end_training(self) -> None:
        """Judge after a shorter fit. A collective of all ranks.

        Raises:
            ConfigError: On all ranks, with the names of the parameters without a gradient.
        """
        if self._num_updates:
            self._judge()

    def _judge(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        mine = (self._expected & trained) - self._seen, self._seen
        ranks = self._world.all_gather_object(mine)
        # A rank without a shard of a parameter has no gradient, although other ranks have.
        names = set[str]().union(*(names for names, _ in ranks))
        names = names.difference(*(seen_names for _, seen_names in ranks))
        if not names:
            return
        listed = ", ".join(sorted(names)[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        self.judge.refuse(
            ConfigError(
                f"{len(names)} trained parameters had no gradient in the first {self._num_updates} "
                f"optimizer steps: {listed}{more}. Nothing that the loss depends on reads them: "
                "their layers are not called, something computes them otherwise, or a recomputed "
                "block has no input that requires a gradient. Call these layers in the step, or "
                "set requires_grad=False on parameters that are not to be trained."
            )
        )
