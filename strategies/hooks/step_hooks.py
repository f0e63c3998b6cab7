"""Lightning's calls around every batch and optimizer step, and gradients for users."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.resilience.desync import BATCH, END_OF_TRAINING, VALIDATION
from megatron_lightning.step.overrides import unwrapped
from megatron_lightning.step.repeats.rerun import RerunResult
from megatron_lightning.strategies.checkpoint.global_batch import keep_global_batch
from megatron_lightning.strategies.fp8 import forward_outside_steps
from megatron_lightning.strategies.hooks.rank_hooks import RankHooks

if TYPE_CHECKING:
    from megatron_lightning.inference.engine.engine_options import EngineOptions
    from megatron_lightning.inference.engine.own_generate import OwnGenerate
    from megatron_lightning.inference.engine.requests import Decode
    from megatron_lightning.inference.engine.text_engine import Engine


class StepHooks(RankHooks):
    """Forward Lightning's hooks to the steps and gradients of the run."""

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.ranks.course.mark(f"the step of a {BATCH}")
        with self.ranks.streams.in_step():
            return self._running.steps.training_step(batch, *args, *kwargs.values())

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", *args, *kwargs.values())

    def _evaluate(self, hook: str, batch: Any, *indices: Any) -> Any:
        if self._running.has_trained:
            self._running.training.accumulation.written.before_evaluation()
        self.wait_for_parameters()
        # Lightning restores the state of hooks after a sanity check.
        with self.ranks.streams.in_step(isolated=self.module.trainer.sanity_checking):
            if self.part.units is not None and torch.is_inference_mode_enabled():
                # Parameters gathered in inference mode could not be trained.
                with torch.inference_mode(False), torch.no_grad():
                    return self._running.steps.run_evaluation(hook, batch, *indices)
            return self._running.steps.run_evaluation(hook, batch, *indices)

    def run_pipeline(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a part of a step on every micro-batch. See
        :func:`megatron_lightning.strategies.run_pipeline`.
        """
        return self._running.steps.run_pipeline(fn, batch)

    def probe(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``step(batch)`` on every rank, from a forward without gradients that leaves no
        trace. A collective of all ranks, outside of steps, such as in ``on_train_start``.

        Args:
            step: Calls the model once, as a predict step, and returns tensors [b, ...].
            batch: Equal on all ranks. Split into micro-batches and sequences as any batch.
        """
        with (
            self.ranks.streams.in_step(isolated=True),
            torch.compiler.set_stance("force_eager"),
            self.precision_plugin.val_step_context(),
        ):
            return self._running.steps.probe(step, batch)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Publish the reduced gradients as the parameters' own, between Lightning's backward
        hooks.
        """
        run, module = self._running, self.module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.ranks.streams.in_step():
            run.steps.backward(closure_loss, optimizer, *args, **kwargs)
        run.training.accumulation.finish_run()
        if run.training.accumulation.is_last_run:
            run.steps.inputs.complete()
        with self.ranks.streams.in_hook(), run.training.guard.around("on_after_backward"):
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        run.training.watch_gradients()
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def step(closure: Callable[[], Any]) -> Any:
            return super(StepHooks, self).optimizer_step(optimizer, closure, model, **kwargs)

        with self.ranks.streams.in_hook():  # a module may step inside of its training_step
            return self._running.training.optimizer_step(optimizer, step, closure)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._running.training.accumulation.accumulating():
            yield

    @override
    def on_train_start(self) -> None:
        """Resume an interrupted epoch with the data order and random numbers of an uninterrupted
        epoch.
        """
        self.starts.begin(self.module.trainer)
        keep_global_batch(
            self.module.trainer,
            self._running.checkpoints.state.step_size,
            self.context.dp.size,
            is_sized_by_launcher=self.is_sized_by_launcher,
        )
        self._running.checkpoints.state.restore_position(self.module.trainer, self._running.undo)
        self._running.steps.begin_training()
        self._running.training.store_parameters()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        epoch = self.module.trainer.current_epoch
        self.ranks.course.mark(f"{BATCH} {batch_idx} of epoch {epoch}")
        self._running.clock.agree(self.module.trainer)
        self.starts.beat(self.module.trainer)

    @override
    def on_validation_start(self) -> None:
        self.ranks.course.mark(VALIDATION)
        self._running.checkpoints.state.begin_validation(self.module.trainer)
        self._running.share_written()
        self._running.share_buffers()
        self._running.steps.begin_evaluation("validation_step")
        self._running.check_replicas()

    @override
    def on_test_start(self) -> None:
        self.ranks.course.mark("a test")
        self._running.share_written()
        self._running.steps.begin_evaluation("test_step")

    @override
    def on_predict_start(self) -> None:
        self.ranks.course.mark("a prediction")
        self._running.share_written()
        self._running.steps.begin_evaluation("predict_step")

    @override
    def on_validation_end(self) -> None:
        self._running.expect_writes()

    @override
    def on_train_end(self) -> None:
        self.ranks.course.mark(END_OF_TRAINING)
        self.starts.end(self.module.trainer)
        self._running.steps.end_training()
        self._running.share_written()
        self._running.training.accumulation.gather.restore_values()
        self._running.share_buffers()
        self._running.check_replicas()

    # ----------------------------------------------------------------------------------------- text

    def engine(
        self,
        options: EngineOptions | None = None,
        *,
        model: nn.Module | None = None,
        stops: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> Engine | OwnGenerate:
        """Return an engine to continue and score texts with the weights of this run, outside of
        steps. Available after the strategy's setup.

        All ranks of a replica call the engine with the same texts. Calls leave training unchanged,
        and the KV cache is freed after each call. A model of ``transformers`` writes by its own
        ``generate``.

        Args:
            options: Sizes. None: the defaults.
            model: The model in the LightningModule. None: the only model.
            stops: Token ids at the end of a text.
            decode: Returns the text of token ids. Needed for stop strings.

        Raises:
            ConfigError: If the module holds no such model or several, or the model cannot write
                text on this layout.
        """
        from megatron_lightning.inference.live.live_engine import live_engine

        def prepare() -> None:
            what = "text by an engine"
            self._refuse_in_step(what, "Write it in a hook after the step.")
            if self.run is not None:  # explicit steps of one stage may, and it asks all ranks
                self.run.steps.participants.collective(what)
            self.wait_for_parameters()

        @contextmanager
        def outside() -> Generator[None, None, None]:
            units = self.part.units
            with (
                nullcontext() if units is None else units.apart(),
                forward_outside_steps(self.precision_plugin),
            ):
                yield

        return live_engine(
            self.module,
            self.part,
            self.context,
            self.executor,
            model=model,
            options=options,
            stops=stops,
            decode=decode,
            forward_context=outside,
            prepare=prepare,
        )

    # ------------------------------------------------------------------------------------ gradients

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped because of infinite or NaN gradients."""
        return self.progress.skipped_steps

    @property
    def consumed_samples(self) -> int:
        """Samples trained on by all data-parallel ranks together, including samples of skipped
        steps. After an exception: until the last update.
        """
        point = None if self.run is None else self.run.interrupted_at()
        return self.progress.consumed_samples if point is None else point.consumed_samples

    @property
    def may_skip_steps(self) -> bool:
        """Whether optimizer steps are skipped for infinite or NaN values."""
        return (
            self.options.non_finite == "skip"
            or getattr(self.precision_plugin, "loss_scale", None) is not None
        )

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last step with clipping by norm. None if
        Lightning clips by itself.
        """
        return (
            self.run.training.norms.last_norm
            if self.run is not None and self.run.has_trained
            else None
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients read by the optimizer, by global name (this rank's
        shards).
        """
        has_trained = self.run is not None and self.run.has_trained
        return self._running.training.accumulation.reducer.gradients() if has_trained else {}

    def _mark_norm(self, call: str) -> None:
        """Record a call of the ranks sharing the gradients, such as the ranks of a replica."""
        for ranks in self._running.training.norms.meeting_ranks():
            self.ranks.course.mark(call, ranks)

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all current gradients over every axis. A collective."""
        self._mark_norm("strategy.gradient_norm()")
        return self._running.training.norms.norm()

    def gradient_norms(
        self, key: Callable[[str], str | None], *, norm_type: float = 2.0
    ) -> dict[str, Tensor]:
        """Return the norms of the current gradients by layer, kind or another key, over every axis.
        A collective of all ranks.

        Every rank receives the keys and norms of the full model. Each parameter counts once: tied
        embeddings, and parameters with equal values on several ranks, too.

        Args:
            key: Maps the global name of a parameter to a key. ``lambda name: name``: a norm for
                each parameter. None as a key leaves the parameter out.
            norm_type: p of the p-norm. ``math.inf`` for the largest absolute value.
        """
        self.ranks.course.mark("strategy.gradient_norms()")
        return self._running.training.norms.norms(key, norm_type=norm_type)

    def gradient_group_norms(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the 2-norm of the gradients of every parameter group, by the group's name or
        number. A collective of all ranks.
        """
        self.ranks.course.mark("strategy.gradient_group_norms()")
        return self._running.training.norms.group_norms(unwrapped(optimizer))

    def rerun_step(self) -> RerunResult:
        """Run the current training step again, and compare losses and gradients with the first run,
        bit by bit. A collective of all ranks, between the last backward pass of a step and the
        update: in ``on_after_backward``, ``on_before_optimizer_step`` or a ``SpikeGuard``.

        Random states, buffers and data are the same as in the first run. The rerun leaves nothing
        behind: the update uses the gradients of the first run, and nothing is logged. On GPUs
        kernels have to be deterministic (``Trainer(deterministic=True)``). Under a loss scale
        (fp16) the losses alone are compared. A step with further state, such as a counter on the
        module, gives other values.

        Raises:
            ConfigError: On all ranks, if no step waits for its update, the module optimizes by
                hand, or the inputs of the step are gone on a rank.
        """
        self.ranks.course.mark("strategy.rerun_step()")
        with self.ranks.streams.in_step():
            return self._running.steps.rerun()

    def num_zero_gradients(self) -> Tensor:
        """Return the number of zero elements in the gradients, over every axis. A collective."""
        self._mark_norm("strategy.num_zero_gradients()")
        return self._running.training.norms.zero_count()

    def wait_for_parameters(self) -> None:
        """Wait until every rank holds the weights of the last step. Needed with
        ``overlap_param_gather`` only.
        """
        if self.run is not None and self.run.has_trained:
            self.run.training.accumulation.gather.wait()
