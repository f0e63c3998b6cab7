"""The gradient reduction of one optimizer step: overlapped with backward, summed over every axis that needs it.

Order of one step, as the strategy drives it (contracts of Megatron-Core's ``finalize_model_grads``, with all partial sums
before the data-parallel reduction, so that the reduction of one bucket happens once):

    start_window()                     buffers are zero, p.grad are views of them
    backward of every micro-batch      autograd adds into the views; ``sync`` is set for the last one of each model part
    hide() … expose()                  p.grad are out of the way while Lightning calls ``zero_grad``
    finish(scale)                      what is left is launched, awaited and scaled

Parameters that need neither a reduction nor an fp32 gradient keep the plain gradients of autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.compat import reduce_scatter
from megatron_lightning.errors import PipelineError, ShardingError
from megatron_lightning.optim.buckets import Bucket, Fragment, build_buckets
from megatron_lightning.parallel.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sharding import ShardSpec


class GradientReducer:
    """Reduces the gradients of one rank's parameters.

    Args:
        parameters: Name -> trainable local parameter, in registration order (equal on all ranks of a data group).
        specs: Name -> shard spec; further names are ignored.
        context: The groups of this rank. With a pipeline, construction is a collective of the pipeline group.
        sharded: Keep only this rank's shard of the reduced gradients (ZeRO-1); False: all of them on every rank.
        bucket_size: Elements at which a bucket closes; None: max(40e6, 1e6 per data-parallel rank).

    Raises:
        ShardingError: If a tied parameter lies on a pipeline rank outside the embedding group.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        *,
        sharded: bool,
        bucket_size: int | None = None,
    ) -> None:
        self.parameters, self.specs, self.context = dict(parameters), dict(specs), context
        self.sync = False
        """Whether the gradients that arrive now are their parameters' last ones of this step."""
        self.bytes_communicated: Counter[str] = Counter()
        """Size of the buffers given to each collective so far, by its name."""
        tied = _tied_names(self.parameters, specs, context)
        self.buckets = build_buckets(parameters, specs, context, sharded=sharded, tied=tied, bucket_size=bucket_size)
        self.fragments: dict[str, Fragment] = {}
        """Name -> this rank's part of a bucketed parameter; the optimizer may set another ``target``."""
        for bucket in self.buckets:
            self.fragments.update(bucket.fragments())
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._native = [parameter for name, parameter in self.parameters.items() if name not in self.bucket_of]
        self._hidden: list[Tensor | None] = []
        self._overlapped = [bucket for bucket in self.buckets if not bucket.sum_groups]
        self._num_launched = 0
        self._unused: set[str] = set()
        self._finished = False
        self._flags = self._allocate_flags()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._accumulated, bucket, index)
            )
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def detach(self) -> None:
        """Let go of the parameters, gradients included; the reducer is not used afterwards."""
        for hook in self._hooks:
            hook.remove()
        for name in self.bucket_of:
            self.parameters[name].grad = None

    def start_window(self) -> None:
        """Begin the accumulation of one optimizer step: every gradient is zero."""
        for bucket in self.buckets:
            bucket.reset()
        for fragment in self.fragments.values():
            fragment.target.grad = None
        for parameter in self._native:
            parameter.grad = None
        self._hidden, self._num_launched, self._finished = [], 0, False
        self._unused.clear()
        self.expose()

    def hide(self) -> None:
        """Take the gradients off the parameters, where ``zero_grad`` would destroy them; :meth:`expose` brings them back."""
        self._hidden = self._hidden or [parameter.grad for parameter in self._native]
        for parameter in self.parameters.values():
            parameter.grad = None

    def expose(self) -> None:
        """Let every ``p.grad`` be the gradient that is accumulated (before :meth:`finish`) or reduced (after it)."""
        for parameter, gradient in zip(self._native, self._hidden, strict=False):
            parameter.grad = gradient
        self._hidden = []
        for bucket in self.buckets:
            for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
                gone = self._finished and (bucket.sharded or name in self._unused)
                parameter.grad = None if gone else view

    def launch(self) -> None:
        """Launch the reductions that no hook has launched, such as those of buckets with unused parameters.

        To be called before any other collective of the data group, which ranks that used other parameters would otherwise
        meet in another order.
        """
        self._launch_in_order(everything=True)

    def finish(self, scale: float | Tensor = 1.0) -> None:
        """Complete the reduction and multiply the gradients by ``scale``.

        Afterwards ``p.grad`` is the full reduced gradient, or None where it is sharded; the optimizer's parameters have
        theirs. A parameter that no rank used has None, so that optimizers skip it as they do on one device.

        Raises:
            PipelineError: If the window was finished before.
        """
        if self._finished and self.buckets:
            raise PipelineError("finish() was called twice; the gradients are reduced already. Call start_window() first.")
        self.launch()
        for bucket in self.buckets:
            for group in bucket.sum_groups:
                self._all_reduce(bucket.gradient, group)
            if bucket.sum_groups:
                self._reduce(bucket)
        self._unused = self._agree_on_unused()
        for bucket in self.buckets:
            for work in bucket.works:
                work.wait()
            bucket.works.clear()
        if isinstance(scale, Tensor) or scale != 1.0:
            own = [bucket.gradient[bucket.shard] for bucket in self.buckets]
            gradients = [*own, *(parameter.grad for parameter in self._native if parameter.grad is not None)]
            if gradients:
                torch._foreach_mul_(gradients, scale)
        self._finished = True
        self.expose()
        for name, fragment in self.fragments.items():
            fragment.target.grad = None if name in self._unused else fragment.gradient

    def gradients(self) -> dict[str, Tensor]:
        """Return what the optimizers will read, by parameter name in registration order; unused parameters are absent.

        With sharded gradients an entry is this rank's part, 1-D unless it is the whole parameter.
        """
        targets = {
            name: self.fragments[name].target if name in self.fragments else parameter
            for name, parameter in self.parameters.items()
            if name in self.fragments or name not in self.bucket_of
        }
        return {name: target.grad for name, target in targets.items() if target.grad is not None}

    def _accumulated(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if bucket.launched:
            raise PipelineError(
                f"{bucket.names[index]} received a gradient after the reduction of its bucket had started, so it would be "
                "lost. Set sync only for the last backward that reaches a parameter in an optimizer step."
            )
        view = bucket.views[index]
        if parameter.grad is not None and parameter.grad is not view:  # p.grad was cleared, and autograd made a new one
            view.add_(parameter.grad)
            parameter.grad = view
        bucket.touched[index] = True
        if self.sync:
            bucket.ready.add(index)
            if len(bucket.ready) == len(bucket.names):
                self._launch_in_order()

    def _launch_in_order(self, *, everything: bool = False) -> None:
        """Launch the reductions of complete buckets; never out of order, for the collectives of all ranks must match."""
        while self._num_launched < len(self._overlapped):
            bucket = self._overlapped[self._num_launched]
            if not everything and len(bucket.ready) < len(bucket.names):
                return
            self._reduce(bucket)
            self._num_launched += 1

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launched = True
        group = bucket.data_group
        if group.process_group is None:
            return
        if bucket.sharded:
            self.bytes_communicated["reduce_scatter"] += bucket.gradient.nbytes
            own = bucket.gradient[bucket.shard]
            work = reduce_scatter(own, bucket.gradient, group.process_group, async_op=True)
        else:
            self.bytes_communicated["all_reduce"] += bucket.gradient.nbytes
            work = dist.all_reduce(bucket.gradient, group=group.process_group, async_op=True)
        if work is not None:
            bucket.works.append(work)

    def _all_reduce(self, tensor: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self.bytes_communicated["all_reduce"] += tensor.nbytes
        dist.all_reduce(tensor, op, group=group.process_group)

    def _allocate_flags(self) -> dict[AxisGroup, Tensor]:
        """One byte for each bucketed parameter of a data group."""
        sizes: Counter[AxisGroup] = Counter()
        for bucket in self.buckets:
            sizes[bucket.data_group] += len(bucket.names)
        device = self.context.device
        return {group: torch.zeros(size, dtype=torch.uint8, device=device) for group, size in sizes.items()}

    def _agree_on_unused(self) -> set[str]:
        """Return the names of the parameters that no rank used in this window."""
        unused: set[str] = set()
        for group, flags in self._flags.items():
            buckets = [bucket for bucket in self.buckets if bucket.data_group is group]
            touched = [used for bucket in buckets for used in bucket.touched]
            if all(touched):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(touched, dtype=torch.uint8))
            first = 0
            for bucket in buckets:
                for sum_group in bucket.sum_groups:
                    self._all_reduce(flags[first : first + len(bucket.names)], sum_group, dist.ReduceOp.MAX)
                first += len(bucket.names)
            if group.size > 1:
                self._all_reduce(flags, group, dist.ReduceOp.MAX)
            if not all(touched):  # reading the flags waits for the device; only a rank that lacks a gradient needs to
                names = [name for bucket in buckets for name in bucket.names]
                unused.update(name for name, used in zip(names, flags.tolist(), strict=True) if not used)
        return unused


def _tied_names(
    parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec], context: ParallelContext
) -> frozenset[str]:
    """Return the local parameters that have a copy, or are one, on another pipeline rank."""
    if context.pp.size == 1:
        return frozenset()
    mine = {name: specs[name].tied_to or name for name in parameters}
    copied: list[set[str]] = [set()] * context.pp.size
    own = {owner for name, owner in mine.items() if specs[name].tied_to is not None}
    dist.all_gather_object(copied, own, group=context.pp.process_group)
    tied = frozenset(name for name, owner in mine.items() if owner in set().union(*copied))
    if tied and context.axis("embedding").rank < 0:
        raise ShardingError(
            f"{min(tied)} is tied to a parameter of another pipeline rank, and pipeline rank {context.pp.rank} is not in the "
            "embedding group. Only the first and the last pipeline rank may hold tied parameters."
        )
    return tied
