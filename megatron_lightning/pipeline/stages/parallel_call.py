"""Intercept the call of the parallel module in a step, on every layout.

Under a pipeline calls outside of steps are refused. ``crossing`` handles a call in a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from megatron_lightning.errors import PipelineError

Added = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Arguments of a call, by name -> arguments to add or to replace."""


class ParallelCall:
    """Forward pre-hook of the parallel module.

    In a step the hook adds the positions of this rank's part of the sequence, if ranks share
    sequences.

    Under a pipeline the hook stays after a run, since the module stays partitioned, and
    refuses calls outside of steps. The hook is plain data, so that the module can be copied and
    pickled.

    Args:
        num_ranks: Pipeline ranks that share the module's layers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open = False
        self._added: Added | None = None
        self.was_called = False
        """Whether the module was called inside of :meth:`adding`."""

    @classmethod
    def on(cls, module: nn.Module, num_ranks: int, undo: ExitStack) -> ParallelCall:
        """Return the hook of ``module``, new or from an earlier run. With a single stage ``undo``
        removes the hook.
        """
        call = next(
            (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, cls)), None
        )
        if call is None:
            call = cls(num_ranks)
            handle = module.register_forward_pre_hook(call, with_kwargs=True)
            if num_ranks == 1:
                undo.callback(handle.remove)
        return call

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step, where calls pass."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    @contextmanager
    def adding(self, added: Added) -> Iterator[None]:
        """Context with ``added`` asked for arguments to add to a call or to replace in a call."""
        self._added = added
        self.was_called = False
        try:
            yield
        finally:
            self._added = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse calls outside of steps on a rank with only a part of the layers.

        Returns:
            The arguments with additions. None: unchanged arguments.
        """
        if self._num_ranks > 1 and not self._open:
            raise PipelineError(
                f"{type(module).__name__} was called outside of a training, validation, test or "
                "predict step, and this rank holds only part of its layers (pipeline "
                f"{self._num_ranks}). Call it in a step: trainer.validate and trainer.predict run "
                "one. A checkpoint holds the full model: load_from_checkpoint reads a "
                "consolidated one."
            )
        self.was_called = True
        if self._added is None:
            return None
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        positional = dict(zip(names, args, strict=False))
        added = self._added(positional | kwargs)
        ours = [added.pop(name, value) for name, value in positional.items()]
        return (*ours, *args[len(ours) :]), kwargs | added


def find_parallel_module(root: nn.Module) -> nn.Module | None:
    """Return the first submodule of ``root`` that declares units or a sharding plan. None without
    such a submodule.
    """
    declaring = (
        child
        for child in root.modules()
        if hasattr(child, "pipeline_units") or hasattr(child, "sharding_plan")
    )
    return next(declaring, None)


@contextmanager
def replaced_attribute(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set the instance attribute ``owner.name`` to ``value`` inside the block, and restore the
    attribute afterwards.
    """
    attributes = vars(owner)
    original = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        if original is not None:
            attributes[name] = original
