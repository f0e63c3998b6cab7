"""Batches of sequences shared by several ranks. Each rank runs the step on its part.

The step is the user's own. Positions not beginning at 0, and documents beginning on other ranks,
are injected at the model call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from megatron_lightning.assembly.checks.attention_rows import bound_attention
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.entry import shared_models
from megatron_lightning.layers.shared_rows.full_arguments import Origins, described
from megatron_lightning.layers.shared_rows.probed_call import RunOnStages
from megatron_lightning.layers.styles.divided_embeddings import dividing_hooks
from megatron_lightning.models.plans.hf_context import check_call
from megatron_lightning.models.plans.hf_plans import is_transformers_model
from megatron_lightning.parallel.deal import Deal, DealTaker
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.parallel.shards.sharding import ShardingPlan
from megatron_lightning.pipeline.batch.sequence_arguments import SequenceArguments
from megatron_lightning.pipeline.batch.sequence_join import join_outputs
from megatron_lightning.pipeline.batch.sequence_split import SequenceSplit
from megatron_lightning.pipeline.stages.parallel_call import ParallelCall
from megatron_lightning.step.items import counts_items
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.step.values.dealing import Dealing


class SequenceParts(StepParticipant):
    """Divides the batches of a run.

    Attention of this module takes parts of sequences only inside of :meth:`divided`, also when the
    run is over.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._context = scope.context
        self._module = scope.module
        self.split = sequence_split(scope)
        """Splits batches."""
        self.deals = True
        """Whether the chunks of packed rows are dealt by work."""
        self._calls = calls_with_positions(scope)
        self._attention = bound_attention(scope.module)
        self._shared = shared_models(scope.module)
        self._takers: list[DealTaker] = [
            *self._attention.values(),
            *(shared.ranks for shared in self._shared.values()),
            *(hook for _, child in present_modules(scope.module) for hook in dividing_hooks(child)),
        ]
        units = scope.part.units
        self._apart: Callable[[], AbstractContextManager[None]] | None = (
            None if units is None else units.apart
        )
        self._warned: set[str] = set()
        self._dealing = Dealing.of(scope, self.split.dims)
        self._described: set[bool] = set()
        """Whether it trains: kinds of steps whose division of rows was said."""
        self._deals: list[Deal | None] = []
        self._deal: Deal | None = None
        """Chunks of the micro-batch at hand."""
        self._open(is_open=False)

    def _open(self, *, is_open: bool) -> None:
        for core in self._attention.values():
            core.takes_parts = is_open

    def find_mixers(self, run: RunOnStages | None = None) -> None:
        """Find what mixes tokens in models without a plan of their attention, before the first
        step: a probe is no call of it. A collective.

        Args:
            run: Calls the pipelined model on all stages. None: a rank has all layers.
        """
        for path, shared in self._shared.items():
            model = self._module.get_submodule(path)
            if shared.find(model, run):
                ways = described(shared.kinds)
                rank_zero_info(f"MegatronStrategy: {type(model).__name__} shares rows: {ways}.")

    @contextmanager
    def divided(self, hook: str, batch: Any, microbatches: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield this rank's part of the sequences of each micro-batch of a batch of the step
        ``hook``. Calls of the models receive the positions of the part.
        """
        length = self.split.length(batch)
        self.find_mixers()
        # A training step that calls the pipeline itself may ask for values alone.
        trains = hook == "training_step" and torch.is_grad_enabled()
        self._describe(batch, length, trains=trains)
        self._deals = self._deals_of(batch, microbatches, length, trains=trains)
        parts = [
            self.split.split(microbatch, deal)
            for microbatch, deal in zip(microbatches, self._deals, strict=True)
        ]
        with ExitStack() as during:
            for path, (plan, call) in self._calls.items():
                during.enter_context(call.adding(partial(self._added, path, plan, length)))
            for shared in self._shared.values():
                origins = Origins.of(*self.split.origins(parts))
                during.enter_context(shared.rows_of(length, origins, self._apart))
            self._open(is_open=True)
            during.callback(self._open, is_open=False)
            yield parts

    def _describe(self, batch: Any, length: int, *, trains: bool) -> None:
        """Log how packed rows are divided, once in training and once in evaluation."""
        if not self.deals or trains in self._described:
            return
        if how := self._dealing.described(batch, length, trains=trains):
            self._described.add(trains)
            mode = "training" if trains else "evaluation"
            rank_zero_info(f"MegatronStrategy: in {mode}, {how}.")

    def _deals_of(
        self, batch: Any, microbatches: Sequence[Any], length: int, *, trains: bool
    ) -> list[Deal | None]:
        """Return the chunks of each micro-batch."""
        if not self.deals:
            return [None] * len(microbatches)
        if trains:
            return [self._dealing.of_rows(rows, length, trains=True) for rows in microbatches]
        # Outputs of all micro-batches are joined together, after the run.
        return [self._dealing.of_rows(batch, length, trains=False)] * len(microbatches)

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Return the context in which all that holds a part of rows knows the micro-batch's
        chunks.
        """
        return self._dealt(self._deals[microbatch])

    def around_backward(self, run: StepRun, microbatch: int) -> AbstractContextManager[None]:
        """Do as :meth:`around_forward`, since the forward may run again."""
        return self._dealt(self._deals[microbatch])

    @contextmanager
    def _dealt(self, deal: Deal | None) -> Iterator[None]:
        self._tell(deal)
        try:
            yield
        finally:
            self._tell(None)

    def _tell(self, deal: Deal | None) -> None:
        self._deal = deal
        for taker in self._takers:
            taker.deal = deal

    def joined(self, run: StepRun, output: Any) -> Any:
        """Return the output of a run without gradients, with sequences joined. A collective."""
        part_length, group = self.split.part_length(run.microbatches[0]), self._context.cp
        return join_outputs(
            output, self.split.dims, part_length, group, hook=run.hook, deal=self._deals[0]
        )

    def _added(
        self, path: str, plan: ShardingPlan, length: int, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to add to a call of a model, for sequences of ``length``
        positions.
        """
        context, model = self._context, self._module.get_submodule(path)
        arguments = SequenceArguments(context.cp, plan, length, context.device, self._deal)
        added = arguments(given)
        if is_transformers_model(model):
            check_call(model, given, added, length)
        return added

    def returned(self, run: StepRun, microbatch: int, loss: Tensor | None) -> None:
        """Refuse training steps that return None: other ranks would wait forever for the backward
        of this rank.

        Raises:
            ConfigError: If the step returned None.
        """
        if run.outputs[microbatch] is None:
            raise ConfigError(
                "training_step returned None on a rank that shares sequences with "
                f"{self._context.cp.size - 1} others, which a batch cannot be skipped on. "
                "Return a loss, which weighs nothing with num_items of 0, or set "
                "context_parallel_size to 1."
            )

    def end_batch(self, batch: StepBatch, output: Any) -> None:
        """Check that ranks weigh means by the number of counted tokens.

        In evaluation a step may log with ``batch_size``. Evaluation therefore only warns, once.

        Raises:
            ConfigError: In training, if not all tokens count, and the number of counted tokens is
                unknown.
        """
        hook, trains = batch.hook, batch.trains
        if hook == "predict_step" or (output is None and trains):
            return
        if counts_items(self._module, output):
            return
        masks = None if hook in self._warned else self.split.masks(batch.value)
        if not masks:
            return
        advice = (
            f"the batch has {masks}, so that the {self._context.cp.size} ranks that share a "
            "sequence may average over different numbers of tokens. Give the module a method "
            "num_items(batch) that counts them"
        )
        if trains:
            raise ConfigError(
                f"{advice}, or return {{"
                '"loss": loss, "num_items": number of tokens in the loss} from training_step.'
            )
        self._warned.add(hook)
        rank_zero_warn(f"{advice}, or log with batch_size=number of tokens, in {hook}.")


def sequence_split(scope: RunContext) -> SequenceSplit:
    """Return the division of a run's batches along their sequences."""
    context, data = scope.context, getattr(scope.module.trainer, "datamodule", None)
    tensor_ranks = context.tp.size if scope.part.shards_sequence else 1
    part = SequencePart(context.cp.rank, context.cp.size)
    return SequenceSplit(part, sequence_dims_of(scope.module, data), tensor_ranks)


def calls_with_positions(scope: RunContext) -> dict[str, tuple[ShardingPlan, ParallelCall]]:
    """Return plan and call of the models that are given the positions of a rank's part, by
    path.
    """
    plans, module = scope.part.plans.applied, scope.module
    return {
        path: (plan, ParallelCall.on(module.get_submodule(path), 1, scope.undo))
        for path, plan in plans.items()
        if plan.positions is not None
    }


def sequence_dims_of(
    module: pl.LightningModule, data: pl.LightningDataModule | None
) -> Mapping[Any, int]:
    """Return the entries of a batch with a sequence, and the sequence dim of each entry.

    Raises:
        ConfigError: If neither the module nor its data declares sequence dims.
    """
    for owner in (module, data):
        dims: Mapping[Any, int] | None = getattr(owner, "sequence_dims", None)
        if dims:
            return dims
    raise ConfigError(
        f"context_parallel_size is above 1, and neither {type(module).__name__} nor its datamodule "
        "says which entries of a batch hold a sequence. Give one of them an attribute such as "
        'sequence_dims = {"tokens": 1, "labels": 1}: the key (of a tuple: the index), and the dim '
        "of the sequence."
    )
