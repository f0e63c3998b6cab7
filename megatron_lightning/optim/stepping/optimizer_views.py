"""The optimizers of a fit, each as :class:`DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from megatron_lightning.optim.gradients.param_gather import ParameterGather
from megatron_lightning.optim.gradients.reducer import GradientReducer
from megatron_lightning.optim.optimizer_checks import check_owner_options
from megatron_lightning.optim.owners.traffic import Traffic
from megatron_lightning.optim.stepping.distributed import DistributedOptimizer
from megatron_lightning.optim.stepping.elementwise import Stepped, Trial, divide


class OptimizerViews:
    """Make the optimizers step the results of a reduction. Construction is a collective of all
    ranks.

    Args:
        optimizers: The user's optimizers. Others than torch's have no view.
        reducer: The reduction of the gradients.
        gather: Gathers the parameters after a step.
        names: Name -> parameter of the full module, frozen parameters included.
        passed: Trials of optimizers that need no repetition. New ones are added.
        is_stored: Whether parameters are stored as quantized data.

    Raises:
        ConfigError: If the ranks cannot divide an optimizer.
    """

    def __init__(
        self,
        optimizers: Sequence[object],
        reducer: GradientReducer,
        gather: ParameterGather,
        names: Mapping[str, nn.Parameter],
        passed: set[Trial],
        *,
        is_stored: bool,
    ) -> None:
        self._reducer = reducer
        self._names = names
        torchs = [each for each in optimizers if isinstance(each, Optimizer)]
        self.division = divide(
            [(optimizer, self._stepped(optimizer)) for optimizer in torchs],
            reducer.context,
            passed,
            whole_tensors=reducer.options.whole_tensors,
        )
        """How ranks divide the optimizers."""
        if self.division.whole:
            check_owner_options(self.division.whole, reducer.options, is_stored=is_stored)
        self.views = [
            DistributedOptimizer(optimizer, reducer, names, gather, self.division.owned)
            for optimizer in torchs
        ]
        """Torch's optimizers, stepping this rank's shards."""

    def view(self, optimizer: Optimizer, *, is_kept: bool) -> DistributedOptimizer:
        """Return an optimizer by global parameter name, for checkpoints.

        Args:
            optimizer: The optimizer.
            is_kept: Whether the optimizer's groups cannot have changed since construction.
        """
        for view in self.views:
            if is_kept and view.optimizer is optimizer:
                return view
        # Built again, since callbacks may have added parameter groups.
        owned = self.division.owned
        return DistributedOptimizer(optimizer, self._reducer, self._names, owned=owned)

    def stepped_by_others(self, optimizer: Optimizer) -> set[str]:
        """Return the names of parameters stepped only by other optimizers, on this rank or not."""
        mine, theirs = set[str](), set[str]()
        for view in self.views:
            (mine if view.optimizer is optimizer else theirs).update(view.names)
        return theirs - mine

    def owner_traffic(self) -> Traffic:
        """Return what owners exchange and keep in a step of this pipeline stage."""
        return Traffic.total(
            exchange.traffic() for view in self.views for exchange in view.exchanges
        )

    def _stepped(self, optimizer: Optimizer) -> list[Stepped]:
        """Return the optimizer's parameters with reduced gradients."""
        names = {id(parameter): name for name, parameter in self._reducer.parameters.items()}
        return [
            Stepped(id(group), self._reducer.specs[name], self._reducer.is_sharded(name))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (name := names.get(id(parameter))) is not None
        ]
