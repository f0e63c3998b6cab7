"""Watch losses and gradient norms for spikes: warn, skip the step, or stop and pass over data."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.callbacks.clock import OwnTime
from megatron_lightning.callbacks.counting import log_values
from megatron_lightning.checkpoint.format.storage import completed_file
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError, SpikeError
from megatron_lightning.strategies.megatron import MegatronStrategy

Action = Literal["warn", "skip", "stop"]
RECORD = "spikes.json"
_NAMES = ("loss", "gradient norm")


class SpikeGuard(pl.Callback):
    """Compare the loss and the gradient norm of every step, before the update, with the values of
    the last steps.

    A step is a spike if the loss or the norm lies more than ``sigma`` standard deviations above the
    mean of the last ``window`` steps (OLMo's rule, upper side only), or is not finite. The loss is
    the mean over micro-batches, accumulated batches and all ranks. The norm is the norm before
    clipping. Every rank therefore decides alike. The number of spikes so far is logged as
    ``spikes``.

    * ``warn``: the step is taken.
    * ``skip``: weights, optimizer state and schedules stay unchanged. ``max_skips`` in a row end
      the run with an error, since the level has changed.
    * ``stop``: the run ends with an error and exit code 1. The next resuming start of the run with
      this callback passes over the samples of ``skip_steps`` steps up to the spike, as far as the
      samples lie behind the checkpoint. Skipped samples are consumed without training. The file
      ``spikes.json`` in ``default_root_dir`` records the samples under the id of the run.

    With ``rerun``, the step of a spike runs again first, and the message says whether values are
    the same (``strategy.rerun_step``). A ``stop`` then has the exit code 16 for the same values, or
    17 for other values. After other values the next start trains on all samples, since the data are
    not the cause.

    The values of the window are kept in checkpoints. The verdict needs a small collective, and the
    host waits for the gradients of the step.

    Args:
        window: Number of last steps to compare with.
        sigma: Standard deviations above the mean.
        min_steps: Steps before the first comparison.
        action: Response to a spike.
        max_skips: Skipped steps accepted in a row.
        skip_steps: Number of steps to pass over after a stop.
        rerun: Whether the step of a spike runs again, to tell broken hardware from wrong data.

    Raises:
        ConfigError: If a value cannot be used.
    """

    def __init__(
        self,
        window: int = 128,
        sigma: float = 6.0,
        min_steps: int = 64,
        action: Action = "warn",
        *,
        max_skips: int = 10,
        skip_steps: int = 100,
        rerun: bool = False,
    ) -> None:
        counts = {
            "window": window,
            "min_steps": min_steps,
            "max_skips": max_skips,
            "skip_steps": skip_steps,
        }
        for name, count in counts.items():
            if not is_count(count):
                raise ConfigError(f"{name} is {count!r}; it must be a positive integer.")
        if sigma <= 0:
            raise ConfigError(f"sigma is {sigma}; it must be positive.")
        if not 2 <= min_steps <= window:
            raise ConfigError(
                f"min_steps is {min_steps} and window is {window}. Set min_steps to 2 or more, and "
                "to the window or less."
            )
        if action not in get_args(Action):
            raise ConfigError(f"action is {action!r}; it must be one of {get_args(Action)}.")
        self.window = window
        self.sigma = sigma
        self.min_steps = min_steps
        self.action = action
        self.max_skips = max_skips
        self.skip_steps = skip_steps
        self.rerun = rerun
        self.judges_updates = True
        """Whether the strategy asks this callback about updates."""
        self.skip_samples: list[list[int]] = []
        """Ranges of samples passed over by this start."""
        self.spikes = 0
        """Spikes so far, over resumes."""
        self._values: tuple[deque[float], deque[float]] = (
            deque(maxlen=window),
            deque(maxlen=window),
        )
        self._skips_in_a_row = 0
        self._steps: deque[int] = deque(maxlen=skip_steps + 1)  # samples consumed when each began
        self._own = OwnTime()

    @property
    def overhead(self) -> float:
        """Share of the training time spent in the comparison."""
        return self._own.share

    # --------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the window."""
        return {"values": [list(values) for values in self._values], "spikes": self.spikes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the values of a checkpoint."""
        for values, saved in zip(self._values, state_dict["values"], strict=True):
            values.clear()
            values.extend(saved)
        self.spikes = state_dict["spikes"]

    # ---------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the strategy and the module."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ConfigError(
                "SpikeGuard asks MegatronStrategy for the loss and the gradient norm before an "
                f"update, and the Trainer has a {type(trainer.strategy).__name__}. Set strategy to "
                "megatron, or remove the callback."
            )
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "SpikeGuard judges one update for each loss, and the module optimizes by hand. "
                "Remove the callback."
            )
        self.skip_samples = []

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the samples to pass over in a fit resumed after a stop."""
        strategy = trainer.strategy
        if trainer.state.fn != TrainerFn.FITTING or not isinstance(strategy, MegatronStrategy):
            return
        # Rank 0 reads for all ranks: ranks that pass over different samples would wait forever.
        record = _read_record(trainer) if trainer.is_global_zero else {}
        own: dict[str, Any] = strategy.broadcast(record.get(strategy.progress.run["id"], {}))
        self.skip_samples = own.get("skip_samples", [])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count."""
        self._own.start()
        self._steps.clear()
        self._skips_in_a_row = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the step's first position in the data."""
        if batch_idx % trainer.accumulate_grad_batches == 0 and isinstance(
            trainer.strategy, MegatronStrategy
        ):
            self._steps.append(trainer.strategy.consumed_samples)

    def allows_update(self, trainer: pl.Trainer, loss: float, gradient_norm: float) -> bool:
        """Return whether the optimizer may step. The strategy asks.

        Raises:
            SpikeError: On every rank, if the run is to stop.
        """
        with self._own.counted():
            spikes = [
                text
                for name, value, values in zip(
                    _NAMES, (loss, gradient_norm), self._values, strict=True
                )
                if (text := self._spike(name, value, values))
            ]
            # A skipped value must not widen the range of normal values.
            if not spikes or self.action == "warn":
                for value, values in zip((loss, gradient_norm), self._values, strict=True):
                    if math.isfinite(value):
                        values.append(value)
            if not spikes:
                self._skips_in_a_row = 0
                return True
            self.spikes += 1
            log_values(trainer, {"spikes": self.spikes}, "")
        what = f"step {trainer.global_step}: {' and '.join(spikes)}"
        if self.rerun and isinstance(trainer.strategy, MegatronStrategy):
            return self._respond_to_rerun(trainer, trainer.strategy, what)
        return self._respond(trainer, what)

    def _respond_to_rerun(self, trainer: pl.Trainer, strategy: MegatronStrategy, what: str) -> bool:
        result = strategy.rerun_step()
        if self.action != "stop":
            return self._respond(trainer, f"{what}; {result}")
        if result.reproducible:
            samples = self._record(trainer, strategy)
            what = f"{what}. The next start passes over the samples {samples[0]} to {samples[1]}"
        result.end_run(f"SpikeGuard: {what}")

    def _spike(self, name: str, value: float, values: deque[float]) -> str:
        """Describe why a value is a spike. "": the value is no spike."""
        if not math.isfinite(value):
            return f"{name} {value}"
        if len(values) < self.min_steps:
            return ""
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        if value - mean <= self.sigma * deviation:
            return ""
        return (
            f"{name} {value:.4g} where the last {len(values)} steps had {mean:.4g} with a standard "
            f"deviation of {deviation:.2g}"
        )

    def _respond(self, trainer: pl.Trainer, what: str) -> bool:
        if self.action == "warn":
            rank_zero_warn(f"SpikeGuard: {what}. The step is taken.")
            return True
        if self.action == "skip":
            self._skips_in_a_row += 1
            if self._skips_in_a_row > self.max_skips:
                raise SpikeError(
                    f"SpikeGuard: {what}; {self._skips_in_a_row} steps in a row were skipped: the "
                    "level has changed. Resume from an older checkpoint with other data or a lower "
                    'learning rate, or set action="warn".'
                )
            rank_zero_warn(f"SpikeGuard: {what}. The step is skipped.")
            return False
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise SpikeError(
                f"SpikeGuard: {what}. A {type(trainer.strategy).__name__} counts no samples, so "
                "that the next start passes over none. Name the samples to pass over in "
                "skip_samples of the data module, or set strategy to megatron."
            )
        samples = self._record(trainer, trainer.strategy)
        raise SpikeError(
            f"SpikeGuard: {what}. Start the same command again: a start that resumes passes over "
            f"the samples {samples[0]} to {samples[1]}, up to the spike."
        )

    def _record(self, trainer: pl.Trainer, strategy: MegatronStrategy) -> list[int]:
        """Record the samples to pass over at the next start. Return these samples."""
        begin = list(self._steps)[-self.skip_steps :]
        samples = [begin[0] if begin else 0, strategy.consumed_samples]
        if trainer.is_global_zero:
            own = {"skip_samples": [*self.skip_samples, samples]}
            record = {**_read_record(trainer), strategy.progress.run["id"]: own}
            with completed_file(_record_path(trainer)) as file:
                file.write(json.dumps(record, indent=1).encode())
        return samples


def _read_record(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the samples to pass over, by the ids of runs."""
    path = _record_path(trainer)
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text())
    except ValueError:
        record = None
    if not isinstance(record, dict) or not all(isinstance(own, dict) for own in record.values()):
        rank_zero_warn(
            f"{path} is no record of spikes by runs, as this release writes it, and is left out. "
            "Name the samples to pass over in skip_samples of the data module."
        )
        return {}
    return record


def _record_path(trainer: pl.Trainer) -> Path:
    return Path(str(trainer.default_root_dir)) / RECORD
