"""Infinities and NaN: found where they arise, before a reduction has spread them to all ranks.

Every stage output, every loss and the gradient that each micro-batch gives each parameter leaves one number on the device, its
largest absolute value. They are looked at once a flush: one synchronisation, and one small collective of all ranks. Of what
is found the first in the order of computation is reported: an early micro-batch before a late one, forward before backward,
forward from the first stage on and backward from the last; what comes after it is mostly its consequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.config import NonFinite
from megatron_lightning.errors import NonFiniteError
from megatron_lightning.parallel.context import ParallelContext

Place = tuple[int, int]
"""Stage and micro-batch."""


class _Finding(NamedTuple):
    """Something that is not finite; the least is the first in the order of computation."""

    microbatch: int
    backward: bool
    depth: int
    """Stages since the beginning of the forward, or of the backward."""
    order: int
    """How much the stage had computed before."""
    rank: int
    stage: int
    what: str


class FiniteWatch:
    """Watches the steps of one rank.

    Args:
        context: The groups of this rank.
        num_stages: Stages of the pipeline.
        policy: Whether a finding is an error or leaves the step out.
        place: Returns the stage and the micro-batch that are computed now.
    """

    def __init__(self, context: ParallelContext, num_stages: int, *, policy: NonFinite, place: Callable[[], Place]) -> None:
        self._context, self._num_stages, self._policy, self._place = context, num_stages, policy, place
        self._seen: list[tuple[_Finding, Tensor]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, parameters: Mapping[str, Tensor], when: Callable[[], bool]) -> None:
        """Look at every gradient that these parameters receive while ``when()`` holds."""
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.numel():
                hook = parameter.register_hook(partial(self._gradient, name, when))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def detach(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forward(self, output: Tensor | tuple[Tensor, ...] | None, *, is_loss: bool) -> None:
        """Look at what a stage hands on, or at the loss of a micro-batch."""
        tensors = output if isinstance(output, tuple) else () if output is None else (output,)
        stage, microbatch = self._place()
        what = "the loss" if is_loss else f"the output of stage {stage}"
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                finding = _Finding(microbatch, False, stage, len(self._seen), self._context.rank, stage, what)
                self._seen.append((finding, _largest(tensor)))

    def _gradient(self, name: str, when: Callable[[], bool], gradient: Tensor) -> None:
        if not when():
            return
        stage, microbatch = self._place()
        depth, rank = self._num_stages - stage, self._context.rank
        finding = _Finding(microbatch, True, depth, len(self._seen), rank, stage, f"the gradient of {name}")
        self._seen.append((finding, _largest(gradient)))

    def settle(self, step: int) -> bool:
        """Return whether any rank found something in this flush; all ranks call this together.

        Raises:
            NonFiniteError: On every rank, if that is the policy.
        """
        seen, self._seen = self._seen, []
        bad: list[_Finding] = []
        if seen:
            finite = torch.stack([value for _, value in seen]).isfinite().tolist()
            bad = [finding for (finding, _), good in zip(seen, finite, strict=True) if not good]
        findings = self._shared(min(bad, default=None))
        if not findings:
            return False
        message = self._message(min(findings), {finding.rank for finding in findings}, step)
        if self._policy == "raise":
            raise NonFiniteError(
                f'{message} Look at the batch and at the learning rate; non_finite="skip" leaves such steps out.'
            )
        if self._context.rank == 0:
            warnings.warn(f"{message} The optimizer step is skipped.", stacklevel=2)
        return True

    def _shared(self, mine: _Finding | None) -> list[_Finding]:
        """Return the first finding of every rank that has one; only then is more exchanged than one number."""
        world = self._context.axis("world")
        if world.process_group is None:
            return [] if mine is None else [mine]
        found = torch.tensor(float(mine is not None), device=self._context.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=world.process_group)
        if not found.item():
            return []
        return [finding for finding in world.all_gather_object(mine) if finding is not None]

    def _message(self, first: _Finding, ranks: set[int], step: int) -> str:
        grid = self._context.grid
        coordinates = ", ".join(f"{axis} {grid.coordinate(first.rank, axis)}" for axis in ("dp", "pp", "tp"))
        others = f" It is seen on ranks {', '.join(map(str, sorted(ranks)))}." if len(ranks) > 1 else ""
        return (
            f"optimizer step {step}: {first.what} is infinite or NaN in micro-batch {first.microbatch} on rank {first.rank} "
            f"({coordinates}, stage {first.stage}).{others}"
        )


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value; it is not finite if any element is not."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf"), dtype=wide).to(torch.float64)
    return largest
