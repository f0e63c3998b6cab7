"""Record what modules of this rank receive and return in the forwards of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Recorder:
    """Hooks on modules, for the duration of a step.

    Args:
        modules: Modules by name.
        kinds: ``inputs``, ``outputs``, or both.
    """

    def __init__(self, modules: Mapping[str, nn.Module], kinds: Collection[str]) -> None:
        self._hooks = ExitStack()
        self.calls: dict[tuple[str, str], list[list[Tensor]]] = defaultdict(list)
        """(kind, module) -> tensors of every call, in order."""
        for name, module in modules.items():
            if "inputs" in kinds:
                before = partial(_before, self.calls["inputs", name], module)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                self._hooks.callback(handle.remove)
            if "outputs" in kinds:
                after = partial(_after, self.calls["outputs", name], module)
                self._hooks.callback(module.register_forward_hook(after).remove)

    def close(self) -> None:
        """Take the hooks away."""
        self._hooks.close()


# The package's own hooks run where a unit runs, and not again on stages that pass its output on.


def _before(
    calls: list[list[Tensor]], recorded: nn.Module, module: nn.Module, args: Any, kwargs: Any
) -> None:
    if module is recorded:  # no copy, of which the strategy learns the model's structure
        _record(calls, (args, kwargs))


def _after(
    calls: list[list[Tensor]], recorded: nn.Module, module: nn.Module, args: Any, output: Any
) -> None:
    if module is recorded:
        _record(calls, output)


def _record(calls: list[list[Tensor]], values: Any) -> None:
    # A recomputation in backward, or a repetition of the strategy that looks for NaN.
    if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
        return
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    calls.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])
