"""Find user hooks that see a shard instead of the full tensor.

A layer refuses hooks registered before the layer becomes parallel
(``layers/linear/replaceable.py``). A hook may also come later, or sit on a module between two
parallel layers. Before the first batch of every epoch and every evaluation, the watch therefore
lists the modules with new hooks. After the batch the watch compares the modules' inputs, outputs
and gradients between the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lightning.assembly.compile import uncompiled
from megatron_lightning.errors import ShardingError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.guards.watches.rank_sums import DIFFERENT, RankSums
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.parallel.shards.parameters import check_gradient_hooks
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext

_GRADIENTS = ("gradient of its input", "gradient of its output")
# Attribute for the hooks of a module, and the tensors seen by the hooks after the module itself.
_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "register_forward_pre_hook": ("_forward_pre_hooks", ("input",)),
    "register_forward_hook": ("_forward_hooks", ("input", "output")),
    "register_full_backward_hook": ("_backward_hooks", _GRADIENTS),
    "register_full_backward_pre_hook": ("_backward_pre_hooks", _GRADIENTS[1:]),
}


class _Key(NamedTuple):
    path: str
    side: str
    """``input`` or ``output``, or a gradient of either."""


class ModuleHooks(Guard):
    """Compare the tensors seen by hooks between the tensor-parallel ranks, in the first batch after
    the registration of a hook.
    """

    sentence = "a hook of a module sees the shard of a rank where it expects the full tensor"

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        module, part, context = scope.module, scope.part, scope.context
        self._module = module
        self._sums = RankSums[_Key](context.tp, context.device)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._seen: set[int] = set()  # torch numbers the hooks of all modules
        self._numbers: dict[_Key, set[int]] = {}
        self._is_paused = False
        self._sharded = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if name in part.specs and part.specs[name].sharded_over
        ]

        scope.undo.callback(self._detach)

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether ranks share matrices."""
        return scope.context.tp.size > 1

    def begin_batch(self, batch: StepBatch) -> None:
        """List the modules with new hooks, to compare after the next step.

        Raises:
            ShardingError: If a sharded parameter has a gradient hook.
        """
        if not (batch.begins_loop or batch.compares):
            return
        for name, parameter in self._sharded:
            with self.judge.judging():
                check_gradient_hooks(name, parameter)
        self._detach()
        for path, module in uncompiled(self._module):
            for kind, (attribute, _) in _KINDS.items():
                hooks = getattr(module, attribute).items()
                new_hooks = {n for n, hook in hooks if n not in self._seen and not is_library(hook)}
                if new_hooks:
                    self._seen |= new_hooks
                    self._watch(path, module, kind, new_hooks)

    def _watch(self, path: str, module: Any, kind: str, numbers: set[int]) -> None:
        """Add the tensors seen by hooks of ``kind`` on ``module``, before the hooks run."""
        _, sides = _KINDS[kind]
        for side in sides:
            self._sums.watch(_Key(path, side))
            self._numbers.setdefault(_Key(path, side), set()).update(numbers)

        def add(_: nn.Module, *seen: Any) -> None:
            for side, values in zip(sides, seen, strict=True):
                self._add(_Key(path, side), values)

        def add_call(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            add(module, (args, kwargs), *output)

        is_forward = "forward" in kind
        options = {"with_kwargs": True} if is_forward else {}
        register = getattr(module, kind)
        self._handles.append(register(add_call if is_forward else add, prepend=True, **options))

    def _add(self, key: _Key, values: Any) -> None:
        for value in () if self._is_paused else tree_leaves(values):
            # No values in a run on fake tensors.
            if type(value) in {Tensor, nn.Parameter} and value.is_floating_point():
                self._sums.add(key, value)

    def rehearsed(self) -> AbstractContextManager[None]:
        """Do not record."""
        return self.repeated()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Do not record."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def after_backward(self) -> None:
        """Compare the records of training."""
        self._compare()

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Compare the records of an evaluation."""
        if not batch.trains:
            self._compare()

    def _compare(self) -> None:
        """Compare after the step. A collective of the tensor-parallel ranks if hooks are new.

        Raises:
            ShardingError: On all ranks, naming the module and the differing tensor.
        """
        spreads = self._sums.spreads()
        if spreads is None:
            return
        # Zeros are equal on all ranks: a layer of zeros is compared again when it has learned.
        for key, spread in spreads.items():
            self._seen -= self._numbers[key] if spread.norm == 0 else set()
        self._detach()
        for key, spread in spreads.items():
            if spread.difference > DIFFERENT * spread.norm:
                kind = type(self._module.get_submodule(key.path)).__name__
                self.judge.refuse(
                    ShardingError(
                        f"{key.path or 'the module'} ({kind}) has a hook, and the {key.side} "
                        "differs between the tensor-parallel ranks: the hook sees the shard of a "
                        "rank, where it expects the full tensor. Register the hook on a module "
                        "around it whose input and output are full, or leave these layers out of "
                        "the sharding plan."
                    )
                )

    def _detach(self) -> None:
        """Compare no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._numbers.clear()
        self._sums.clear()
