"""The gradient reduction of an optimizer step: overlapped with backward, summed over every axis of
partial sums.

Order of a step, as in megatron/core/distributed/finalize_model_grads.py, but with all partial sums
before the data-parallel reduction, to reduce every bucket only once:

    begin_step()                       no parameter has a gradient
    backward of every micro-batch      the first gradient is copied into the buffer, p.grad becomes
                                       a view of it, and autograd adds the next ones to that;
                                       ``sync`` is set for the last one of each stage
    hide() … publish()                 p.grad are hidden while Lightning calls ``zero_grad``
    finish(scale)                      the remaining reductions are launched, awaited and scaled

Parameters without a reduction and without an fp32 gradient keep the plain gradients of autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.compat import run_last
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import PipelineError
from megatron_lightning.optim.gradients.bucket_plan import build_buckets
from megatron_lightning.optim.gradients.bucket_reduction import Reduction
from megatron_lightning.optim.gradients.buckets import Bucket
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.optim.gradients.parameter_shard import MainShard, ParameterShard
from megatron_lightning.optim.gradients.parameter_storage import (
    ParameterStorage,
    PlainUnits,
    StoredUnits,
)
from megatron_lightning.optim.gradients.usage import Beside, Usage, UsageAgreement
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec


class GradientReducer:
    """Reduce the gradients of this rank's parameters.

    Args:
        parameters: Name -> trainable local parameter, in registration order (equal on all ranks of
            a data group).
        specs: Name -> shard spec. Further names are ignored.
        context: The groups of this rank. With a pipeline, construction is a collective of the
            pipeline group.
        sharded: Keep only this rank's shard of the reduced gradients (ZeRO-1). False: all gradients
            on every rank.
        stage_of: Name -> pipeline stage completing the parameter's gradient. None: all together.
        options: Size and communication of the buckets.
        storage: Storage of the parameters in sharded buckets. None: as values.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        context: ParallelContext,
        *,
        sharded: bool,
        stage_of: Mapping[str, int] | None = None,
        options: DataParallelOptions | None = None,
        storage: ParameterStorage | None = None,
    ) -> None:
        self.options = options = options or DataParallelOptions()
        self.parameters = dict(parameters)
        self.specs = dict(specs)
        self.context = context
        self.sync = False
        """Whether gradients arriving now are the last of the step."""
        self.late: frozenset[str] = frozenset()
        """Parameters exempt from ``sync``, such as parameters shared by several stages of this
        rank."""
        self.bytes_communicated: Counter[str] = Counter()
        """Bytes given to each collective so far, by the collective's name."""
        tied = _tied_groups(self.parameters, specs, context)
        self.groups = DataGroups.by_axes(
            context, sharded=sharded, num_instances=options.num_distributed_optimizer_instances
        )
        """``ShardSpec.data_axes`` -> the ranks with replicas of such a parameter."""
        self.buckets = build_buckets(
            parameters,
            specs,
            context,
            groups=self.groups,
            tied=tied,
            stage_of=stage_of,
            bucket_size=options.bucket_size,
            storage=storage,
        )
        self.shards: dict[str, ParameterShard] = {}
        """Name -> this rank's shard of a bucketed parameter. The optimizer may replace
        ``target``."""
        for bucket in self.buckets:
            self.shards.update(bucket.shards())
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.absent: dict[str, nn.Parameter] = {
            name: nn.Parameter(bucket.gradient.new_empty(0))
            for name, bucket in self.bucket_of.items()
            if name not in self.shards
        }
        """Name of a parameter of which only other ranks have shards -> an empty tensor, with a
        gradient if the shards have one."""
        # Needs no reduction: autograd's own gradients serve.
        self._native = [
            parameter for name, parameter in self.parameters.items() if name not in self.bucket_of
        ]
        self._hidden: list[Tensor | None] = []
        # Buckets that are final with the last backward. Partial sums are added up after it.
        self._overlapped = [bucket for bucket in self.buckets if not bucket.sum_groups]
        self._num_launched = 0
        self._sent_as = torch.bfloat16 if options.grad_reduce_in_bf16 else None
        self._reductions: list[Reduction] = []
        self._unused: set[str] = set()
        self._finished = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._accumulated, bucket, index)
            )
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def _bucketed(self) -> Iterator[nn.Parameter]:
        return (parameter for bucket in self.buckets for parameter in bucket.parameters)

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks hold different shards of the gradients."""
        return any(groups.sharded for groups in self.groups.values())

    @property
    def exchanges(self) -> bool:
        """Whether optimizers step other tensors than the parameters, or gradients are reduced
        here.
        """
        return bool(self.buckets)

    @property
    def is_finished(self) -> bool:
        """Whether the gradients of the step are reduced."""
        return self._finished

    def is_plain(self, name: str) -> bool:
        """Return whether a parameter has the plain gradients of autograd."""
        return name not in self.bucket_of

    def is_sharded(self, name: str) -> bool:
        """Return whether data-parallel ranks step different shards of a parameter."""
        return name in self.bucket_of and self.bucket_of[name].sharded

    def frozen_shard(self, parameter: nn.Parameter) -> ParameterShard | None:
        """Return this rank's shard of a frozen parameter. None: this rank has no shard."""
        return ParameterShard.full(parameter)

    def detach(self) -> None:
        """Remove the hooks and drop all gradients. The reducer is not used afterwards."""
        for hook in self._hooks:
            hook.remove()
        for name in self.bucket_of:
            self.parameters[name].grad = None

    def adopt(self, gradients: Mapping[str, Tensor | None], *, accumulated: bool) -> None:
        """Take over the gradients of the previous reducer.

        Args:
            gradients: Name -> ``p.grad`` of the previous reducer's parameters.
            accumulated: Whether the gradients belong to a step in progress.
        """
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
            bucket = self.bucket_of.get(name)
            if accumulated and bucket is not None and gradient is not None:
                index = bucket.names.index(name)
                bucket.touched[index] = True
                self.parameters[name].grad = bucket.views[index].copy_(gradient)

    def begin_step(self) -> None:
        """Begin the accumulation of an optimizer step, without a gradient yet."""
        for reduction in self._reductions:  # of an abandoned step
            reduction.finish()
        self._reductions.clear()
        for bucket in self.buckets:
            bucket.reset()
        for shard in self.shards.values():
            shard.target.grad = None
        for empty in self.absent.values():
            empty.grad = None
        for parameter in self._native:
            parameter.grad = None
        self._hidden = []
        self._num_launched = 0
        self._finished = False
        self._unused.clear()
        for handle, parameter in zip(self._hooks, self._bucketed(), strict=True):
            run_last(parameter, handle)
        self.publish()

    @property
    def stored_units(self) -> StoredUnits:
        """Parameters of FSDP2's units."""
        return PlainUnits()

    def hide(self) -> None:
        """Clear ``p.grad``, to protect gradients from ``zero_grad``. :meth:`publish` restores
        ``p.grad``.
        """
        self._hidden = self._hidden or [parameter.grad for parameter in self._native]
        for parameter in self.parameters.values():
            parameter.grad = None

    def publish(self) -> None:
        """Set every ``p.grad`` to the accumulated gradient or, after :meth:`finish`, to the reduced
        gradient, if any.
        """
        for parameter, gradient in zip(self._native, self._hidden, strict=False):
            parameter.grad = gradient
        self._hidden = []
        for bucket in self.buckets:
            rows = zip(bucket.names, bucket.parameters, bucket.views, bucket.touched, strict=True)
            for name, parameter, view, touched in rows:
                is_published = (
                    not bucket.sharded and name not in self._unused if self._finished else touched
                )
                parameter.grad = view if is_published else None

    def complete(self, names: Iterable[str]) -> None:
        """Mark parameters as complete, and launch ready reductions."""
        for name in names:
            if name in self.bucket_of:
                bucket = self.bucket_of[name]
                bucket.ready.add(bucket.names.index(name))
        self._launch_in_order()

    def launch(self) -> None:
        """Launch the remaining reductions, for instance of buckets with unused parameters.

        Call this method before any other collective of the data group: otherwise the order of
        collectives would depend on the parameters used by a rank.
        """
        self._launch_in_order(everything=True)

    def finish(self, scale: float | Tensor = 1.0, beside: Beside | None = None) -> None:
        """Complete the reduction and multiply the gradients by ``scale``. ``beside`` is sent along
        with the flags of unused parameters.

        Afterwards ``p.grad`` is the full reduced gradient, or None if sharded. The optimizer's
        parameters carry the shards of gradients. A parameter unused on all ranks has None:
        optimizers skip the parameter as on one device.
        """
        if self._finished and self.buckets:
            raise PipelineError(
                "finish() was called twice; the gradients are reduced already. Call begin_step() "
                "first."
            )
        self.launch()
        for bucket in self.buckets:
            if bucket.sum_groups:
                bucket.complete()
                for group in bucket.sum_groups:
                    self.all_reduce(bucket.gradient, group)
                self._reduce(bucket)
        # The collective for the flags runs while gradients are still being reduced.
        self._unused = self._agreement.unused(self._usage(), beside)
        for reduction in self._reductions:
            reduction.finish()
        self._reductions.clear()
        if isinstance(scale, Tensor) or scale != 1.0:
            # One kernel for all gradients. Ranks scale only the shards that they will step.
            shards = [bucket.gradient[bucket.shard] for bucket in self.buckets]
            gradients = [
                *shards,
                *(parameter.grad for parameter in self._native if parameter.grad is not None),
            ]
            if gradients:
                torch._foreach_mul_(gradients, scale)
        self._finished = True
        self.publish()
        for name, shard in self.shards.items():
            shard.target.grad = None if name in self._unused else shard.gradient
        for name, empty in self.absent.items():
            empty.grad = None if name in self._unused else torch.empty_like(empty)

    def gradients(self) -> dict[str, Tensor]:
        """Return the optimizers' gradients by parameter name in registration order. Unused
        parameters are absent.

        With sharded gradients an entry is this rank's shard, 1-D unless full.
        """
        gradients_of_names = {name: gradient_of(target) for name, target in self.targets().items()}
        return {
            name: gradient for name, gradient in gradients_of_names.items() if gradient is not None
        }

    def targets(self) -> dict[str, nn.Parameter]:
        """Return the gradient-carrying tensor of each parameter of this rank, by name in
        registration order.
        """
        return {
            name: self.shards[name].target if name in self.shards else parameter
            for name, parameter in self.parameters.items()
            if name in self.shards or name not in self.bucket_of
        }

    def counted(
        self, gradients: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[Tensor, ShardSpec]]:
        """Yield the given gradients (None: all) with specs. If any are sharded, equal gradients of
        other replicas are left out.
        """
        for name, gradient in (self.gradients() if gradients is None else gradients).items():
            groups = self.groups[self.specs[name].data_axes]
            if not self.sharded or (groups.replicas if groups.sharded else groups.all).rank == 0:
                yield gradient, self.specs[name]

    def _accumulated(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if bucket.launched:
            raise PipelineError(
                f"{bucket.names[index]} received a gradient after the reduction of its bucket had "
                "started, so it would be lost. Set sync only for the last backward that reaches a "
                "parameter in an optimizer step; with manual optimization call "
                "self.manual_backward(loss), not loss.backward()."
            )
        if bucket.gathering is not None:
            raise PipelineError(
                f"{bucket.names[index]} was used while its new value was still on its way: no call "
                "of the module that owns it announced the use. Read a parameter only in the "
                "forward of its own module, or set overlap_param_gather=False."
            )
        view = bucket.views[index]
        # Autograd made a gradient of its own, as p.grad was None: it moves into the bucket, and
        # p.grad becomes the view that later micro-batches add to.
        if parameter.grad is not None and parameter.grad is not view:
            if bucket.touched[index]:  # p.grad was cleared in the middle of the step
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        bucket.touched[index] = True
        if self.sync and bucket.names[index] not in self.late:
            bucket.ready.add(index)
            if len(bucket.ready) == len(bucket.names):
                self._launch_in_order()

    def _launch_in_order(self, *, everything: bool = False) -> None:
        """Launch the reductions of complete buckets in order: the collectives of all ranks must
        match.
        """
        while self._num_launched < len(self._overlapped):
            bucket = self._overlapped[self._num_launched]
            if not everything and len(bucket.ready) < len(bucket.names):
                return
            bucket.complete()
            self._reduce(bucket)
            self._num_launched += 1

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launched = True
        if self._reductions:
            self._reductions[-1].reduce_replicas()
        self._reductions.append(
            Reduction(bucket.gradient, bucket.data, self._sent_as, self.bytes_communicated)
        )

    def main_shards(self) -> dict[str, MainShard]:
        """Return the main params of parameters stored as quantized data, by name."""
        return {
            name: MainShard(self.shards.get(name), bucket.stored.main.dtype, bucket.data)
            for bucket in self.buckets
            if bucket.stored is not None and bucket.stored.is_quantized
            for name in bucket.names
        }

    def all_reduce(
        self, tensor: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce in place over the ranks of a group, and count the bytes."""
        self.bytes_communicated["all_reduce"] += tensor.nbytes
        dist.all_reduce(tensor, op, group=group.process_group)

    def _usage(self) -> list[Usage]:
        """Return the parameters and whether each received a gradient in this step."""
        return [
            Usage(bucket.names, bucket.touched, bucket.sum_groups, bucket.data.all)
            for bucket in self.buckets
        ]

    @cached_property
    def _agreement(self) -> UsageAgreement:
        return UsageAgreement(self._usage(), self.context.device, self.all_reduce)


def _tied_groups(
    parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec], context: ParallelContext
) -> dict[str, AxisGroup]:
    """Return the ranks with copies of a tied parameter, by name of this rank's copy or owner. All
    ranks call this.
    """
    if context.pp.size == 1:
        return {}
    mine = {name: specs[name].tied_to or name for name in parameters}
    copies = {owner for name, owner in mine.items() if specs[name].tied_to is not None}
    names_of_ranks = context.pp.all_gather_object((set(mine.values()), copies))
    ranks_of = {
        owner: tuple(
            rank
            for rank, (has, _) in zip(context.pp.ranks, names_of_ranks, strict=True)
            if owner in has
        )
        for owner in set[str]().union(*(copies for _, copies in names_of_ranks))
    }
    groups = {ranks: context.holders(ranks) for ranks in sorted(set(ranks_of.values()))}
    return {name: groups[ranks_of[owner]] for name, owner in mine.items() if owner in ranks_of}
