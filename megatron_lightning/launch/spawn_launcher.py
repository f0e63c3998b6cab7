"""Run every rank of this node as a worker process, spawned or forked from this process. This
process itself is no rank.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessException

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.arguments import checked_arguments
from megatron_lightning.launch.failures import is_explained, report_failure
from megatron_lightning.launch.hooks import LaunchHooks
from megatron_lightning.launch.worker_reports import WorkerReports
from megatron_lightning.lightning_internals.processes import MultiProcessingLauncher
from megatron_lightning.resilience.failure import PeerFailure, replace_traceback
from megatron_lightning.resilience.processes import LINGER_S, print_failure
from megatron_lightning.resilience.restart import restarts_in_process
from megatron_lightning.resilience.workers import watched_workers, worker_process
from megatron_lightning.step.agreed_stop import AgreedStop


class WorkerLauncher(MultiProcessingLauncher):
    """Runs every rank of this node as a worker process, which also works in a notebook (``fork``)
    and under pytest.

    Args:
        strategy: Lightning's base class reads sizes from the strategy, and reads and writes the
            module's weights through the strategy.
        start_method: ``"spawn"`` or ``"fork"``.
        hooks: Functions to call.
    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Literal["spawn", "fork"], hooks: LaunchHooks
    ) -> None:
        super().__init__(strategy, start_method)
        self._hooks = hooks
        self._reports: WorkerReports | None = None

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the workers, wait for all workers, and return the result of rank 0.

        Raises:
            ConfigError: If the module cannot be run this way. Raised before any process is started.
                A worker's error with a sufficient message is raised here unchanged.
            torch.multiprocessing.ProcessRaisedException: With a worker's traceback.
            torch.multiprocessing.ProcessExitedException: For a killed worker.
            KeyboardInterrupt: If this process or a worker was interrupted.
        """
        if restarts_in_process():
            raise ConfigError(
                "restarts in the processes need processes that run the program, and "
                "start_method spawn or fork starts workers, which end with the run. Set "
                'start_method to "popen", or start with torchrun or Slurm.'
            )
        args, kwargs = checked_arguments(trainer, args, kwargs, self._hooks)
        self.procs = []
        with tempfile.TemporaryDirectory(prefix="megatron_lightning-") as folder:
            reports = self._reports = WorkerReports(folder)

            def on_failure(local_rank: int, how: str) -> None:
                if not reports.has(local_rank):
                    print_failure(local_rank, how)

            try:
                with watched_workers(lambda: self.procs, on_failure):
                    return super().launch(function, *args, trainer=trainer, **kwargs)
            # torch.multiprocessing knows one worker's text. The reports know the first error
            # itself.
            except ProcessException as failed:
                error = reports.error()
                if error is None:
                    raise
                replace_traceback(error)
                raise error from failed
            finally:
                self._reports = None

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """Send the weights of all ranks to the starting process, not only the first worker's
        weights.
        """
        output = super()._collect_rank_zero_results(trainer, results)
        if trainer.state.fn == TrainerFn.FITTING:
            module_state = self._hooks.full_module_state()
            if module_state is not None and output is not None and output.weights_path is not None:
                self._strategy.checkpoint_io.save_checkpoint(module_state, output.weights_path)
        return output

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        """Take over the weights, unless the workers have stopped on request.

        Raises:
            AgreedStop: As the workers did.
        """
        stop = None if self._reports is None else self._reports.error()
        if stop is not None:
            raise stop
        super()._recover_results_in_main_process(worker_output, trainer)

    def _wrapping_function(  # noqa: PLR0917  # Lightning's signature
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        *more: Any,
    ) -> None:
        with worker_process(self._hooks.write_logs):
            try:
                super()._wrapping_function(
                    process_idx, trainer, function, args, kwargs, return_queue, *more
                )
            except AgreedStop as stop:
                # Another exit code would count as a failure and end the other workers.
                self._strategy.teardown()
                self._hooks.write_logs()
                if self._reports is not None:
                    self._reports.write(process_idx, stop)
                if process_idx == 0:
                    return_queue.put(None)  # the starter waits for a result
            # The Trainer's own handling stays in the starting process.
            except BaseException as error:
                self._leave(process_idx, error)
                raise

    def _leave(self, local_rank: int, error: BaseException) -> None:
        """Report this failure to the other ranks, and break the connections of waiting ranks.

        Raises:
            PeerFailure: If this rank fails only because another rank has failed.
        """
        watch = self._hooks.failure_watch()
        if watch is None:
            return
        follows = report_failure(watch, error, prints_traceback=False)
        if self._reports is not None:
            explained = is_explained(error) and not follows
            self._reports.write(local_rank, error if explained else None)
        self._hooks.write_logs()
        compat.abort_process_groups()
        compat.at_end_of_main_thread(gc.freeze)  # as in ScriptLauncher
        if follows:
            time.sleep(LINGER_S)
            raise PeerFailure(1) from None
