"""Options of the strategy and of the Trainer, on a GPU as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import SpikeGuard
from megatron_lightning.config import DataParallelOptions, MoEConfig, RecomputeOptions
from megatron_lightning.data import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision
from tests.gpu.against_cpu import (
    BF16_RTOL,
    NEEDS_GPU,
    NORM_RTOL,
    RTOL,
    accelerators,
    assert_equals_cpu,
    on_gpu,
    train,
)
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import tiny_config, token_rows
from tests.helpers.toy import ToyData, ToyModule

pytestmark = NEEDS_GPU

BATCH, SEQUENCE, VOCABULARY, STEPS = 4, 32, 64, 3
CONFIG = tiny_config(
    num_layers=4, hidden_size=64, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
    num_query_groups=2,
)  # fmt: skip
OFFLOAD = RecomputeOptions(offload_modules=["mlp"], offload_min_bytes=0)
# What ranks divide is in test_several_ranks.py: one rank would divide nothing.
STRATEGIES: dict[str, dict[str, Any]] = {
    "micro": {"micro_batch_size": 1},
    "buckets": {
        "micro_batch_size": 2,
        "data_parallel_options": DataParallelOptions(bucket_size=1000),
    },
    "cpu-offload": {"data_parallel_options": DataParallelOptions(optimizer_cpu_offload=True)},
    "cpu-offload-micro": {
        "micro_batch_size": 2,
        "data_parallel_options": DataParallelOptions(optimizer_cpu_offload=True),
        "recompute": RECOMPUTE["selective"],
    },
    "offload": {"recompute": OFFLOAD, "micro_batch_size": 2},
    **{f"recompute-{name}": {"recompute": kind} for name, kind in RECOMPUTE.items() if kind},
}


def gpt() -> GPTLightningModule:
    """Return a small module."""
    return GPTLightningModule(CONFIG, learning_rate=1e-3)


def rows(steps: int = STEPS) -> DataLoader[Any]:
    """Return batches of random tokens."""
    return DataLoader(token_rows(steps * BATCH, SEQUENCE, VOCABULARY), batch_size=BATCH)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_equals_the_cpus(name: str) -> None:
    run = assert_equals_cpu(gpt, STRATEGIES[name], rows, of_cpu={"layout": None})
    if name.startswith("cpu-offload"):
        optimizer: Any = run.trainer.optimizers[0]
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert moments and all(moment.device.type == "cpu" for moment in moments)


@pytest.mark.parametrize("name", ["cpu-offload", "offload"])
def test_a_strategy_in_bf16(name: str) -> None:
    run = on_gpu(gpt, STRATEGIES[name], rows(), precision="bf16-mixed")
    plain = on_gpu(gpt, None, rows(), precision="bf16-mixed")
    assert run.losses == pytest.approx(plain.losses, rel=BF16_RTOL)


def test_bf16_moments() -> None:
    """Moments are rounded to 8 bits between the steps: 2^-9 of a step of Adam."""
    options = DataParallelOptions(moments_dtype="bf16")
    layout = {"data_parallel_options": options}
    assert_equals_cpu(gpt, layout, rows, rtol=NORM_RTOL)


class _Muon(GPTLightningModule):
    def configure_optimizers(self) -> Any:
        def is_matrix(name: str, parameter: nn.Parameter) -> bool:
            return parameter.dim() == 2 and "decoder" in name

        named = list(self.named_parameters())
        matrices = [p for name, p in named if is_matrix(name, p)]
        others = [p for name, p in named if not is_matrix(name, p)]
        adam = torch.optim.AdamW(others, lr=1e-3)
        return ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), adam)


def test_muon() -> None:
    """It orthogonalizes in bf16, which moves a loss by 1e-3."""
    assert_equals_cpu(lambda: _Muon(CONFIG), {"micro_batch_size": 2}, rows, rtol=2e-3)


@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise", "mxfp8", "nvfp4"])
def test_emulated_layers(scaling: Any) -> None:
    """A code that flips by a rounding moves a value by 2^-4, of 4 bits by a quarter."""
    recipe = FP8Recipe(scaling=scaling, stochastic_rounding=False)

    def run(accelerator: str) -> list[float]:
        plugin = MegatronFP8Precision(recipe, backend="emulation")
        return train(accelerator, gpt, None, rows(), plugins=[plugin]).losses

    expected, found = map(run, accelerators())
    assert found == pytest.approx(expected, rel=BF16_RTOL)


def _experts() -> GPTLightningModule:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=32)
    return GPTLightningModule(
        tiny_config(
            hidden_size=64, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, moe=moe,
            mtp_num_layers=1,
        )
    )  # fmt: skip


def test_validation_test_and_prediction() -> None:
    def run(accelerator: str, make: Any) -> tuple[Any, list[Tensor]]:
        fitted = train(accelerator, make, {"micro_batch_size": 2}, rows(), validation=rows(1))
        values = {
            **fitted.logged,
            **fitted.trainer.validate(fitted.module, rows(2), verbose=False)[0],
            **fitted.trainer.test(fitted.module, rows(2), verbose=False)[0],
        }
        # By the weights of the CPU and the GPU, which differ after a training.
        return values, fitted.trainer.predict(fitted.module, rows(2))  # type: ignore[return-value]

    for make in (gpt, _experts):
        (expected, predicted), (found, other) = (run(each, make) for each in accelerators())
        assert found == pytest.approx(expected, rel=NORM_RTOL)
        agreed = torch.cat(predicted).eq(torch.cat(other).cpu()).float().mean()
        assert agreed > 0.98


class _Normalized(pl.LightningModule):
    """A classifier with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _images() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(3, 8, 8, generator=draw), number % 4) for number in range(24)]
    return DataLoader(data, batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_running_statistics(micro_batch_size: int | None) -> None:
    runs = [
        train(each, _Normalized, {"micro_batch_size": micro_batch_size}, _images(),
              validation=_images())
        for each in accelerators()
    ]  # fmt: skip
    expected, found = (dict(run.module.named_buffers()) for run in runs)
    for name, buffer in found.items():
        torch.testing.assert_close(buffer.cpu(), expected[name], rtol=NORM_RTOL, atol=1e-5)
    assert runs[1].logged == pytest.approx(runs[0].logged, rel=NORM_RTOL)


class _Manual(ToyModule):
    """Steps by hand, over two batches each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, _ = self._loss(batch)
        self.manual_backward(loss / 2)
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("make", [ToyModule, _Manual])
def test_a_module_of_any_kind(make: Any) -> None:
    """Metrics, learning rate schedules and steps by hand."""
    by_hand = {"gradient_clip_val": None} if make is _Manual else {}
    expected, found = (
        train(each, make, None, ToyData(num_samples=32), steps=None, max_epochs=2, **by_hand)
        for each in accelerators()
    )
    assert found.losses == pytest.approx(expected.losses, rel=NORM_RTOL)
    assert found.logged == pytest.approx(expected.logged, rel=NORM_RTOL)


def test_averages_of_weights() -> None:
    weights = []
    for accelerator in accelerators():
        run = train(
            accelerator, ToyModule, None, ToyData(num_samples=32),
            callbacks=[EMAWeightAveraging(decay=0.8)], steps=None, max_epochs=2,
        )  # fmt: skip
        weights.append({name: p.detach().cpu() for name, p in run.module.named_parameters()})
    for name, weight in weights[0].items():
        if not name.endswith("in_proj_bias"):  # whose gradient is 0 but for rounding
            torch.testing.assert_close(weights[1][name], weight, rtol=NORM_RTOL, atol=1e-4)


class _Spike(ToyModule):
    """The loss of the sixth batch is far above the others."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * (50 if batch_idx == 5 else 1)
        return output


def test_a_spike_is_skipped() -> None:
    runs = [
        train(
            accelerator,
            _Spike,
            None,
            ToyData(num_samples=64),
            callbacks=[SpikeGuard(window=4, min_steps=3, sigma=6.0, action="skip")],
            steps=None,
            max_epochs=1,
        )
        for accelerator in accelerators()
    ]
    for run in runs:
        assert run.trainer.strategy.skipped_steps == 1  # type: ignore[attr-defined]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=NORM_RTOL)


def test_growing_batches() -> None:
    schedule = BatchSizeSchedule(global_batch_size=8, rampup_batch_size=(4, 4, 8))
    sizes = []

    class Data(pl.LightningDataModule):
        batch_size_schedule = schedule

        def train_dataloader(self) -> Any:
            data = token_rows(24, SEQUENCE, VOCABULARY)
            return DataLoader(data, batch_sampler=ScheduledBatchSampler(range(24), schedule))

    class Sized(GPTLightningModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sizes.append(len(batch["tokens"]))

    assert_equals_cpu(
        lambda: Sized(CONFIG, learning_rate=1e-3), {"micro_batch_size": 2}, Data, steps=3
    )
    assert sizes == 2 * sizes[:3] and sizes[0] == 4 and sizes[2] == 8


def test_gradients_accumulated_over_batches() -> None:
    options = {"steps": 2, "accumulate_grad_batches": 2}
    for layout in ({}, {"micro_batch_size": 2}):
        assert_equals_cpu(gpt, layout, lambda: rows(4), of_cpu={"layout": None}, **options)


def test_a_rate_of_half_precision() -> None:
    """16-mixed: steps with infinite gradients are left out until the scale fits."""
    run = on_gpu(gpt, {"micro_batch_size": 2}, rows(8), precision="16-mixed", steps=8)
    expected = on_gpu(gpt, {"micro_batch_size": 2}, rows(8), steps=8)
    assert run.losses[0] == pytest.approx(expected.losses[0], rel=BF16_RTOL)
    assert run.losses[-1] < run.losses[0]


def test_a_checkpoint_moves_between_devices(tmp_path: Path) -> None:
    """Saved by either, resumed by both."""
    wholes = [train(each, gpt, None, rows(4), steps=4) for each in accelerators()]
    for saver in accelerators():
        path = str(tmp_path / f"{saver}.ckpt")
        train(saver, gpt, None, rows(4), steps=2).trainer.save_checkpoint(path)
        for loader in accelerators():
            resumed = train(loader, gpt, None, rows(4), steps=4, ckpt_path=path)
            assert resumed.losses == pytest.approx(wholes[0].losses[2:], rel=RTOL)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_resuming_changes_no_bit(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout. Saved in the background from pinned memory, and at once."""
    from megatron_lightning.config import CheckpointOptions

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = tiny_config(
        hidden_size=64, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, hidden_dropout=0.1
    )

    def fit(steps: int, *, background: bool = False, **options: Any) -> Any:
        layout = {"checkpoint_options": CheckpointOptions(async_save=background)}
        return on_gpu(
            lambda: GPTLightningModule(config, learning_rate=1e-3), layout, rows(4), steps=steps,
            precision=precision, deterministic=True, **options,
        )  # fmt: skip

    whole = fit(4)
    for background in (False, True):
        path = str(tmp_path / f"{background}")
        keep = pl.callbacks.ModelCheckpoint(
            path, filename="{step}", every_n_train_steps=2, save_top_k=-1
        )
        saved = fit(4, background=background, callbacks=[keep], enable_checkpointing=True)
        assert saved.losses == whole.losses
        resumed = fit(4, ckpt_path=f"{path}/step=2.ckpt")
        assert resumed.losses == whole.losses[2:]
    torch.use_deterministic_algorithms(False)


def test_tensors_of_a_background_save_are_pinned(tmp_path: Path) -> None:
    from megatron_lightning.checkpoint.writing.background import HostBuffer
    from megatron_lightning.config import CheckpointOptions

    buffers: list[HostBuffer] = []
    original = HostBuffer.copy_of

    def seen(self: HostBuffer, *args: Any, **options: Any) -> Any:
        buffers.append(self)
        return original(self, *args, **options)

    with patch.object(HostBuffer, "copy_of", seen):
        layout = {"checkpoint_options": CheckpointOptions(async_save=True)}
        keep = pl.callbacks.ModelCheckpoint(str(tmp_path), every_n_train_steps=1)
        on_gpu(gpt, layout, rows(2), steps=2, callbacks=[keep], enable_checkpointing=True)
    assert buffers
    if accelerators()[1] == "gpu":
        assert all(buffer._memory.is_pinned() for buffer in buffers)
