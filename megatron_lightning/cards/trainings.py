"""The trainings of a card, each in separate processes.

``python -m megatron_lightning.cards.trainings JOB`` runs a training. JOB is a JSON file of
:class:`Job`. Rank 0 writes losses and gradient norms, or the error, beside JOB. A layout with a
failure, a hang or too little memory costs the layout's item alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.callbacks import GradientNormMonitor
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import HuggingFaceModule, PretrainDataModule
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy

LIMIT_S = 3600.0
"""Seconds after which a training counts as hanging."""
_SAMPLES = 64  # of every training, so that a resumed one goes on in the same data
_RESULT = "result.json"
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_")
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


class FitError(RuntimeError):
    """A failed training. The message says how."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training on random tokens."""

    model: Mapping[str, Any]
    """Options of HuggingFaceModule."""
    vocab_size: int
    strategy: Mapping[str, Any] | None = None
    """Options of MegatronStrategy. None: plain Lightning in one process."""
    ranks: int = 1
    peft: Mapping[str, Any] | None = None
    """Fields of LoRA. None: all weights are trained."""
    steps: int = 4
    rows: int = 8
    """Samples of a step, over all ranks."""
    length: int = 32
    """Tokens of a sample."""
    ckpt_path: str | None = None
    """Checkpoint to go on from."""
    save_to: str | None = None
    """Checkpoint to write at the end."""


@dataclass
class Curve:
    """Losses and gradient norms of a training, by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class _Recorder(pl.Callback):
    """Collects loss and gradient norm of every step, of all ranks together."""

    def __init__(self) -> None:
        self.curve = Curve()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = trainer.callback_metrics
        self.curve.losses.append(float(logged["train_loss"]))
        self.curve.norms.append(float(logged["grad_norm"]))


def run_job(job: Job) -> Curve:
    """Run a training in new processes, and return the logged values.

    Raises:
        ConfigError: If the layout, or the model in it, is refused.
        FitError: If the training failed.
    """
    launcher = {name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANK}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", __name__, str(path)]
        try:
            run = subprocess.run(
                command,
                check=False,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise FitError(f"the training did not end within {LIMIT_S:.0f} s") from error
        if not path.with_name(_RESULT).exists():
            last = [line.strip() for line in run.stderr.splitlines() if line.strip()]
            raise FitError(
                f"the training ended with exit code {run.returncode}: "
                f"{last[-1] if last else 'no message'}"
            )
        found = json.loads(path.with_name(_RESULT).read_text())
    if "refused" in found:
        raise ConfigError(found["refused"])
    if "failed" in found:
        raise FitError(found["failed"])
    return Curve(**found)


def train(job: Job) -> Curve:
    """Train on this process's ranks."""
    recorder = _Recorder()
    strategy = "auto" if job.strategy is None else MegatronStrategy(**job.strategy)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=job.ranks,
        max_steps=job.steps,
        precision="32-true",
        callbacks=[GradientNormMonitor(), recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    module = HuggingFaceModule(**job.model, peft=None if job.peft is None else LoRA(**job.peft))
    data = PretrainDataModule(
        mock=True,
        sequence_length=job.length,
        global_batch_size=job.rows,
        vocab_size=job.vocab_size,
        num_train_samples=_SAMPLES,
    )
    trainer.fit(module, data, ckpt_path=job.ckpt_path)
    if job.save_to is not None:
        trainer.save_checkpoint(job.save_to)
    return recorder.curve


def main() -> None:
    """Run the job named on the command line."""
    path = Path(sys.argv[1])
    found: dict[str, Any]
    try:
        found = asdict(train(Job(**json.loads(path.read_text()))))
    except ConfigError as error:
        found = {"refused": str(error)}
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        path.with_name(_RESULT).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
