"""Report at the end of a fit: results, and the next command."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_only

from megatron_lightning.callbacks.counting import num_data_ranks, num_samples, num_tokens
from megatron_lightning.callbacks.progress.last_losses import LastLosses
from megatron_lightning.checkpoint.format.storage import is_remote, local_path


class ClosingSummary(pl.Callback):
    """Print time, speed, last losses, checkpoints and the next command when a fit ends or is
    interrupted.

    The command line adds this callback to ``fit``. Samples and tokens count from this start, over
    all ranks.
    """

    def __init__(self) -> None:
        self.text = ""
        """The printed text. "": nothing printed."""
        self._start_s = 0.0
        self._first_step = 0
        self._samples = 0
        self._tokens = 0
        self._losses = LastLosses()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count."""
        self._start_s = time.monotonic()
        self._first_step = trainer.global_step
        self._samples = self._tokens = 0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch."""
        self._losses.keep(outputs)
        self._samples += num_samples(batch)
        self._tokens += num_tokens(trainer, pl_module, batch, None)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary of a finished fit."""
        self._print(trainer, "finished")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Print the summary of a fit ended early."""
        if self._start_s:
            self._print(trainer, f"ended early ({type(exception).__name__})")

    @rank_zero_only
    def _print(self, trainer: pl.Trainer, how: str) -> None:
        seconds = max(time.monotonic() - self._start_s, 1e-9)
        ranks, steps = num_data_ranks(trainer), trainer.global_step - self._first_step
        lines = [
            f"fit {how} at step {trainer.global_step}: {steps} steps in {_duration(seconds)}, "
            f"{self._samples * ranks / seconds:.4g} samples a second"
            + (f", {self._tokens * ranks / seconds:.4g} tokens a second" if self._tokens else "")
        ]
        losses: list[str] = []
        with suppress(RuntimeError):  # of a device that has failed
            losses = self._losses.texts(trainer)
        if losses:
            lines.append(f"  last losses: {', '.join(losses)}")
        fired: dict[str, int] = getattr(getattr(trainer.strategy, "progress", None), "fired", {})
        if fired:
            counts = ", ".join(f"{name} ({count})" for name, count in sorted(fired.items()))
            lines.append(f"  findings of guards: {counts} (docs/differences.md)")
        is_finished = how == "finished"
        best, last = _checkpoints(trainer, is_finished)
        if best:
            lines.append(f"  best checkpoint: {best}")
        if last and last != best:
            lines.append(f"  last checkpoint: {last}")
        # A start from "last" goes on with the logs of this start.
        resumed = "last" if last in (c.last_model_path for c in _savers(trainer)) else last
        command = next_command(sys.argv, is_finished, (best or last) if is_finished else resumed)
        # Without validation data there is nothing to run next.
        if command and last and (not is_finished or any(trainer.num_val_batches)):
            lines.append(f"  next: {command}")
        self.text = "\n".join(lines)
        print(self.text, flush=True)


def next_command(argv: list[str], is_finished: bool, checkpoint: str) -> str:
    """Return the command line to run next: to validate a checkpoint, or to resume. "": unknown.

    Args:
        argv: Of this process.
        is_finished: Whether the fit has finished.
        checkpoint: Path, or "last".
    """
    if len(argv) < 2 or argv[1] != "fit":
        return ""
    options = [word for word in argv[2:] if not word.startswith("--ckpt_path=")]
    if "--ckpt_path" in options:
        place = options.index("--ckpt_path")
        options[place : place + 2] = []
    verb = "validate" if is_finished else "fit"
    return shlex.join(["megatron-lightning", verb, *options, "--ckpt_path", checkpoint])


def _checkpoints(trainer: pl.Trainer, is_finished: bool) -> tuple[str, str]:
    """Return the best and the newest checkpoint saved by callbacks. "": none.

    Lightning notes a path before it saves, so that a failed save leaves a path without a
    checkpoint. After a finished fit, a save in the background may still be writing one.
    """
    saved = _savers(trainer)
    names = [c.best_model_path for c in saved if c.monitor]
    best = next((path for path in names if path and (is_finished or _exists(path))), "")
    steps = [(vars(c).get("_last_global_step_saved", 0), _newest(c, is_finished)) for c in saved]
    _, last = max(((step, path) for step, path in steps if path), default=(0, ""))
    return best, last


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _newest(callback: ModelCheckpoint, is_finished: bool) -> str:
    """Return the newest checkpoint of a callback, with ``save_last`` and without. "": none."""
    last = callback.last_model_path
    if last and (is_finished or _exists(last)):
        return last
    return str(vars(callback).get("_last_checkpoint_saved", ""))


def _exists(path: str) -> bool:
    return is_remote(path) or local_path(path).exists()


def _duration(seconds: float) -> str:
    hours, seconds_left = divmod(round(seconds), 3600)
    minutes, seconds_of_minute = divmod(seconds_left, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds_of_minute} s" if minutes else f"{seconds:.1f} s"
