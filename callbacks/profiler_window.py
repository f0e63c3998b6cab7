"""Record some steps of some ranks with torch's profiler, a file for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError
from megatron_lightning.lightning_internals.loops import is_accumulating


class ProfilerWindow(pl.Callback):
    """Write ``rank_<n>.json.gz`` for the steps ``first_step`` to ``first_step + num_steps - 1``.

    Open the files in https://ui.perfetto.dev, several at once for a look at all ranks. On a GPU
    ``nvtx`` marks the window for Nsight Systems instead (``nsys profile
    --capture-range=cudaProfilerApi``), with the operators as NVTX ranges.

    Args:
        first_step: First optimizer step to record, counted from 0 over resumes.
        num_steps: Steps to record.
        ranks: Recording ranks. None: all.
        dirpath: Folder. None: ``profile`` in the Trainer's ``default_root_dir``.
        shapes: Whether shapes of tensors are recorded.
        memory: Whether allocations are recorded.
        stacks: Whether the Python stack of every operator is recorded.
        nvtx: Whether to mark the window for Nsight Systems, and write no file.

    Raises:
        ConfigError: If a value cannot be used, or ``nvtx`` is set without a GPU.
    """

    def __init__(
        self,
        first_step: int = 10,
        num_steps: int = 3,
        ranks: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        *,
        shapes: bool = False,
        memory: bool = False,
        stacks: bool = False,
        nvtx: bool = False,
    ) -> None:
        if first_step < 0 or not is_count(num_steps):
            raise ConfigError(
                f"first_step is {first_step} and num_steps is {num_steps}; steps count from 0. Set "
                "first_step to 0 or more and num_steps to 1 or more."
            )
        self.first_step = first_step
        self.num_steps = num_steps
        self.ranks = None if ranks is None else tuple(ranks)
        self.dirpath = dirpath
        self._options: dict[str, Any] = {
            "record_shapes": shapes,
            "profile_memory": memory,
            "with_stack": stacks,
        }
        self._nvtx = nvtx
        self._profile: Any = None  # a context, entered

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_profile": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the ranks and the device."""
        wrong_ranks = [r for r in self.ranks or () if not 0 <= r < trainer.world_size]
        if wrong_ranks:
            raise ConfigError(
                f"ranks has {wrong_ranks}, and the job has ranks 0 to {trainer.world_size - 1}. "
                "Leave them out."
            )
        if self._nvtx and trainer.strategy.root_device.type != "cuda":
            raise ConfigError(
                "nvtx=True marks the window for Nsight Systems, which looks at GPUs, and the "
                f"device is {trainer.strategy.root_device}. Leave nvtx out."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to record in the first step of the window, also for a resumed run inside of the
        window.
        """
        step = trainer.global_step
        is_within = self.first_step <= step < self.first_step + self.num_steps
        records = self.ranks is None or trainer.global_rank in self.ranks
        if self._profile is not None or not is_within or not records:
            return
        if self._nvtx:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            ranges: Any = torch.autograd.profiler.emit_nvtx
            self._profile = ranges(record_shapes=self._options["record_shapes"])
        else:
            activities = [ProfilerActivity.CPU]
            if trainer.strategy.root_device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, **self._options)
        self._profile.__enter__()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write the file after the last step of the window."""
        ends = trainer.global_step >= self.first_step + self.num_steps
        if ends and not is_accumulating(trainer):
            self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file of a window left early by the end of training."""
        self._end(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the recording up to the exception."""
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return
        folder = Path(self.dirpath or Path(str(trainer.default_root_dir), "profile"))
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / f"rank_{trainer.global_rank}.json.gz"))
        rank_zero_info(f"ProfilerWindow: open {folder}/rank_*.json.gz in https://ui.perfetto.dev.")
