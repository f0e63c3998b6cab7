"""The only file with access to Lightning's private API: a public name here for each private name
there.

Checked with Lightning 2.6.6. Subclasses of Lightning's classes keep the private names of
methods called or overridden on themselves. ``tests/project/test_house.py`` lists these names, and
finds private names of Lightning in other files.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, sized_len

# Creates the default process group and has the group destroyed at exit, as Lightning's own
# strategies do.
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group

# Threads for each process, unless the user has set OMP_NUM_THREADS. Lightning's own launchers call
# the same function.
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as share_threads
from lightning.fabric.utilities.exceptions import MisconfigurationException

# Moves the states of optimizers made before the module had its device.
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device

# All random states seeded by Lightning.
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.plugins.precision import Precision

# Lightning has no public launchers. Lightning's launchers start the processes, and ours watch the
# processes.
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs

# How the learning rate finder leaves ``fit`` on purpose: not a failure.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Sampler

__all__ = [  # besides the functions below
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "TunerExit",
    "init_process_group",
    "optimizers_to_device",
    "random_states",
    "set_random_states",
    "share_threads",
]

# Functions of Lightning that raise ValueError and TypeError for settings. Elsewhere both may be
# bugs and need a traceback.
_READS_SETTINGS = re.compile(
    r"lightning\.pytorch\.(trainer\.trainer|callbacks\..*|loggers\..*)\.__init__"
    r"|lightning\.pytorch\.trainer\.connectors\.(accelerator_connector\..*|checkpoint_connector\._parse_ckpt_path)"
    r"|lightning\.pytorch\.loops\.fit_loop\.setup_data"
    r"|lightning\.pytorch\.callbacks\.gradient_accumulation_scheduler\.on_train_start"
    r"|lightning\.fabric\.(accelerators|utilities\.device_parser|utilities\.seed)\..*"
)


_GUARDS = ("assembly.state.saving_guard", "guards.part_saving")


def refuses_settings(error: BaseException) -> bool:
    """Whether ``error`` is Lightning's report of unusable settings. The error's text is then all
    a user needs.
    """
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the last frame has raised the error
        where = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    if isinstance(error, ValueError | TypeError):
        return _READS_SETTINGS.fullmatch(where) is not None
    return where.startswith("lightning.") and isinstance(
        error, MisconfigurationException | ModuleNotFoundError
    )


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the module's Trainer, or None. The public property raises without a Trainer."""
    return module._trainer


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh``. Lightning does so only for ModelParallelStrategy."""
    module._device_mesh = mesh


def connector_of(trainer: pl.Trainer) -> Any:
    """Return the Trainer's connector, holder of the cluster environment and
    ``use_distributed_sampler``.
    """
    return trainer._accelerator_connector


def trainer_sizes() -> tuple[Any, int] | None:
    """Return ``devices`` and ``num_nodes`` as the user passed them to the calling Trainer's
    constructor. None: no Trainer constructor is on the stack.

    The Trainer resolves "auto" before it tells the strategy, and keeps no record of the original.
    """
    code = inspect.unwrap(pl.Trainer.__init__).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else (frame.f_locals["devices"], frame.f_locals["num_nodes"])


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch just run was not the last batch of an optimizer step."""
    return bool(trainer.fit_loop._should_accumulate())


def steps_nothing(optimizers: Sequence[object]) -> bool:
    """Whether ``configure_optimizers`` returned None."""
    return all(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers)


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Whether the loggers receive the values of the optimizer step about to end. Decided by the
    Trainer's ``log_every_n_steps`` alone, equal on every rank.
    """
    interval = int(vars(trainer)["log_every_n_steps"])  # set from another class
    return interval > 0 and num_logged_steps(trainer) % interval == 0


def num_logged_steps(trainer: pl.Trainer) -> int:
    """Return the loggers' count of steps over this fit and earlier fits, including the step about
    to end.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped) + 1


def next_logged_step(trainer: pl.Trainer) -> int:
    """Return the step number of the first values logged by a starting fit.

    A save in the middle of an epoch has not counted the current step. The loop adds this step when
    the loop begins.
    """
    loop = trainer.fit_loop.epoch_loop
    is_uncounted = (
        loop.restarting
        and not loop._should_accumulate()
        and (loop.restarted_on_train_batch_end or not loop.restarted_on_last)
    )
    return int(loop._batches_that_stepped) + is_uncounted


def put_around_hooks(
    plugin: Precision, around: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Call the hooks before an optimizer step, clipping among them, inside of ``around()``. Return
    the undo.
    """
    original = type(plugin)._after_closure

    def after_closure(model: pl.LightningModule, optimizer: Any) -> None:
        with around():
            original(plugin, model, optimizer)

    vars(plugin)["_after_closure"] = after_closure
    return lambda: vars(plugin).pop("_after_closure", None)


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether Lightning's loop leaves out backward, as StochasticWeightAveraging requests while
    counting for batch norm.
    """
    return bool(trainer.fit_loop._skip_backward)


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of ``fit`` after :meth:`process_dataloader`. The public property returns
    nested loaders.
    """
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def known_metrics(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the metrics that callbacks have seen last. The public property computes metrics of the
    running epoch, which may wait for other ranks.
    """
    return dict(trainer._logger_connector._callback_metrics)


def evaluation_batches(trainer: pl.Trainer) -> list[int | float]:
    """Return the number of batches in the validation, test or prediction about to begin: for each
    loader in turn, or a single number for loaders read side by side.
    """
    loop: Any = trainer._active_loop
    combined = loop._combined_loader
    if combined._mode == "sequential":
        return list(loop.max_batches)
    together = sized_len(combined)
    return [float("inf") if together is None else together]


def restart_fetching(trainer: pl.Trainer) -> None:
    """Restart reading the training data: the fetcher of an epoch has read ahead before
    ``on_train_start``.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    iter(fetcher)


def load_loader_states(trainer: pl.Trainer) -> None:
    """Load the states of loaders that Lightning has left out, and restart reading.

    Lightning loads the states when it makes the loaders. Loaders made before the checkpoint was
    read (``trainer.estimated_stepping_batches`` makes them) and loaders at the end of an epoch
    would begin anew.
    """
    loop = trainer.fit_loop
    states, combined = loop._combined_loader_states_to_load, loop._combined_loader
    if states and combined is not None:
        combined._load_state_dicts(states)
        vars(loop)["_combined_loader_states_to_load"] = []
        restart_fetching(trainer)


def enter_pass(trainer: pl.Trainer) -> None:
    """Read one batch beside the fetcher's count, so that loaders enter the pass of their restored
    states. The next pass can begin only afterwards.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if fetcher.length is not None:  # otherwise the fetcher has read ahead
        next(fetcher.iterator, None)


def end_epoch(trainer: pl.Trainer) -> None:
    """Make a resumed epoch without remaining batches end, instead of reading further batches."""
    vars(trainer.fit_loop.epoch_loop.val_loop)["_has_run"] = True


def forget_restart(trainer: pl.Trainer) -> None:
    """Make the next epoch begin with its first batch. Lightning's loop forgets a restart in the
    first batch, and the resumed epoch may have none.
    """
    trainer.fit_loop.epoch_loop.restarting = False


def begin_epoch(trainer: pl.Trainer) -> None:
    """Make a resumed run between two epochs begin the next epoch as after an epoch of its own."""
    forget_restart(trainer)
    vars(trainer.fit_loop)["_resuming_from_checkpoint"] = False


def is_reading(trainer: pl.Trainer) -> bool:
    """Whether the training loaders are open: from their making to the teardown of a fit."""
    return trainer.fit_loop._data_fetcher is not None


def loop_state(loop: _Loop, prefix: str = "") -> dict[str, Any]:
    """Return ``loop.state_dict()``, whose copies take five times as long."""
    state: dict[str, Any] = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            state[f"{prefix}{name}"] = _counts(value)
        elif isinstance(value, _Loop):
            state |= loop_state(value, f"{prefix}{name}.")
    return state


def _counts(progress: _BaseProgress) -> dict[str, Any]:
    return {
        name: _counts(value) if isinstance(value, _BaseProgress) else value
        for name, value in vars(progress).items()
    }


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the batch just run, apart from a validation that a run validates
    with because it stops early.
    """
    loop, stops_early = trainer.fit_loop, trainer.should_stop
    fetcher: Any = loop._data_fetcher
    trainer.should_stop = False
    try:
        return loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stops_early


def has_full_schedulers(trainer: pl.Trainer) -> bool:
    """Whether no step of a learning-rate scheduler is under way."""
    progress = trainer.fit_loop.epoch_loop.scheduler_progress.total
    return progress.ready == progress.completed


def seconds_between_validations(trainer: pl.Trainer) -> float | None:
    """Return ``val_check_interval`` if the interval is a time. None if the interval counts
    batches.
    """
    interval: float | None = getattr(trainer, "_val_check_time_interval", None)
    return interval


def validated_at(trainer: pl.Trainer) -> float:
    """Return the monotonic time of the last validation, or of the start of training. Lightning
    counts from this time to the next validation.

    Lightning's loops set the attribute. No class declares the attribute.
    """
    return float(vars(trainer)["_last_val_time"])


def set_validated_at(trainer: pl.Trainer, seconds: float) -> None:
    """Set the monotonic start time of Lightning's count to the next validation."""
    vars(trainer)["_last_val_time"] = seconds


def note_sigterm(trainer: pl.Trainer) -> None:
    """Make the handler of SIGTERM only record the signal and forward the signal to the launcher's
    processes.

    Lightning's handler also broadcasts. In the middle of a step, a broadcast waits forever for
    ranks already waiting for this rank. Lightning's loops share the record before every batch.
    """
    # A partial can be pickled with the Trainer.
    vars(trainer._signal_connector)["_sigterm_notifier_fn"] = partial(_note_sigterm, trainer)


def _note_sigterm(trainer: pl.Trainer, signum: int, frame: FrameType | None) -> None:
    # Print may be under way.
    os.write(2, f"[rank: {trainer.global_rank}] Received SIGTERM: {signum}\n".encode())
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if launcher is not None and not connector.received_sigterm:
        launcher.kill(signum)
    connector.received_sigterm = True


def note_requeue(trainer: pl.Trainer, record: Callable[[int, FrameType | None], None]) -> None:
    """Make ``record`` the handler of Slurm's requeue signal in place of Lightning's own handler,
    which saves inside of the handler.
    """
    vars(trainer._signal_connector)["_slurm_sigusr_handler_fn"] = record


def ignore_after_run(trainer: pl.Trainer, signum: int) -> None:
    """Ignore a signal after the Trainer has restored the handlers from before the run."""
    trainer._signal_connector._original_handlers[signum] = signal.SIG_IGN


def name_of_log(logger: Logger) -> str | None:
    """Return the name chosen for a log, without beginning a run.

    The ``name`` of MLflow's logger is the id of the experiment, and reading ``name`` begins a run.
    """
    attributes = vars(logger)
    return attributes["_experiment_name"] if "_mlflow_client" in attributes else logger.name


def has_version(logger: Logger) -> bool:
    """Whether a logger's version was set, or cannot be set here."""
    return vars(logger).get(_name_of_version(logger), "") is not None


def has_experiment(logger: Logger) -> bool:
    """Whether a logger has begun to log."""
    return vars(logger).get("_experiment") is not None


def set_version(logger: Logger, version: Any) -> None:
    """Make a logger without a version continue the log of an earlier run.

    Args:
        logger: Has written nothing yet.
        version: The logger's ``version`` in the earlier run: a number or name of a folder, or an id
            of W&B or MLflow. None: begin a new log.
    """
    attributes = vars(logger)
    attributes[_name_of_version(logger)] = version
    if "_wandb_init" in attributes:
        attributes["_wandb_init"].update(id=version, resume="allow")


def _name_of_version(logger: Logger) -> str:
    """Return the attribute of a logger that holds the version."""
    if "_wandb_init" in vars(logger):
        return "_id"
    return "_run_id" if "_mlflow_client" in vars(logger) else "_version"


def trainer_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the dict handed to the strategy by ``trainer.save_checkpoint``."""
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def chosen_checkpoint(trainer: pl.Trainer, path: str) -> str | None:
    """Return the checkpoint to be loaded by the Trainer for a ``ckpt_path`` such as "last". None:
    the Trainer loads nothing.

    Args:
        trainer: The Trainer.
        path: The argument. Empty if the user left the argument out.
    """
    connector, fn = trainer._checkpoint_connector, trainer.state.fn
    if fn is None or path not in ("", "best", "last", "hpc"):
        return path or None
    if not path and connector._user_managed:
        return None if trainer.ckpt_path is None else str(trainer.ckpt_path)
    with warnings.catch_warnings():  # repeated when the Trainer asks
        warnings.simplefilter("ignore")
        try:
            # As with a model: without a model Lightning itself announces "best".
            path_found = connector._parse_ckpt_path(fn, path or None, True, True)
        except (ValueError, MisconfigurationException):
            return None  # there is no such checkpoint, as the Trainer will say
    return None if path_found is None else str(path_found)


def requeue_path(trainer: pl.Trainer) -> str:
    """Return the next ``hpc_ckpt_<n>.ckpt``, the file sought by a job that Slurm has queued
    again.
    """
    return str(trainer._checkpoint_connector.hpc_save_path(str(trainer.default_root_dir)))


def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Return the folder of ``callback``. ``callback.dirpath`` is None until ``setup`` has run."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


class SavesBeside(ModelCheckpoint):
    """A ModelCheckpoint that saves beside the run's other checkpoints, unless ``dirpath`` is set.

    Lightning gives every callback without ``dirpath`` the folder of the log, and the next start
    does not know that folder.
    """

    def _ModelCheckpoint__resolve_ckpt_dir(self, trainer: pl.Trainer) -> str:
        """Return the folder. Called by ``setup``, and in the search for "last" before ``setup``."""
        for other in () if self.dirpath is not None else trainer.checkpoint_callbacks:
            if not isinstance(other, ModelCheckpoint) or isinstance(other, SavesBeside):
                continue
            if other.dirpath is not None and self._takes(str(other.dirpath)):
                return str(other.dirpath)
        return str(super()._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[misc]

    def _takes(self, folder: str) -> bool:
        """Return whether a folder can hold the checkpoint."""
        return True


def uploads_checkpoints(logger: Logger) -> bool:
    """Whether a logger is asked to upload the checkpoints of ModelCheckpoint, for loggers with this
    option.
    """
    # A DummyLogger has every attribute.
    return getattr(logger, "_log_model", False) in (True, "all")


def saves_or_loads() -> bool:
    """Whether Lightning makes or reads a checkpoint, or Lightning or this package is the caller.

    The caller is the first frame outside of torch. A user's hook during the making of a checkpoint
    is recognized further up the stack. Lightning announces neither case to the module or the
    strategy, and only a warning depends on the answer. So a look at the stack is enough.
    """
    frame, caller = sys._getframe(1), ""
    above: FrameType | None = frame
    while above is not None:
        module = str(above.f_globals.get("__name__"))
        if module.endswith("connectors.checkpoint_connector"):
            return True
        is_between = module in {__name__, "functools"} or module.startswith("torch.")
        if not caller and not (is_between or module.endswith(_GUARDS)):
            caller = module
        above = above.f_back
    return caller.startswith(("lightning.", "pytorch_lightning.", "megatron_lightning."))


class _OfFolder(dict[str, Any]):
    """The checkpoint in a directory."""

    folder: str


def read_folders(
    read: Callable[[Any], AbstractContextManager[Any]],
    check: Callable[[Mapping[Any, Any], type, str], None],
    load_module: Callable[[Mapping[Any, Any], Callable[..., Any]], Any],
) -> None:
    """Make ``load_from_checkpoint`` read directories, opened as files by ``read``, for the life of
    the process. The method is a classmethod of the user's class, and Lightning has no hook between
    the method and the open file. ``check`` sees a directory's checkpoint, with the user's class and
    the directory, before Lightning makes the object. ``load_module`` sees the checkpoint of a
    module, also in a plain file, and calls Lightning's function with changed options.
    """
    original, original_state = vars(saving)["pl_load"], vars(saving)["_load_state"]
    if getattr(original, "reads_folders", False):
        return

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not (isinstance(path, str | os.PathLike) and os.path.isdir(path)):
            return original(path, map_location=map_location, weights_only=weights_only)
        with read(path) as file:
            state = original(file, map_location=map_location, weights_only=weights_only)
        checkpoint = _OfFolder(state)
        checkpoint.folder = str(path)
        return checkpoint

    def load_state(cls: type, checkpoint: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(checkpoint, _OfFolder):
            check(checkpoint, cls, checkpoint.folder)
        if settings.get("strict") is False or not issubclass(cls, pl.LightningModule):
            return original_state(cls, checkpoint, *args, **settings)

        def load_object(**changed: Any) -> Any:
            return original_state(cls, checkpoint, *args, **{**settings, **changed})

        return load_module(checkpoint, load_object)

    vars(load)["reads_folders"] = True
    vars(saving).update(pl_load=load, _load_state=load_state)


def hide_sync_advice() -> Callable[[], None]:
    """Hide Lightning's advice to log with ``sync_dist=True``, given whenever process groups exist.
    Return the undo.
    """
    return _hide(r"It is recommended to use `self\.log", PossibleUserWarning)


def hide_repeated_data() -> Callable[[], None]:
    """Hide Lightning's warning of data that come again after a resume, for data that continue.
    Return the undo.
    """
    # Lightning looks for state_dict on loaders, not on samplers.
    return _hide("You're resuming from a checkpoint that ended before the epoch ended", Warning)


def _hide(message: str, category: type[Warning]) -> Callable[[], None]:
    warnings.filterwarnings("ignore", message, category)
    hidden = warnings.filters[0]

    def undo() -> None:
        if hidden in warnings.filters:
            warnings.filters.remove(hidden)  # type: ignore[attr-defined]

    return undo


class FullSummary:
    """Lightning's summary of a module at one time. The summary does not keep the module's layers
    alive.

    Args:
        callback: Makes the summary.
        trainer: The module's.
        module: The LightningModule.
    """

    def __init__(
        self, callback: ModelSummary, trainer: pl.Trainer, module: pl.LightningModule
    ) -> None:
        summary = callback._summary(trainer, module)
        self._data = summary._get_summary_data()
        self.total_parameters = summary.total_parameters
        self.trainable_parameters = summary.trainable_parameters
        self.model_size = summary.model_size
        self.total_training_modes = summary.total_training_modes

    def _get_summary_data(self) -> Any:
        return self._data


def replace_summary(
    callback: ModelSummary, summary: FullSummary, summarize: Callable[..., None]
) -> Callable[[], None]:
    """Show ``summary`` in place of the callback's own, through ``summarize``. Return the undo."""
    vars(callback).update(_summary=lambda *_: summary, summarize=summarize)

    def undo() -> None:
        for name in ("_summary", "summarize"):
            vars(callback).pop(name, None)

    return undo


def with_sampler(
    loader: DataLoader[Any], sampler: Sampler[int], mode: RunningStage | None = None, **options: Any
) -> DataLoader[Any]:
    """Rebuild ``loader`` with another sampler, for any arguments of the loader's class. ``options``
    replace further arguments.
    """
    args, arguments = _get_dataloader_init_args_and_kwargs(loader, sampler, mode)
    copy: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, *args, **{**arguments, **options})
    return copy


def unwrapped_batch_sampler(loader: DataLoader[Any]) -> Any:
    """Return the loader's own batch sampler. For ``predict``, Lightning wraps the batch sampler to
    record the indices of every batch.
    """
    return getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
