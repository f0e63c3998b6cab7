"""Detect the first infinity or NaN of a step, before a reduction spreads the value to all ranks.

The largest absolute value of every stage output, every loss and the gradient of each parameter in
each micro-batch is recorded on the device. All values are checked once a pipeline run, by a single
synchronization and a small collective of all ranks. The first finding in the order of computation
is reported, because later findings mostly follow from the first. The order is: early micro-batches
before late micro-batches, forward before backward, forward from the first stage on, backward from
the last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.compat import run_behind
from megatron_lightning.config import NonFinite
from megatron_lightning.errors import NonFiniteError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.origin import is_library
from megatron_lightning.pipeline.schedules.actions import Action


class _Finding(NamedTuple):
    """A tensor with an infinity or NaN. Findings sort by the order of computation."""

    microbatch: int
    backward: bool
    depth: int
    """Stages since the start of the forward, or of the backward."""
    order: int
    """Number of tensors recorded before."""
    rank: int
    stage: int
    what: str


class FiniteWatch:
    """Watch the steps of one rank."""

    def __init__(self, context: ParallelContext, num_stages: int, *, policy: NonFinite) -> None:
        self._context = context
        self._num_stages = num_stages
        self._policy = policy
        self._place = (0, 0)  # stage and micro-batch under computation
        self._seen: list[tuple[_Finding, Tensor]] = []
        # By id of the parameter, which is kept, so that no other object gets the id.
        self._hooks: dict[int, tuple[Tensor, torch.utils.hooks.RemovableHandle]] = {}

    def attach(self, parameters: Mapping[str, Tensor], when: Callable[[], bool]) -> None:
        """Record every gradient of these parameters while ``when()`` holds. Parameters watched
        already stay watched.
        """
        for name, parameter in parameters.items():
            is_new = id(parameter) not in self._hooks
            if is_new and parameter.requires_grad and parameter.numel():
                # On the accumulated gradient, as hooks of the user's may change it up to then.
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._gradient, name, when)
                )
                self._hooks[id(parameter)] = parameter, hook

    def detach(self) -> None:
        """Remove the hooks."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def follow_hooks(self) -> None:
        """Look at gradients behind the user's hooks, which may be new."""
        for parameter, hook in self._hooks.values():
            run_behind(parameter, hook, lambda other: not is_library(other))

    def begin(self, action: Action) -> None:
        """Record the action begun by a pipeline."""
        self._place = (action.stage, action.microbatch)

    def end(self, action: Action, outputs: tuple[Tensor, ...] | Tensor | None) -> None:
        """Record the outputs of a stage, or the loss of a micro-batch."""
        if isinstance(outputs, Tensor):
            self.loss(outputs)
        for tensor in outputs if isinstance(outputs, tuple) else ():
            self._output(tensor, f"the output of stage {action.stage}")

    def loss(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch."""
        self._output(loss, "the loss")

    def _output(self, tensor: Tensor, what: str) -> None:
        stage, microbatch = self._place
        if tensor.is_floating_point() and tensor.numel():
            finding = _Finding(
                microbatch, False, stage, len(self._seen), self._context.rank, stage, what
            )
            self._seen.append((finding, _largest(tensor)))

    def _gradient(self, name: str, when: Callable[[], bool], parameter: Tensor) -> None:
        if parameter.grad is None or not when():
            return
        stage, microbatch = self._place
        depth, rank = self._num_stages - stage, self._context.rank
        finding = _Finding(
            microbatch, True, depth, len(self._seen), rank, stage, f"the gradient of {name}"
        )
        self._seen.append((finding, _largest(parameter.grad)))

    def check(self, step: int) -> bool:
        """Return whether any rank found an infinity or NaN in this pipeline run. A collective."""
        flags, self._seen = self._seen, []
        bad: list[_Finding] = []
        if flags:
            finite = torch.stack([value for _, value in flags]).isfinite().tolist()
            bad = [finding for (finding, _), good in zip(flags, finite, strict=True) if not good]
        findings = self._shared(min(bad, default=None))
        if not findings:
            return False
        message = self._message(min(findings), {finding.rank for finding in findings}, step)
        if self._policy == "raise":
            raise NonFiniteError(
                f'{message} Look at the batch and at the learning rate; non_finite="skip" leaves '
                "such steps out."
            )
        if self._context.rank == 0:
            warnings.warn(f"{message} The optimizer step is skipped.", stacklevel=2)
        return True

    def _shared(self, mine: _Finding | None) -> list[_Finding]:
        """Return the first finding of every rank with findings. Without findings the ranks exchange
        a single number.
        """
        world = self._context.axis("world")
        if world.process_group is None:
            return [] if mine is None else [mine]
        is_found = torch.tensor(float(mine is not None), device=self._context.device)
        dist.all_reduce(is_found, dist.ReduceOp.MAX, group=world.process_group)
        if not is_found.item():
            return []
        return [finding for finding in world.all_gather_object(mine) if finding is not None]

    def _message(self, first: _Finding, ranks: set[int], step: int) -> str:
        grid = self._context.grid
        coordinates = ", ".join(
            f"{axis} {grid.coordinate(first.rank, axis)}" for axis in ("dp", "pp", "tp")
        )
        more = (
            f" It is seen on ranks {', '.join(map(str, sorted(ranks)))}." if len(ranks) > 1 else ""
        )
        return (
            f"optimizer step {step}: {first.what} is infinite or NaN in micro-batch "
            f"{first.microbatch} on rank {first.rank} ({coordinates}, stage {first.stage}).{more}"
        )


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, not finite if any element is not."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf"), dtype=dtype).to(
        torch.float64
    )
    return largest
