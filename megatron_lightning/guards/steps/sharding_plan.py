"""Detect errors of a sharding plan that leave all shapes right, in the first step.

Between tensor-parallel ranks these must be equal or must differ:

- The gradient of a replicated parameter is equal. If the parameter's module sees only a shard of
  the activations (of the sequence or the heads), the gradient differs, and the weights would
  silently diverge.
- The gradient of a parameter with gradients summed over the ranks differs. If every rank computes
  the same gradient, the sum is a multiple of the right gradient, and an adaptive optimizer hides
  the factor.
- The input of a layer that gathers sequence shards differs. If the input is the full sequence, the
  layer gathers copies of the sequence: the output is right while gradients are multiples.
- A zero gradient shows nothing. The gradient of a LoRA adapter's A is zero while B is zero. A zero
  gradient is compared again after 2, 4, 8, ... pipeline runs, until no longer zero.
- The output of the parallel module and the loss are equal, unless the plan says otherwise. Losses
  are compared again in the second batch, in the first of every epoch, and after a validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.compile import uncompiled
from megatron_lightning.assembly.part import Part
from megatron_lightning.errors import ShardingError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.watches.rank_sums import DIFFERENT, RankSums, Spread
from megatron_lightning.layers.linear.parallel_linear import ColumnParallelLinear
from megatron_lightning.layers.losses.lazy_logits import PendingLogits
from megatron_lightning.layers.losses.local_logits import are_local
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.sharding import ShardingPlan, gathered_input
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

_LOSS_DIFFERS: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Of a loss, relative to the norm. 2e-2 in lower precision. Losses of two shards of a sequence are
near each other."""

_LAST_RUN = 256
"""Pipeline run of the last comparison for gradients that were always zero."""


class _Key(NamedTuple):
    kind: str
    """``replicated`` or ``partial`` (gradients), ``input``, ``output`` or ``loss``."""
    name: str
    """Parameter or module."""


class ShardingPlanValues(Guard):
    """Compare gradients, inputs, outputs and losses between the tensor-parallel ranks, in the first
    finite pipeline run. Zero gradients and losses are compared again later.
    """

    sentence = (
        "the sharding plan, or the step, takes the shard of a rank for the full tensor: gradients, "
        "outputs or losses differ between tensor-parallel ranks, or are equal where parts should "
        "differ"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        module, part, context = scope.module, scope.part, scope.context
        self._num_batches = 0
        self._group: AxisGroup = context.tp
        self._plans = part.plans.applied
        self._kinds = {path: type(child).__name__ for path, child in module.named_modules()}
        self._sums = RankSums[_Key](context.tp, context.device)
        self._hooks: dict[_Key, torch.utils.hooks.RemovableHandle] = {}
        self._num_runs = 0  # since the first finite run
        self._loss_differs = DIFFERENT
        # Equal in the first run, so a later differing loss includes another term.
        self._was_right = False
        scope.undo.callback(self._detach)
        summed = self._watch_gradients(module, part)
        self._watch_inputs(module, {name.rpartition(".")[0] for name in summed})
        self._watch_outputs(module, part)

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a fit shards matrices."""
        return fit is not None and scope.context.tp.size > 1

    def begin_batch(self, batch: StepBatch) -> None:
        """Compare losses again after possible writes of hooks: a step may add a penalty on weights
        later. All ranks call this.
        """
        self._num_batches += batch.trains
        if batch.trains and (batch.compares or self._num_batches == 2):
            self._watch_loss()

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Add a loss of the step."""
        key = _Key("loss", "")
        if key in self._sums and isinstance(loss, Tensor):
            self._loss_differs = _LOSS_DIFFERS.get(loss.dtype, 2e-2)
            self._sums.add(key, loss)

    def _detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._sums.clear()

    # ---------------------------------------------------------------------------------------- watch

    def _watch_gradients(self, module: nn.Module, part: Part) -> list[str]:
        """Watch the gradients of parameters that every rank has in full. Return the names of
        parameters with gradients summed over the ranks.
        """
        axis, summed = self._group.name, []
        for name, parameter in module.named_parameters():
            spec = part.specs.get(name)
            if spec is None or axis not in spec.replica_axes:
                continue
            if parameter.requires_grad and parameter.numel():
                is_summed = axis in spec.partial_over
                if is_summed:
                    summed.append(name)
                key = self._key("partial" if is_summed else "replicated", name)
                self._hooks[key] = parameter.register_hook(partial(self._sums.add, key))  # type: ignore[no-untyped-call]
        return summed

    def _watch_inputs(self, module: nn.Module, owners: set[str]) -> None:
        """Watch the inputs of gathering layers, and whether modules with summed gradients see
        several tokens.
        """
        for path, child in uncompiled(module):
            gathered = _gathered(child)
            if gathered is None and path not in owners:
                continue
            argument, dim = gathered or ("", _plan_of(self._plans, path).sequence_dim)
            key = self._key("input" if gathered else "seen", path)
            hook = partial(self._add_input, key, argument, dim)
            self._hooks[key] = child.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _watch_outputs(self, module: nn.Module, part: Part) -> None:
        """Watch the outputs of the parallel modules, read by all of a step."""
        for path, plan in self._plans.items():
            if not plan.shards_output:
                root = path or (part.path if part.path is not None else _root_of(module, plan))
                key = self._key("output", root)
                hook = partial(self._add_output, key)
                self._hooks[key] = module.get_submodule(root).register_forward_hook(hook)
        if not any(plan.shards_output for plan in self._plans.values()):
            self._key("loss", "")

    def _watch_loss(self) -> None:
        """Compare the losses of the next pipeline run, if the first run's losses were compared."""
        is_whole = not any(plan.shards_output for plan in self._plans.values())
        if self._is_quiet and is_whole:
            self._key("loss", "")

    def _key(self, kind: str, name: str) -> _Key:
        key = _Key(kind, name)
        self._sums.watch(key)
        return key

    # ------------------------------------------------------------------------------------------ add

    def _add_input(  # noqa: PLR0917 (a hook)
        self,
        key: _Key,
        argument: str,
        dim: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        value = args[0] if args else kwargs.get(argument, next(iter(kwargs.values()), None))
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.is_floating_point():
            self._sums.add(key, value, dim)

    def _add_output(self, key: _Key, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() or are_local(module):  # asked for as shards
            return
        values = list(output.values()) if isinstance(output, Mapping) else output
        for given in values if isinstance(values, tuple | list) else [values]:
            # Equal losses have equal logits.
            value = given.pending.computed if isinstance(given, PendingLogits) else given
            if isinstance(value, Tensor) and value.is_floating_point():
                self._sums.add(key, value)

    # -------------------------------------------------------------------------------------- compare

    def after_backward(self) -> None:
        """Compare a pipeline run after the backward passes. A collective of the tensor-parallel
        ranks.

        Raises:
            ShardingError: On all ranks, naming tensors that wrongly differ or are wrongly equal.
        """
        self._num_runs += self._was_right
        if self._is_quiet and self._num_runs & (self._num_runs - 1):
            return
        spreads = self._sums.spreads()
        if spreads is None:
            return
        with self.judge.judging():
            self._check(spreads)
        self._was_right = True
        self._keep_hidden(spreads)

    @property
    def _is_quiet(self) -> bool:
        """Whether only gradients that have been zero are watched."""
        return self._was_right and _Key("loss", "") not in self._sums

    def _keep_hidden(self, spreads: Mapping[_Key, Spread]) -> None:
        """Watch only gradients that were zero again, and the inputs of the gradients' modules."""
        hidden = {
            key.name
            for key, spread in spreads.items()
            if key.kind in ("replicated", "partial") and spread.norm == 0
        }
        if self._num_runs >= _LAST_RUN:
            hidden.clear()
        owners = {name.rpartition(".")[0] for name in hidden}
        for key in list(self._sums):
            if key.name in (owners if key.kind in ("seen", "input") else hidden):
                self._sums.watch(key)
                continue
            self._sums.forget(key)
            if key in self._hooks:
                self._hooks.pop(key).remove()

    def _check(self, spreads: Mapping[_Key, Spread]) -> None:
        """Check the differences between the ranks.

        Raises:
            ShardingError: Naming tensors that wrongly differ or are wrongly equal.
        """
        # Ranks with different inputs have different partial gradients. Equal gradients were summed
        # already.
        views = {
            key.name: spread.varies
            for key, spread in spreads.items()
            if key.kind in ("seen", "input")
        }

        def names(kind: str, is_wrong: Callable[[_Key, Spread], bool]) -> list[str]:
            return [
                k.name for k, spread in spreads.items() if k.kind == kind and is_wrong(k, spread)
            ]

        def is_summed(key: _Key, spread: Spread) -> bool:
            return spread.is_equal and views.get(key.name.rpartition(".")[0], False)

        def differs(key: _Key, spread: Spread) -> bool:
            tolerance = self._loss_differs if key.kind == "loss" else DIFFERENT
            return spread.difference > tolerance * spread.norm

        # Zero outputs (a zero-initialized head) are equal on all ranks and prove nothing.
        has_output = self._was_right or any(
            key.kind == "output" and s.norm > 0 for key, s in spreads.items()
        )
        ranks = f"the tensor-parallel ranks {list(self._group.ranks)}"
        # Causes before effects: a wrong input also makes gradients and the output wrong.
        for findings, describe in (
            (names("input", lambda _, spread: spread.is_equal and spread.varies), _copied),
            (names("partial", is_summed), _summed),
            (names("replicated", differs), _replicated),
            (names("output", differs), _sharded),
            (names("loss", differs), _beside_output if has_output else _losses),
        ):
            if findings:
                listed = ", ".join(self._described(name) for name in findings[:5])
                raise ShardingError(describe(ranks, self._group.size, len(findings), listed))

    def _described(self, name: str) -> str:
        return f"{name} ({self._kinds[name]})" if self._kinds.get(name) and name else name


def _gathered(module: nn.Module) -> tuple[str, int] | None:
    """Return (argument, dim) of the input of ``module`` with sequence shards to gather. None:
    ``module`` gathers no shards.
    """
    if isinstance(module, ColumnParallelLinear):
        return ("", module.sequence_dim) if module.sequence_parallel else None
    return gathered_input(module)


def _plan_of(plans: Mapping[str, ShardingPlan], path: str) -> ShardingPlan:
    """Return the plan of the module at ``path``: the plan of the nearest parent."""
    owners = [owner for owner in plans if not owner or f"{path}.".startswith(f"{owner}.")]
    return plans[max(owners, key=len)] if owners else ShardingPlan(modules={})


def _root_of(module: nn.Module, plan: ShardingPlan) -> str:
    """Return the path of the smallest called module around all modules that ``plan`` matches.
    Return "" for ``module`` itself.
    """
    matched = [path.split(".") for path, _ in module.named_modules() if plan.style_of(path)]
    if not matched:
        return ""
    num_shared = 0
    shortest = min(map(len, matched)) - 1  # a matched module itself may return shards
    while num_shared < shortest and len({tuple(path[: num_shared + 1]) for path in matched}) == 1:
        num_shared += 1
    root = matched[0][:num_shared]
    while isinstance(module.get_submodule(".".join(root)), nn.ModuleList | nn.ModuleDict):
        root = root[:-1]
    return ".".join(root)


def _copied(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"with sequence parallel on, {count} module(s) gather shards of the sequence, and {ranks} "
        f"all give the same tensor: {listed}. The input is the full sequence, which would be used "
        f"{size} times, with gradients {size} times too large. Add a row that shards the sequence "
        "before it: ShardSequence() for the first module that sees shards, or VocabParallel() for "
        "the embedding, or set sequence_parallel=False."
    )


def _summed(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"the gradients of {count} parameter(s) are equal on {ranks}, and the sharding plan has "
        f"them summed over these ranks, which makes them {size} times too large: {listed}. Their "
        "modules see the full activations. Remove their rows (SequenceParallel() is for modules "
        "whose input is a shard of the sequence, HeadParallel() of the heads), or add the rows "
        "that shard these activations, ShardSequence() for the sequence, or set "
        "sequence_parallel=False."
    )


def _replicated(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"the gradients of {count} parameter(s) differ between {ranks}, and the sharding plan "
        f"replicates these parameters, which would diverge: {listed}. Their modules see a part of "
        "the activations. Give each a style: SequenceParallel() where the input is a shard of the "
        "sequence or of the heads, else how the module is split."
    )


def _sharded(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"the output of {listed} differs between {ranks}: each returns a shard of it (of the "
        "sequence, with sequence parallel on, or of the features), and the step takes it for the "
        "full output. Let the last row return all of it, such as VocabParallel(gather_output=True) "
        "or ColumnParallel(gather_output=True), or set sequence_parallel=False. If the step "
        "expects shards, set ShardingPlan(shards_output=True)."
    )


def _losses(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"the loss of the step differs between {ranks}, which compute the same samples: it is "
        "computed from a shard of the activations (of the sequence, with sequence parallel on, or "
        "of the features). Let the last row of the sharding plan return the full output, such as "
        "ColumnParallel(gather_output=True), or set sequence_parallel=False. If each rank's loss "
        "is a part on purpose, set ShardingPlan(shards_output=True)."
    )


def _beside_output(ranks: str, size: int, count: int, listed: str) -> str:
    return (
        f"the loss of the step differs between {ranks}, and the output of the model does not: the "
        "step computes with something else of which each rank holds a shard. A norm of "
        "parameters() counts this rank's shards only: set weight_decay of the optimizer for a "
        "penalty (for SGD twice the factor of the sum of squares). For activations that modules "
        "leave beside their output, return them from the model, or let their rows of the sharding "
        "plan return the full tensor, such as ColumnParallel(gather_output=True)."
    )
