"""Log the memory of the ranks beside the plan's prediction."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from megatron_lightning.callbacks.clock import Clock, OwnTime
from megatron_lightning.callbacks.counting import (
    log_values,
    num_samples,
    num_tokens,
    transformer_config,
    values_of_ranks,
)
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import (
    is_accumulating,
    is_logging_step,
    num_logged_steps,
)
from megatron_lightning.planning import Memory, memory
from megatron_lightning.strategies.megatron import MegatronStrategy

_GIB = 2**30


class MemoryMonitor(pl.Callback):
    """Log the memory and the number of the rank with the most memory, beside the prediction.

    | key after ``memory/`` | value, in GiB |
    |---|---|
    | ``allocated_gib``, ``reserved_gib`` | GPU: of tensors now, and held by torch's allocator now |
    | ``peak_gib`` | GPU: most bytes of tensors since the start of the process |
    | ``resident_gib``, ``peak_resident_gib`` | CPU: memory of the process, libraries included |
    | ``peak_rank`` | rank with the highest peak |
    | ``predicted_gib`` | ``planning.memory`` of ``peak_rank`` |

    Each value is the maximum over all ranks, and the same on every rank. The prediction counts
    tensors. On the CPU the prediction is therefore compared with the growth of a process, not with
    the size. The prediction exists for models with a :class:`TransformerConfig` under
    :class:`MegatronStrategy`.

    :attr:`overhead` is the share of training time spent in the monitor's hooks. Only the exchange
    of the values waits for a GPU.

    Args:
        every_n_steps: Optimizer steps between two values. None: the Trainer's
            ``log_every_n_steps``.
        each_rank: Log every rank's values too, as ``memory/peak_gib/rank_3``.
        tokens: Entry of the batch with one element for each token, as for
            :class:`ThroughputMonitor`.

    Raises:
        ConfigError: If ``every_n_steps`` is not positive.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        each_rank: bool = False,
        tokens: str | None = None,
    ) -> None:
        if every_n_steps is not None and not is_count(every_n_steps):
            raise ConfigError(f"every_n_steps is {every_n_steps!r}; it must be a positive integer.")
        self.every_n_steps = every_n_steps
        self.each_rank = each_rank
        self.tokens = tokens
        self._plans: dict[tuple[int, int], Memory | None] = {}  # by samples and tokens of a batch
        self._own = OwnTime()
        self._in_first_step = True

    @property
    def overhead(self) -> float:
        """Share of the time since the first step spent in the hooks."""
        return self._own.share

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget predictions of another fit."""
        self._clock = Clock(trainer.strategy.root_device)
        self._plans.clear()
        self._in_first_step = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out of the time of the training."""
        self._own.pause()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave saves out of the time of the training."""
        self._own.pause()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the time of the training again."""
        if not self._in_first_step:
            self._own.resume()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the memory at the end of a step."""
        if is_accumulating(trainer):
            return
        if self._in_first_step:
            self._announce(self._plan(trainer, pl_module, batch))
            self._in_first_step = False
            self._own.start()
        with self._own.counted():
            interval = self.every_n_steps
            is_due = (
                is_logging_step(trainer)
                if interval is None
                else num_logged_steps(trainer) % interval == 0
            )
            if is_due:
                self._log(trainer, pl_module, batch)

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        figures = memory_of(trainer.strategy.root_device)
        predicted = self._predicted_bytes(trainer, self._plan(trainer, module, batch))
        if trainer.world_size > 1:
            with self._own.waiting():  # the exchange would wait, too
                self._clock.wait(self._clock.mark())
        rows = values_of_ranks(trainer, [*figures.values(), predicted])
        peaks = [row[len(figures) - 1] for row in rows]
        fullest = peaks.index(max(peaks))
        columns = dict(zip([*figures, "predicted"], zip(*rows, strict=True), strict=True))
        values = {f"{name}_gib": max(columns[name]) / _GIB for name in figures}
        values["peak_rank"] = fullest
        if predicted:
            values["predicted_gib"] = columns["predicted"][fullest] / _GIB
        if self.each_rank:
            shown = [*figures, "predicted"] if predicted else [*figures]
            values |= {
                f"{name}_gib/rank_{rank}": columns[name][rank] / _GIB
                for name in shown
                for rank in range(len(rows))
            }
        log_values(trainer, values, "memory/")

    # ----------------------------------------------------------------------------------- prediction

    def _plan(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Memory | None:
        key = num_samples(batch), num_tokens(trainer, module, batch, self.tokens)
        if key not in self._plans:
            self._plans[key] = _planned(trainer, module, *key)
        return self._plans[key]

    def _predicted_bytes(self, trainer: pl.Trainer, plan: Memory | None) -> int:
        """Return the prediction for this rank. 0: no prediction."""
        if plan is None or not isinstance(trainer.strategy, MegatronStrategy):
            return 0
        return plan.ranks[trainer.strategy.context.pp.rank].total_bytes

    def _announce(self, plan: Memory | None) -> None:
        if plan is not None:
            ranks = ", ".join(
                f"pp rank {row.pp_rank}: {row.total_bytes / _GIB:.2f} "
                f"(weights {row.weights_bytes / _GIB:.2f}, gradients "
                f"{row.gradients_bytes / _GIB:.2f}, optimizer {row.optimizer_bytes / _GIB:.2f}, "
                f"activations {row.activations_bytes / _GIB:.2f})"
                for row in plan.ranks
            )
            rank_zero_info(f"MemoryMonitor: predicted GiB of tensors: {ranks}.")


def _planned(
    trainer: pl.Trainer, module: pl.LightningModule, samples: int, tokens: int
) -> Memory | None:
    """Return the plan of this training. None: the model or the precision has no formulas."""
    strategy, config = trainer.strategy, transformer_config(module)
    if config is None or not isinstance(strategy, MegatronStrategy):
        return None
    options = strategy.options
    micro_batch_size = min(options.micro_batch_size or samples, samples)
    try:
        return memory(
            config,
            strategy.context.layout,
            world_size=trainer.world_size,
            sequence_length=tokens // samples or None,
            micro_batch_size=micro_batch_size,
            num_microbatches=ceil(samples / micro_batch_size),
            data_parallel=options.data_parallel,
            data_parallel_options=options.data,
            recompute=options.recompute,
            pipeline_schedule=options.schedule.name,
            pipeline_options=options.pipeline,
            precision=trainer.precision,
            fp8_recipe=getattr(trainer.precision_plugin, "recipe", None),
            compile=None if options.compile is None else "block",
            device="cuda" if strategy.root_device.type == "cuda" else "cpu",
        )
    except ConfigError as error:
        rank_zero_info(f"MemoryMonitor: no prediction: {error}")
        return None


def memory_of(device: torch.device) -> Mapping[str, int]:
    """Return the bytes of this process on a device, by kind. The last value is a peak."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmRSS" in fields and "VmHWM" in fields:
            # Unlike getrusage's, this peak excludes the peak of the forking process.
            kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")}
            resident, peak = (kib[name] * 1024 for name in ("VmRSS", "VmHWM"))
            # The kernel updates both in batches of pages.
            return {"resident": resident, "peak_resident": max(resident, peak)}
    import resource  # missing on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
