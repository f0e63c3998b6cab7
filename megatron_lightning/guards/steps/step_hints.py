"""Hints about differences from one device that are no errors, each given once a run: BatchNorm over
parts of a batch, spectral_norm in micro-batches, and means over different numbers of labels
(``docs/differences.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.pipeline.batch.microbatches import tensors_of
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL
from megatron_lightning.step.items import counts_items, has_count
from megatron_lightning.step.participant import StepBatch
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun

_NAMES = ("label", "target")


class StepHints(Guard):
    """Look at the training steps of a run."""

    sentence = (
        "a batch in parts gives other values than the batch: BatchNorm, `spectral_norm`, and means "
        "over different numbers of labels"
    )

    def __init__(self, scope: RunContext, fit: Fit | None = None) -> None:
        super().__init__(scope, fit)
        self._norms = {
            path: child
            for path, child in scope.module.named_modules()
            if isinstance(child, nn.modules.batchnorm._BatchNorm)
            and not isinstance(child, nn.SyncBatchNorm)
        }
        self._spectral = _with_spectral_norm(scope.part.names)  # on all stages
        self._is_first = True
        self._advice: str | None = None

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether steps are split into micro-batches, or over ranks, by the strategy."""
        return not scope.options.pipeline.explicit_steps

    def begin(self, run: StepRun) -> None:
        """Look at the parts of a training batch, before the step may change the batch. A collective
        of the data-parallel ranks in the first step.
        """
        if run.hook == "training_step":
            self._look(run.microbatches)

    def _look(self, microbatches: Sequence[Any]) -> None:
        if len(microbatches) == 1 and self.scope.context.dp.size == 1:
            return
        if any(norm.training for norm in self._norms.values()):
            self._warn_of_norms(len(microbatches))
        if self._spectral and len(microbatches) > 1:
            self._warn_of_spectral_norms(len(microbatches))
        if self._is_first:
            self._is_first = False
            self._advice = self._compare_labels(microbatches)

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Give the hint about labels, unless the step's output counts labels."""
        if not batch.trains:
            return
        advice, self._advice = self._advice, None
        if advice is not None and not counts_items(self.scope.module, output):
            self.judge.warn(advice)

    def _warn_of_norms(self, num_microbatches: int) -> None:
        path, replicas = next(iter(self._norms)), self.scope.context.dp.size
        self._norms = {}
        self.judge.warn(
            f"{path} is a BatchNorm: it normalizes each of the {num_microbatches * replicas} parts "
            f"of a batch ({num_microbatches} micro-batch(es) on {replicas} data-parallel rank(s)) "
            "by its own samples, and one device normalizes the batch. Make the parts large, use a "
            "norm of single samples (GroupNorm, LayerNorm), or, for the ranks' samples together on "
            "GPUs, set Trainer(sync_batchnorm=True). See docs/differences.md."
        )

    def _warn_of_spectral_norms(self, num_microbatches: int) -> None:
        path, self._spectral = self._spectral[0], []
        self.judge.warn(
            f"{path} has a spectral_norm: it runs one power iteration in every forward, which is "
            f"{num_microbatches} a batch ({num_microbatches} micro-batches), and one on one "
            "device, so that losses differ until the estimate of the norm has converged. Use one "
            "micro-batch, or raise n_power_iterations. See docs/differences.md."
        )

    def _compare_labels(self, microbatches: Sequence[Any]) -> str | None:
        """Return a hint if parts of the first batch have different numbers of counted labels."""
        context, module = self.scope.context, self.scope.module
        if has_count(module) or context.cp.size > 1:  # checked elsewhere
            return None
        counts = [count for part in microbatches if (count := _count_labels(part)) is not None]
        numbers = [number for number, _ in counts]
        totals = torch.tensor(
            [-min(numbers), max(numbers), max(ignored for _, ignored in counts)]
            if counts
            else [-(2**31), 0, 0],
            device=context.device,
        )
        if context.dp.size > 1:
            dist.all_reduce(totals, dist.ReduceOp.MAX, group=context.dp.process_group)
        smallest, largest, ignored = -int(totals[0]), int(totals[1]), int(totals[2])
        if not ignored or smallest >= largest:
            return None
        return (
            f"labels of {IGNORED_LABEL} have no loss, and the micro-batches and data-parallel "
            f"ranks of the first batch have {smallest} to {largest} others. The mean of means is "
            "not the mean over all labels, which one device computes: public examples are off by "
            '0.3 to 2.4 %. Return {"loss": loss, "num_items": number of labels that count} from '
            "training_step, or give the module a method num_items(batch). See docs/differences.md."
        )


def _with_spectral_norm(names: Sequence[str]) -> list[str]:
    """Return the paths of modules with a spectral norm, given the ``names`` of the vectors of the
    power iteration.
    """
    paths: dict[str, None] = {}
    for name in names:
        parametrized, _, vector = name.rpartition(".parametrizations.")
        hooked, _, weight = name.rpartition(".")
        if parametrized and vector.endswith("._u"):
            paths[parametrized] = None
        elif weight.endswith("_u") and f"{name.removesuffix('_u')}_orig" in names:
            paths[hooked] = None
    return list(paths)


def _count_labels(batch: Any) -> tuple[int, int] | None:
    """Return the numbers of counted and of ignored labels. None: nothing looks like labels."""
    integer_tensors = [
        x for x in tensors_of(batch) if x.ndim and x.dtype in (torch.int64, torch.int32)
    ]
    label_tensors: list[Tensor] = []
    if isinstance(batch, Mapping):
        label_tensors = [
            value
            for key, value in batch.items()
            if isinstance(value, Tensor) and any(name in str(key).lower() for name in _NAMES)
        ]
    marked = [x for x in integer_tensors if bool((x == IGNORED_LABEL).any())]
    chosen = marked or label_tensors or ([] if isinstance(batch, Mapping) else integer_tensors)
    if not chosen:
        return None
    ignored = int((chosen[-1] == IGNORED_LABEL).sum())
    return chosen[-1].numel() - ignored, ignored
