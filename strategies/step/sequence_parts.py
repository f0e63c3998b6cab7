"""Batches of sequences shared by several ranks. Each rank runs the step on its part.

The step is the user's own. Positions not beginning at 0, and documents beginning on other ranks,
are injected at the model call. Attention over a rank's part only is refused.

Predictions are joined again, since every rank has computed only the predictions of its own tokens.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_unflatten

from megatron_lightning.assembly.checks.attention_watch import AttentionWatch, bound_attention
from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.steps.sequence_positions import SequencePositions
from megatron_lightning.guards.watches.position_watch import PositionWatch
from megatron_lightning.layers.shared_rows.entry import described, shared_models
from megatron_lightning.models.plans.hf_context import check_call
from megatron_lightning.models.plans.hf_plans import is_transformers_model
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.sequence_exchange import gather_parts
from megatron_lightning.pipeline.batch.context_mean import gather_rows
from megatron_lightning.pipeline.batch.sequence_arguments import SequenceArguments
from megatron_lightning.pipeline.batch.sequence_split import SequenceSplit
from megatron_lightning.pipeline.stages.parallel_call import ParallelCall
from megatron_lightning.step.items import counts_items
from megatron_lightning.step.participant import StepBatch, StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun
from megatron_lightning.strategies.checks.module import sequence_dims_of

_PACKAGE = "megatron_lightning."


class SequenceParts(StepParticipant):
    """Divides the batches of a run, and watches the step's use of its part.

    Attention of this module takes parts of sequences only inside of :meth:`divided`, also when the
    run is over.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._context = scope.context
        self._module = scope.module
        dims = sequence_dims_of(scope.module, getattr(scope.module.trainer, "datamodule", None))
        part = SequencePart(self._context.cp.rank, self._context.cp.size)
        tensor_ranks = self._context.tp.size if scope.part.shards_sequence else 1
        self.split = SequenceSplit(part, dims, tensor_ranks)
        """Splits batches."""
        plans = scope.part.plans.applied
        self._plans = {path: plan for path, plan in plans.items() if plan.positions is not None}
        self._calls = {
            path: ParallelCall.on(scope.module.get_submodule(path), 1, scope.undo)
            for path in self._plans
        }
        self._attention = bound_attention(scope.module)
        self._shared = shared_models(scope.module)
        self._seen: set[str] = set()
        self._begun: set[str] = set()
        self._warned: set[str] = set()
        self._positions = SequencePositions.judge_of(scope)
        self._open(is_open=False)

    def _open(self, *, is_open: bool) -> None:
        for core in self._attention.values():
            core.takes_parts = is_open

    @contextmanager
    def divided(self, batch: Any) -> Iterator[Any]:
        """Yield this rank's part of the sequences of a batch. Calls of the models receive the
        positions of the part.
        """
        length = self.split.length(batch)
        for path, shared in self._shared.items():
            model = self._module.get_submodule(path)
            if shared.find(model):  # before the step: a probe is no call of it
                ways = described(shared.kinds)
                rank_zero_info(f"MegatronStrategy: {type(model).__name__} shares rows: {ways}.")
        with ExitStack() as during:
            for path, call in self._calls.items():
                during.enter_context(call.adding(partial(self._added, path, length)))
            for shared in self._shared.values():
                during.enter_context(shared.rows_of(length))
            self._open(is_open=True)
            during.callback(self._open, is_open=False)
            yield self.split.split(batch)

    def _added(self, path: str, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to add to a call of a model, for sequences of ``length``
        positions.
        """
        context, model = self._context, self._module.get_submodule(path)
        arguments = SequenceArguments(context.cp, self._plans[path], length, context.device)
        added = arguments(given)
        if is_transformers_model(model):
            check_call(model, given, added, length)
        return added

    @contextmanager
    def around(self, run: StepRun) -> Iterator[None]:
        """Enter around the first run of a hook, to check that attention sees the full sequence.

        Raises:
            ConfigError: If attention sees only a part.
        """
        # The first run of a hook shows whether the step calls the model as the plan expects. Later
        # runs do the same.
        hook = run.hook
        if hook in self._seen:
            yield
            return
        self._seen.add(hook)
        with AttentionWatch(self._module) as watch:
            yield
        if hook == "training_step":  # an evaluation may do without the model
            watch.check()
        for path, plan in self._plans.items():
            prefix = f"{path}." if path else ""
            ran = any(called.startswith(prefix) for called in watch.called)
            if plan.positions and ran and not self._calls[path].was_called:
                model: nn.Module = self._module.get_submodule(path)
                raise ConfigError(
                    f"{hook} ran attention of a {type(model).__name__} and did not call the "
                    "module itself, so that it could not be given the positions of this rank's "
                    "tokens. Call it, not its parts or its forward; a sharding_plan() belongs to "
                    "the module that the step calls with tokens. Or set context_parallel_size to "
                    "1."
                )

    @contextmanager
    def around_forward(self, run: StepRun, stage: int, microbatch: int) -> Iterator[None]:
        """Watch the first forward of a hook, to find steps that select positions of a rank's part
        of the sequence, or reduce over the part.

        Raises:
            ConfigError: If the step selects positions.
        """
        is_first = (
            run.hook not in self._begun
            and stage == run.last_stage
            # Steps of this package exchange what they reduce.
            and not getattr(type(self._module), run.hook).__module__.startswith(_PACKAGE)
        )
        parts = self.split.parts(run.microbatches[microbatch]) if is_first else []
        if self._positions is None or not parts or not self._calls or "" in self._calls:
            yield
            return
        self._begun.add(run.hook)
        models = {path: self._module.get_submodule(path) for path in self._calls}
        watch = PositionWatch(run.hook, self._context.cp.size, parts, self._positions)
        with watch.watching(models):
            yield

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


def join_outputs(output: Any, dims: Mapping[Any, int], part_length: int, group: AxisGroup) -> Any:
    """Return the output of a step, with sequences joined in order. A collective of ``group``.

    A tensor is a part of sequences if the sequence dim has a rank's number of positions. The
    sequence dim is the dim declared by ``sequence_dims`` for the tensor's key, or else for the
    first entry of a batch.

    Args:
        output: Output for this rank's tokens.
        dims: The declaration.
        part_length: Positions of this rank's part of a sequence.
        group: The context-parallel ranks.

    Raises:
        ConfigError: If another tensor differs between the ranks.
    """
    leaves, spec = tree_flatten_with_path(output)
    plain_leaves = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, Tensor)]
    _check_equal_values(plain_leaves, group)
    usual = next(iter(dims.values()))
    joined: list[Any] = []
    for path, leaf in leaves:
        key = path[0].key if path and isinstance(path[0], MappingKey) else None
        if not isinstance(leaf, Tensor):
            joined.append(leaf)
            continue
        dim = dims.get(key, usual)
        # By length alone: an output of another length is the same on all ranks, which is checked.
        if -leaf.ndim <= dim < leaf.ndim and leaf.shape[dim] == part_length:
            joined.append(gather_parts(leaf, group, dim % leaf.ndim))
        else:
            _check_equal(leaf, "".join(map(str, path)), group)
            joined.append(leaf)
    return tree_unflatten(joined, spec)


def _check_equal_values(leaves: Sequence[tuple[Any, Any]], group: AxisGroup) -> None:
    """Check that values other than tensors are the same on all ranks."""
    pickled = [pickle.dumps(leaf) for _, leaf in leaves]
    for pickled_there in group.all_gather_object(pickled) if pickled else ():
        for (path, leaf), mine, theirs in zip(leaves, pickled, pickled_there, strict=True):
            if mine != theirs:
                raise ConfigError(
                    f"predict_step returned at {''.join(map(str, path)) or 'its top'} a "
                    f"{type(leaf).__name__} that differs between the {group.size} ranks that share "
                    "a sequence. Return tensors of every token, which are joined, or set "
                    "context_parallel_size to 1."
                )


def _check_equal(value: Tensor, name: str, group: AxisGroup) -> None:
    ranks = gather_rows(value[None], group)
    if not torch.allclose(ranks, value[None].expand_as(ranks), rtol=0, atol=0, equal_nan=True):
        place = f" at {name}" if name else ""
        raise ConfigError(
            f"predict_step returned{place} a tensor {list(value.shape)} that differs between the "
            f"{group.size} ranks that share a sequence, and is no sequence. Return values of "
            "every token (their dim is declared in sequence_dims, under the same key, where it is "
            "not that of the batch), or set context_parallel_size to 1."
        )
