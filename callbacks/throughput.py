"""Log the speed of training: step time, tokens and FLOPs a second, MFU, samples and tokens
consumed, time to finish.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.callbacks.clock import Clock, Mark, OwnTime
from megatron_lightning.callbacks.counting import (
    log_values,
    num_data_ranks,
    num_samples,
    num_tokens,
    transformer_config,
    values_of_ranks,
)
from megatron_lightning.callbacks.device_peak import DevicePeak, device_peak
from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import is_accumulating, is_logging_step
from megatron_lightning.planning import flops
from megatron_lightning.strategies.megatron import MegatronStrategy

_IN_PROGRESS_BAR = (
    "step_time",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "time_to_finish_s",
)
_NAMES = (
    *_IN_PROGRESS_BAR,
    "samples_per_second",
    "tokens_per_second_per_device",
    "consumed_samples",
    "consumed_tokens",
)


@dataclass
class _Step:
    """An optimizer step on this rank."""

    spans: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Time of the step's batches, without the time between batches."""
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0


class ThroughputMonitor(pl.Callback):
    """Log ``throughput/step_time`` and the speeds of the full job, every ``log_every_n_steps``.

    | key after ``throughput/`` | value |
    |---|---|
    | ``step_time`` | seconds of an optimizer step |
    | ``samples_per_second``, ``tokens_per_second`` | of all ranks together |
    | ``tokens_per_second_per_device`` | ``tokens_per_second`` divided by the number of ranks |
    | ``tflops_per_device`` | FLOPs of the model (``planning.flops``), in TFLOP/s of a rank |
    | ``mfu`` | model FLOP/s divided by the device's peak for the precision's number format |
    | ``consumed_samples``, ``consumed_tokens`` | since the start of training, over resumes |
    | ``time_to_finish_s`` | seconds until ``max_steps`` or ``max_epochs``, pauses included |

    Values are means over the last ``window`` steps and over all ranks, the same on every rank. The
    time of a step covers the batches of the step (waiting for data included) without validation and
    saves. The first step connects and compiles, and is left out. Each sample and token counts once,
    padding included, for any number of ranks sharing the sample. Attention is counted over full
    samples, also for samples packed from several documents.

    The peak is the dense peak of the GPU's data sheet (``planning.peaks``). For CPUs, and for
    unlisted GPUs, matrix multiplications are measured in the first step on all ranks at once, for
    about 0.1 s. FLOPs are known for models with a :class:`TransformerConfig`. For other models, set
    ``flops_per_token``, or set ``flops_per_batch`` on the LightningModule: FLOPs, forward and
    backward, of the full model for the batch of a data-parallel rank.

    :attr:`overhead` is the share of training time spent in the monitor's hooks. Only logging steps
    wait for a GPU.

    Args:
        window: Number of optimizer steps to average over.
        tokens: Entry of the batch with one element for each token. None: the sequence dim declared
            by ``sequence_dims`` of the module or data module, or else the entry ``tokens`` or
            ``input_ids``.
        flops_per_token: FLOPs of a token, forward and backward. None: by the model.
        peak_tflops: Peak of a device in TFLOP/s. None: by the table, or measured.
        progress_bar: Values shown by the progress bar, under keys without ``throughput/``, since
            the prefix would fill the bar. None: step time, speed, MFU and time to finish. MFU is
            left out on a CPU, whose measured peak depends on what else is running.

    Raises:
        ConfigError: If a number is not positive, or the progress bar is to show an unknown value.
    """

    def __init__(
        self,
        window: int = 20,
        *,
        tokens: str | None = None,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        progress_bar: Sequence[str] | None = None,
    ) -> None:
        if not is_count(window):
            raise ConfigError(f"window is {window!r}; it must be a positive integer.")
        unknown = [name for name in progress_bar or () if name not in _NAMES]
        if isinstance(progress_bar, str) or unknown:
            raise ConfigError(
                f"progress_bar is {progress_bar!r}; it must be a list of some of "
                f"{', '.join(_NAMES)}."
            )
        for name, value in (("flops_per_token", flops_per_token), ("peak_tflops", peak_tflops)):
            if value is not None and value <= 0:
                raise ConfigError(
                    f"{name} is {value}; it must be positive. Leave it out if unknown."
                )
        self.tokens = tokens
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self.progress_bar = None if progress_bar is None else tuple(progress_bar)
        self._config: TransformerConfig | None = None
        self._flops_of_length: dict[int, float] = {}  # of a sample
        self._data_ranks = 1
        self._consumed = [0, 0]  # samples and tokens over all ranks, when ranks last agreed
        self._new = [0, 0]  # and on this rank since then
        self._steps: deque[_Step] = deque(maxlen=window)
        self._own = OwnTime()

    @property
    def overhead(self) -> float:
        """Share of the time since the first step spent in the hooks."""
        return self._own.share

    # --------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and tokens consumed."""
        samples, tokens = (
            agreed + increment * self._data_ranks
            for agreed, increment in zip(self._consumed, self._new, strict=True)
        )
        return {"consumed_samples": samples, "consumed_tokens": tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to count from a checkpoint."""
        self._consumed = [state_dict["consumed_samples"], state_dict["consumed_tokens"]]
        self._new = [0, 0]

    # ---------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self._clock = Clock(trainer.strategy.root_device)
        self._config = transformer_config(pl_module)
        self._flops_of_length.clear()
        self._data_ranks = num_data_ranks(trainer)
        self._peak: DevicePeak | None = None
        self._steps.clear()
        self._open = _Step()
        self._from: Mark | None = None  # begin of the current batch, None: in the first step
        self._interrupted = False
        self._ended_s = self._paused_s = 0.0
        self._num_steps = 0
        self._first_global_step = trainer.global_step
        self._total_steps = _total_steps(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out the time until the next batch."""
        self._interrupt()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave out the time until the next batch."""
        self._interrupt()

    def _interrupt(self) -> None:
        self._interrupted = True
        self._own.pause()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Leave out the time since the batch before, if something else than training ran."""
        if self._interrupted and self._from is not None:
            self._own.resume()
            with self._own.counted():
                self._from = self._clock.mark()
                self._paused_s += time.perf_counter() - self._ended_s
        self._interrupted = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch. At logging steps, log."""
        with self._own.counted():
            self._count(trainer, pl_module, batch)
            ends_step, is_first = not is_accumulating(trainer), self._from is None
            if ends_step and is_first:
                self._find_peak(trainer, pl_module)
            end = self._clock.mark()
            self._ended_s = time.perf_counter()
            if self._from is not None:
                self._open.spans.append((self._from, end))
            if ends_step or not is_first:
                self._from = end
            if ends_step:
                self._end_step(trainer, end, is_first=is_first)
        if ends_step and is_first:
            self._own.start()

    def _end_step(self, trainer: pl.Trainer, end: Mark, *, is_first: bool) -> None:
        if not is_first:
            self._num_steps += 1
            self._steps.append(self._open)
        else:
            self._first_global_step = trainer.global_step
        self._open = _Step()
        if is_logging_step(trainer):
            with self._own.waiting():
                self._clock.wait(end)
            shown = self.progress_bar
            if shown is None:
                is_cpu = trainer.strategy.root_device.type == "cpu"
                shown = tuple(n for n in _IN_PROGRESS_BAR if n != "mfu" or not is_cpu)
            log_values(trainer, self._values(trainer), "throughput/", shown)

    # --------------------------------------------------------------------------------------- counts

    def _count(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        samples, tokens = num_samples(batch), num_tokens(trainer, module, batch, self.tokens)
        self._open.samples += samples
        self._open.tokens += tokens
        self._open.flops += self._flops(module, samples, tokens)
        self._new = [self._new[0] + samples, self._new[1] + tokens]

    def _flops(self, module: pl.LightningModule, samples: int, tokens: int) -> float:
        """Return the FLOPs of this rank's batch, of the full model. 0 if unknown."""
        if self.flops_per_token is not None:
            return self.flops_per_token * tokens
        method = getattr(module, "flops_per_batch", None)
        if method is not None:
            return float(method)
        length = tokens // samples
        if self._config is None or length == 0:
            return 0.0
        if length not in self._flops_of_length:
            self._flops_of_length[length] = flops(
                self._config, batch_size=1, sequence_length=length
            )
        return samples * self._flops_of_length[length]

    def _find_peak(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find the device's peak, or say why there will be no MFU."""
        if self._open.flops == 0:
            rank_zero_info(
                "ThroughputMonitor: no MFU, since the FLOPs of "
                + (
                    f"a {type(module).__name__} are not known. Set flops_per_token, or set "
                    "flops_per_batch on the module."
                    if self._config is None and self.flops_per_token is None
                    else "a batch follow from its tokens, which are not known. Set tokens to the "
                    "batch entry that holds them."
                )
            )
            return
        if self.peak_tflops is not None:
            self._peak = DevicePeak(self.peak_tflops * 1e12, "given")
            return
        strategy = trainer.strategy
        self._peak = device_peak(strategy.root_device, strategy.precision_plugin)
        rank_zero_info(
            f"ThroughputMonitor: MFU relates to {self._peak.flops_per_s / 1e12:.4g} TFLOP/s a "
            f"device, {self._peak.source}."
        )

    # --------------------------------------------------------------------------------------- values

    def _values(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the values to log. A collective."""
        spans = [span for step in self._steps for span in step.spans]
        own_values: list[float] = [
            sum(self._clock.seconds(*span) for span in spans),
            self._paused_s,
            0.0 if self._peak is None else self._peak.flops_per_s,
            sum(step.samples for step in self._steps),
            sum(step.tokens for step in self._steps),
            sum(step.flops for step in self._steps),
            *self._new,
        ]
        # One exchange of sums. Times are means of ranks, and counts are sums over data-parallel
        # ranks.
        rows = values_of_ranks(trainer, own_values)
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        seconds, paused_s, peak = means[:3]
        samples, tokens, operations, *increments = (mean * self._data_ranks for mean in means[3:])
        self._consumed = [
            consumed + round(more)
            for consumed, more in zip(self._consumed, increments, strict=True)
        ]
        self._new = [0, 0]
        values: dict[str, float] = {"consumed_samples": self._consumed[0]}
        if isinstance(trainer.strategy, MegatronStrategy):
            values["consumed_samples"] = trainer.strategy.consumed_samples
        if self._consumed[1]:
            values["consumed_tokens"] = self._consumed[1]
        if seconds <= 0:
            return values
        step_time = seconds / len(self._steps)
        values |= {"step_time": step_time, "samples_per_second": samples / seconds}
        if tokens:
            values["tokens_per_second"] = tokens / seconds
            values["tokens_per_second_per_device"] = tokens / seconds / trainer.world_size
        if operations:
            speed = operations / seconds / trainer.world_size
            values["tflops_per_device"] = speed / 1e12
            if peak:
                values["mfu"] = speed / peak
        remaining = self._remaining_steps(trainer)
        if remaining is not None:
            values["time_to_finish_s"] = remaining * (step_time + paused_s / self._num_steps)
        return values

    def _remaining_steps(self, trainer: pl.Trainer) -> float | None:
        """Return the number of steps left in the fit. None: unknown."""
        num_done = trainer.global_step - self._first_global_step
        if self._total_steps is None or num_done <= 0:
            return None
        # Several optimizers step one after another, and each counts in global_step.
        return (self._total_steps - trainer.global_step) * self._num_steps / num_done


SpeedMonitor = ThroughputMonitor
"""The monitor's earlier name."""


def _total_steps(trainer: pl.Trainer) -> int | None:
    """Return ``global_step`` at the end of the fit. None: unknown."""
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation changes between epochs
        return None
    return int(total) if 0 < total < float("inf") else None
