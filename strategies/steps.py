"""One Lightning step as a pipeline flush: the user's step runs for every micro-batch on every stage.

The call of the pipelined module is the cut. A stage that is not the last runs its layers there and the user's step is
unwound; on the last stage the call returns the real output and the rest of the step runs. The action table says what runs
when; this module says what a forward *is*. A flush fills and drains the pipeline once, as in PipeDream-Flush.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lightning.assembly.assemble import Assembly
from megatron_lightning.errors import PipelineError
from megatron_lightning.optim.finite_watch import FiniteWatch
from megatron_lightning.optim.fully_sharded import ShardedUnits
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.replica_rng import ReplicaRng
from megatron_lightning.pipeline.actions import Schedule
from megatron_lightning.pipeline.broadcast import StageBroadcast
from megatron_lightning.pipeline.call_guard import CallGuard
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.microbatches import batch_size_of, merge_outputs, split_batch, tensors_of
from megatron_lightning.pipeline.schedules import ScheduleChoice
from megatron_lightning.strategies import preflight
from megatron_lightning.strategies.logs import LogRecorder, replay
from megatron_lightning.strategies.metrics import MetricSync
from megatron_lightning.strategies.step_lists import StepLists


class _StageExit(BaseException):
    """Unwinds the user's step on every stage but the last, right after the pipelined module ran."""

    def __init__(self, boundary: tuple[Tensor, ...]) -> None:
        super().__init__("the step left a pipeline stage")
        self.boundary = boundary


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a ``*_step`` hook by Lightning, cut into micro-batches."""

    hook: str
    """Name of the hook, such as ``"training_step"``."""
    microbatches: Sequence[Any]
    """The parts of the batch."""
    call: Callable[[Any], Any]
    """What is done with each of them on every stage: as a rule, the hook."""
    context: Callable[[], AbstractContextManager[Any]]
    """Precision context of one forward."""
    backward_scale: float | None = None
    """Factor of the losses, 1 / accumulated flushes; None: no backward."""
    loss_scale: float = 1.0
    """Further factor of the losses, which the precision plugin takes out of the gradients again."""
    completing: Callable[[int], AbstractContextManager[None]] | None = None
    """Called with a stage; what it returns is put around the action that completes the stage's gradients."""
    watch: FiniteWatch | None = None
    """Looks for infinities and NaN."""
    after_backwards: Callable[[], None] | None = None
    """Called when all backwards have run, before anything else is communicated."""


def precision_context(plugin: Precision, hook: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what a plugin puts around one call of a ``*_step`` hook."""
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[hook]


@dataclass
class StepResult:
    """What a step gave, the same on every stage."""

    output: Any
    num_items: Tensor | None
    """Sum of the ``num_items`` of this rank's micro-batches, if the module returns them."""


class StepRunner:
    """Runs ``*_step`` hooks of a LightningModule through the pipeline.

    Args:
        module: The LightningModule.
        context: Groups of this rank.
        assembly: What this rank holds of the module.
        executor: Runs the action tables.
        schedule: Order of work in the pipeline.
        variable_shapes: Whether every message between stages says its shapes; else equal micro-batches have equal ones.
        units: What FSDP2 shards of the stages; None without it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        context: ParallelContext,
        assembly: Assembly,
        *,
        executor: PipelineExecutor,
        schedule: ScheduleChoice,
        variable_shapes: bool = False,
        units: ShardedUnits | None = None,
    ) -> None:
        self.module, self.context, self.assembly, self.units = module, context, assembly, units
        self.rng, self.metrics = ReplicaRng(context.device), MetricSync(module, context)
        self.num_stages = context.layout.num_stages
        self.variable_shapes = variable_shapes
        self._choice, self._schedules = schedule, dict[tuple[int, bool], Schedule]()
        self._executor = executor
        self._executor.forget_boundaries()
        self._epoch = 0
        self._broadcast, self._lists = StageBroadcast(context.pp, context.device), StepLists(module, context.device)
        pipelined = None if assembly.partition is None else assembly.partition.module
        self._guard = None if pipelined is None else CallGuard.on(pipelined, context.pp.size)

    def release(self) -> None:
        """Give back what was hung on the module."""
        self.metrics.release()

    def place(self) -> tuple[int, int]:
        """Return the stage and the micro-batch that are computed now."""
        action = self._executor.current
        return (0, 0) if action is None else (action.stage, action.microbatch)

    def _schedule(self, num_microbatches: int, backward: bool) -> Schedule:
        """Return the action table, proven once for each number of micro-batches.

        The first training step decides whether the schedule can run; a smaller batch later, at the end of the data, may not
        end the run, nor may one with which a resumed run begins.
        """
        key = (num_microbatches, backward)
        if key not in self._schedules:
            trainer = self.module.trainer
            resumed = trainer.ckpt_path is not None and trainer.global_step > 0
            first = backward and not resumed and not any(trained for _, trained in self._schedules)
            if first:
                preflight.warn_of_few_microbatches(self._choice, num_microbatches)
            make = self._choice.table if first else self._choice.table_or_sweep
            self._schedules[key] = made = make(num_microbatches) if backward else self._choice.forward_table(num_microbatches)
            if backward and made.name == "sweep":
                rank_zero_warn(
                    f"pipeline_schedule {self._choice.name} has no order for the {num_microbatches} micro-batches of this "
                    "batch: all forwards run, then all backwards, which holds more activations. Set drop_last on the "
                    "DataLoader to avoid it."
                )
        return self._schedules[key]

    def split(self, batch: Any, micro_batch_size: int | None) -> list[Any]:
        """Cut a batch, with the ``split_batch`` of the module or data module if there is one."""
        trainer = self.module.trainer
        for owner in (self.module, getattr(trainer, "datamodule", None)):
            own: Callable[[Any, int], Sequence[Any]] | None = getattr(owner, "split_batch", None)
            if micro_batch_size is not None and own is not None:
                return list(own(batch, micro_batch_size))
        return split_batch(batch, micro_batch_size)

    def run(self, step: Step) -> StepResult:
        """Run one step.

        Raises:
            PipelineError: If the step breaks the contract of a pipelined step.
        """
        program = _StepProgram(self, step)
        epoch = self.module.trainer.current_epoch
        if self.variable_shapes or epoch != self._epoch:  # callbacks freeze and unfreeze layers between epochs
            self._epoch = epoch
            self._executor.forget_boundaries()
        self.rng.begin_step()
        self._lists.begin()
        backward = step.backward_scale is not None
        schedule = self._schedule(len(step.microbatches), backward)
        self.metrics.in_step = True
        try:
            with program.intercepted(), nullcontext() if self._guard is None else self._guard.opened():
                self._executor.run(schedule, program, backward=backward)
        finally:
            self.metrics.in_step = False
        if step.after_backwards is not None:
            step.after_backwards()
        if self.num_stages > 1:
            self.rng.end_step()
        return self._share(program, step.hook)

    def _share(self, program: _StepProgram, hook: str) -> StepResult:
        """Reduce outputs, logs and metric counts over the micro-batches and give them to all stages."""
        shared: Any = None
        grown = b""
        if self.context.pp.rank == 0:
            weights = program.item_weights
            output = merge_outputs([program.outputs[i] for i in range(len(program.sizes))], weights, program.sizes)
            entries = [entry.as_tuple() for entry in program.recorder.entries(weights)]
            grown = self._lists.grown() if self.num_stages > 1 else b""
            shared = (output, program.num_items, entries, self.metrics.counts(), bool(grown))
        if self.num_stages > 1:
            predicting = hook == "predict_step"
            shared = self._broadcast_objects(shared) if predicting else self._broadcast(shared, tensors=self._are_read(hook))
        output, num_items, entries, counts, has_grown = shared
        self.metrics.follow(counts)
        if has_grown and self.context.pp.size > 1:
            grown = self._broadcast_objects(grown)
            if self.context.pp.rank > 0:
                self._lists.follow(grown)
        replay(self.module, entries)
        return StepResult(output, num_items)

    def _are_read(self, hook: str) -> bool:
        """Whether the module or a callback, other than Lightning's own and ours, has the hook that is handed the outputs."""
        name = f"on_{hook.removesuffix('_step').replace('training', 'train')}_batch_end"
        trainer: Any = self.module.trainer
        hooks = [getattr(owner, name) for owner in (self.module, *trainer.callbacks)]
        libraries = ("lightning", "megatron_lightning")
        return any(str(getattr(hook, "__module__", None)).partition(".")[0] not in libraries for hook in hooks)

    def _broadcast_objects(self, value: Any) -> Any:
        """Send all tensors: predictions, on the CPU."""
        return self.context.pp.broadcast_object(tree_map_only(Tensor, Tensor.cpu, value))


class _StepProgram:
    """What the executor calls: forwards of the user's step for one (stage, micro-batch)."""

    def __init__(self, runner: StepRunner, step: Step) -> None:
        self._runner, self._step = runner, step
        self.sizes = [batch_size_of(part) for part in step.microbatches]
        known = [float(size) for size in self.sizes if size]
        self.weights = known if len(known) == len(self.sizes) else [1.0] * len(self.sizes)
        self._items: dict[int, Tensor] = {}
        self.recorder = LogRecorder(runner.module, self.sizes)
        self.outputs: dict[int, Any] = {}
        self._position: tuple[int, int, tuple[Tensor, ...] | None] = (0, 0, None)
        self._called = False

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | Tensor | None:
        """Run the user's step on ``microbatch`` as ``stage`` sees it."""
        runner, last = self._runner, stage == self._runner.num_stages - 1
        self._position, self._called, self.recorder.microbatch = (stage, microbatch, received), False, microbatch
        if runner.num_stages > 1:
            runner.rng.begin_microbatch(microbatch)
        try:
            with self._step.context(), self.recorder.installed() if last else self._silenced(), self._in_order():
                output = self._step.call(self._step.microbatches[microbatch])
        except _StageExit as exit_:
            if self._step.watch is not None:
                self._step.watch.forward(exit_.boundary, is_loss=False)
            return exit_.boundary
        if runner.num_stages > 1 and not self._called:
            self._check_uncalled(stage, received)
            if not last:
                return ()
        return self._finish(microbatch, output)

    def _check_uncalled(self, stage: int, received: tuple[Tensor, ...] | None) -> None:
        """Allow evaluation steps that do not call the module on any stage: these have nothing to hand on."""
        if self._step.backward_scale is None and not received:
            return
        raise PipelineError(
            f"{self._step.hook} returned on stage {stage} without calling the pipelined module "
            f"({self._runner.assembly.path or 'the module itself'}). Call it exactly once in every training step, and in "
            "other steps on every stage or on none."
        )

    def _in_order(self) -> AbstractContextManager[None]:
        """With one stage, the step may call the module as it likes; the data-parallel ranks call the same units."""
        units = self._runner.units if self._runner.assembly.partition is None else None
        return nullcontext() if units is None else units.in_order(self._step.hook)

    def _silenced(self) -> AbstractContextManager[None]:
        """Drop what is logged before the call on a stage that is not the last; the last stage logs it as well."""
        return LogRecorder(self._runner.module, self.sizes).installed()

    def _finish(self, microbatch: int, output: Any) -> Tensor | None:
        self.outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        counted = isinstance(output, Mapping) and "num_items" in output
        if counted:
            items = torch.as_tensor(output["num_items"], dtype=torch.float32, device=self._runner.context.device)
            self._items[microbatch] = items.detach()
        if self._step.backward_scale is None or output is None:
            return None
        if isinstance(output, Mapping) and "loss" not in output:
            raise PipelineError(
                f"{self._step.hook} returned a dict with {', '.join(map(repr, output)) or 'no entries'}; the loss is missing. "
                'Return {"loss": loss, ...}, or the loss itself.'
            )
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        if self._step.watch is not None:
            self._step.watch.forward(loss, is_loss=True)
        weight: float | Tensor = self.weights[microbatch] / sum(self.weights) * self._step.backward_scale
        if counted:
            weight = self._items[microbatch]
        scale = self._step.loss_scale
        return loss * weight if scale == 1.0 else loss.float() * (weight * scale)  # fp16 holds no more than 65504

    @property
    def num_items(self) -> Tensor | None:
        """Sum of ``num_items`` over the micro-batches."""
        return torch.stack(list(self._items.values())).sum() if self._items else None

    @property
    def item_weights(self) -> list[float | Tensor]:
        """What each micro-batch weighs in a mean over the batch: its items if the module counts them, else its samples."""
        return [self._items.get(index, weight) for index, weight in enumerate(self.weights)]

    def signature(self, microbatch: int) -> Any:
        """Return shapes and dtypes of the micro-batch: equal ones give equal stage boundaries."""
        if self._runner.variable_shapes:
            return microbatch
        shapes = tuple((tuple(x.shape), x.dtype) for x in tensors_of(self._step.microbatches[microbatch]))
        return (self._step.hook, self._runner.module.trainer.sanity_checking, shapes)  # steps may leave out a sanity check

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Let gradient reduction start."""
        return nullcontext() if self._step.completing is None else self._step.completing(stage)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Make the pipelined module's ``forward`` the cut for the time of the step."""
        assembly = self._runner.assembly
        if assembly.partition is None:
            yield
            return
        attributes = self._runner.module.get_submodule(assembly.path or "").__dict__
        before = attributes.get("forward")
        originals = {stage: assembly.partition.view(stage).forward for stage in assembly.partition.own}
        first_parameter = next(iter(inspect.signature(next(iter(originals.values()))).parameters))

        def cut(*args: Any, **kwargs: Any) -> Any:
            return self._cut(originals, first_parameter, args, kwargs)

        attributes["forward"] = cut
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before

    def _cut(
        self, originals: Mapping[int, Callable[..., Any]], first: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        stage, microbatch, received = self._position
        runner = self._runner
        if self._called:
            raise PipelineError(
                f"{self._step.hook} called the pipelined module twice on stage {stage}, micro-batch {microbatch}. A pipelined "
                "step calls it exactly once; put the inputs into one batch, or set pipeline_model_parallel_size=1."
            )
        self._called = True
        if received == ():
            raise PipelineError(
                f"{self._step.hook} called the pipelined module on stage {stage} and not on the stage before. Whether a step "
                "calls it must follow from the batch and its index alone."
            )
        if received is not None:
            stage_input = received[0] if len(received) == 1 else received
            if args:
                args = (stage_input, *args[1:])
            else:
                kwargs = {**kwargs, first: stage_input}
        runner.rng.at_call(microbatch)
        with runner.context.rng.fork("data-parallel-rng") if runner.num_stages > 1 else nullcontext():
            if runner.units is None:
                output = originals[stage](*args, **kwargs)
            else:
                with runner.units.in_order(self._step.hook, stage):
                    output = runner.units.call(stage, originals[stage], *args, **kwargs)
        if stage == runner.num_stages - 1:
            return output
        boundary = tuple(output) if isinstance(output, tuple | list) else (output,)
        if not all(isinstance(tensor, Tensor) for tensor in boundary):
            kinds = ", ".join(type(item).__name__ for item in boundary)
            raise PipelineError(
                f"stage {stage} of the pipelined module returned ({kinds}); only tensors travel between stages. "
                "Return a tensor or a tuple of tensors when the last units are absent."
            )
        raise _StageExit(boundary)
