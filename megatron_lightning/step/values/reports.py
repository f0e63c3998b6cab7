"""Reports of layers (:mod:`megatron_lightning.layers.step_report`) in the steps of a run.

A run of a step goes through

    around               the forwards, and the backwards under a pipeline
      around_forward, around_backward    set the micro-batch
      around_forward, returned           set the scale, as soon as known
    apply                add up over micro-batches, exchange, self.log

The exchange adds up a tensor, over the pipeline and then over the other ranks (in an evaluation not
over data-parallel ranks, since data-parallel ranks may have fewer batches). The tensor has a
section for each reported name. A rank with a new name sets a mark in the first section. All ranks
then exchange names and repeat the exchange. Tensor-parallel ranks have the same micro-batch, so
sums over tensor-parallel ranks are divided by the number of tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.step_report import (
    CurrentMicrobatch,
    Key,
    LossScale,
    StepReport,
    add_up,
    bind,
    find_reports,
    reduced,
)
from megatron_lightning.step.items import has_count
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

_PREFIXES: Mapping[str, str] = {
    "training_step": "",
    "validation_step": "val_",
    "test_step": "test_",
}


class StepReports(StepParticipant):
    """Reports of this rank's layers.

    Args:
        scope: The run context.

    Raises:
        ConfigError: If a module outside of the units of a pipeline reports.
    """

    def __init__(self, scope: RunContext) -> None:
        self._scope = scope
        everywhere = [
            path for path, child in scope.module.named_modules() if isinstance(child, StepReport)
        ]
        self._exist = bool(everywhere)  # on any stage, equal on all ranks
        self._check_places(everywhere)
        self._microbatch = CurrentMicrobatch(is_bound=True, records=False)
        scope.undo.callback(bind(scope.module, self._microbatch))
        self._mine = find_reports(scope.module)
        self._scales: dict[int, LossScale] = {}
        self._keys: dict[str, list[Key]] = {}
        self._is_repeated = False

    def _check_places(self, paths: Sequence[str]) -> None:
        partition = self._scope.part.partition
        if partition is None:
            return
        root = next(p for p, m in self._scope.module.named_modules() if m is partition.module)
        units = tuple(f"{root}.{unit}.".lstrip(".") for unit in partition.modules)
        for path in paths:
            if not f"{path}.".startswith(units):
                raise ConfigError(
                    f"{path} is outside of the pipeline's units {partition.units[0]!r}, …, "
                    f"{partition.units[-1]!r}, and runs on several stages, which would report the "
                    "same twice. Report from a layer inside of a unit, or log in the step."
                )

    # -------------------------------------------------------------------------------- during a step

    @contextmanager
    def around(self, run: StepRun) -> Iterator[None]:
        """Record the reports in the block. Predictions have no reports."""
        self._scales = {}
        self._begin(0)
        self._microbatch.records = run.hook in _PREFIXES and not self._is_repeated
        try:
            yield
        finally:
            self._microbatch.records = False

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Give the losses reported by layers the scale of the main loss, if already known."""
        self._begin(microbatch)
        if self._exist and run.trains:
            self._scales[microbatch].value = run.scale(microbatch)
        return nullcontext()

    def around_backward(self, run: StepRun, microbatch: int) -> AbstractContextManager[None]:
        """Set the micro-batch, since its forward may run again."""
        self._begin(microbatch)
        return nullcontext()

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Set the scale of the losses reported before: the weight of the main loss or, with
        Lightning's own backward, the gradient of the main loss.
        """
        if not self._exist or loss is None:
            return
        if run.trains:
            self._scales[microbatch].value = run.scale(microbatch)
        else:
            self._microbatch.loss_scale.follow(loss)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Record nothing in the block."""
        state_before = self._is_repeated, self._microbatch.records
        self._is_repeated, self._microbatch.records = True, False
        try:
            yield
        finally:
            self._is_repeated, self._microbatch.records = state_before

    def _begin(self, microbatch: int) -> None:
        self._microbatch.index = microbatch
        self._microbatch.loss_scale = self._scales.setdefault(microbatch, LossScale())

    # ------------------------------------------------------------------------------- after the step

    def share(self, run: StepRun) -> tuple[list[float | Tensor], Tensor | None] | None:
        """Return the weights of the micro-batches in a mean, and the sum of the items if items are
        the weights. None: nothing reports.
        """
        if not self._exist:
            return None
        run.count_evaluated()
        return run.item_weights, run.num_items

    def apply(self, run: StepRun, shared: Any) -> None:
        """Log the reports on every rank. A collective if layers report.

        Raises:
            ConfigError: If stages report losses of unknown weight.
        """
        if not self._exist or run.hook not in _PREFIXES:
            return
        hook, num_samples = run.hook, run.num_samples
        weights, num_items = shared
        if num_items is None:  # then the replicas' means count equally
            total = sum(weights)
            weights = [weight / total for weight in weights]
        totals, weight = self._exchange(hook, add_up(self._mine, weights), sum(weights))
        options: dict[str, Any] = {"batch_size": num_samples} if num_samples else {}
        if hook == "training_step":
            self._check_items(totals, num_items)
        else:
            options["sync_dist"] = self._scope.context.dp.size > 1
            if num_items is not None:
                options["batch_size"] = float(weight)  # a sum of weights may be below 1
        for key, number in reduced(totals, weight).items():
            value = number.float()
            if key.kind == "sum" and options.get("sync_dist"):
                value = value / self._scope.context.cp.size  # each of these ranks adds the sum
            reduction: dict[str, Any] = {"reduce_fx": "sum"} if key.kind == "sum" else {}
            self._scope.module.log(f"{_PREFIXES[hook]}{key.label}", value, **options, **reduction)

    def _check_items(self, keys: Iterable[Key], num_items: Tensor | None) -> None:
        module, partition = self._scope.module, self._scope.part.partition
        losses = [key.name for key in keys if key.kind == "loss"]
        if losses and partition is not None and num_items is not None and not has_count(module):
            raise ConfigError(
                f"layers report the loss {losses[0]!r}, and training_step of "
                f"{type(module).__name__} returns num_items, which the stages before the last one "
                "have to know before. Give it a method num_items(batch) that returns the same "
                "number."
            )

    def _exchange(
        self, hook: str, totals: dict[Key, Tensor], weight: Any
    ) -> tuple[dict[Key, Tensor], Any]:
        """Return the totals and the weight over all ranks, without names that no rank has
        reported.
        """
        context = self._scope.context
        other_group = context.axis("tp-dp-cp" if hook == "training_step" else "tp-cp")
        groups = [group for group in (context.pp, other_group) if group.size > 1]
        if not groups:
            return totals, weight
        number = partial(torch.as_tensor, dtype=torch.float64, device=context.device)
        if context.pp.rank > 0:  # the stages of a replica share a single weight
            weight = 0.0
        while True:
            keys = self._keys.get(hook, [])
            is_new = float(any(key not in keys for key in totals))
            sections = [torch.stack([number(weight), number(is_new)])]
            sections += [totals.get(key, sections[0].new_zeros(key.size + 1)) for key in keys]
            # One table of known names a step. A name that any rank reports for the first time is
            # agreed on, and the table is sent again.
            table = torch.cat(sections)
            for group in groups:
                dist.all_reduce(table, group=group.process_group)
            table /= context.tp.size
            summed, *sums = torch.split(table, [len(section) for section in sections])
            has_new, *are_reported = torch.stack([row[-1] for row in (summed, *sums)]).tolist()
            if not has_new:
                totals_of_keys = zip(keys, sums, are_reported, strict=True)
                return {
                    key: total for key, total, is_reported in totals_of_keys if is_reported
                }, summed[0]
            names = {*keys, *totals}
            for group in groups:
                names = set[Key]().union(*group.all_gather_object(names))
            self._keys[hook] = sorted(names)
