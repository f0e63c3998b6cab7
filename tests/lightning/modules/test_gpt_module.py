"""GPTLightningModule: training, loading, its loss and its schedule."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.bridge import commands
from megatron_lightning.cli import trainer_cli
from megatron_lightning.config import PipelineOptions, RopeScaling
from megatron_lightning.errors import ConfigError, MissingCheckpointError
from megatron_lightning.inference.commands.load import read_config
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.optim.lr_schedules import LRSchedule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.unit.models.test_model import CONFIG, tokens


def module(**options: Any) -> GPTLightningModule:
    return GPTLightningModule(CONFIG, learning_rate=1e-2, **options)


def loader() -> DataLoader[Any]:
    rows = tokens(16, 9)
    mask = torch.ones(8)
    mask[0] = 0
    return DataLoader(
        [{"tokens": r[:-1], "labels": r[1:], "loss_mask": mask} for r in rows], batch_size=4
    )  # type: ignore[arg-type]


def test_the_lightning_module_trains_and_loads(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    gpt = module(warmup_steps=2, decay_steps=40)
    trainer.fit(gpt, loader(), loader())
    assert trainer.callback_metrics["val_loss"] < 2.9  # log 20 = 3.0 before training
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = GPTLightningModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == CONFIG
    for name, parameter in gpt.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    predictions = trainer.predict(gpt, loader())
    assert predictions is not None
    assert predictions[0].shape == (4, 8)


class Inputs(torch.nn.Module):
    """Records the keywords of its calls, in place of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, torch.Tensor | None]] = []

    def forward(self, tokens: torch.Tensor, **inputs: torch.Tensor | None) -> torch.Tensor:
        self.seen.append(inputs)
        return torch.zeros(*tokens.shape, *(() if inputs["labels"] is not None else (20,)))


def test_documents_reach_the_model_only_if_the_batch_has_them() -> None:
    gpt = module()
    gpt.model = Inputs()  # type: ignore[assignment]
    gpt.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    rows = tokens(2, 9)
    plain = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    ids = {"position_ids": torch.arange(8).expand(2, 8), "document_ids": torch.ones(2, 8).long()}
    steps = (gpt.training_step, gpt.validation_step, gpt.test_step, gpt.predict_step)
    for step in steps:
        gpt.model.seen.clear()
        step(plain, 0)
        step({**plain, **ids}, 0)
        without, given = gpt.model.seen
        assert set(without) == {"labels", "position_ids"}
        assert without["position_ids"] is None
        assert {name: given[name] for name in ids} == ids
    assert set(ids) <= set(gpt.sequence_dims)


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_a_model_with_scaled_positions_loads(rope_type: Any, tmp_path: Path) -> None:
    scaling = RopeScaling(rope_type=rope_type, factor=4.0, original_max_position_embeddings=8)
    gpt = GPTLightningModule(replace(CONFIG, rope_scaling=scaling))
    one = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    one.fit(gpt, loader())
    path = tmp_path / "model.ckpt"
    one.save_checkpoint(path)
    loaded = GPTLightningModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == read_config(path) == gpt.config
    plain = GPTLightningModule(CONFIG)
    plain.configure_model()
    plain.load_state_dict(gpt.state_dict())
    assert torch.equal(loaded(tokens(2, 8)), gpt(tokens(2, 8)))
    assert not torch.equal(plain(tokens(2, 8)), gpt(tokens(2, 8)))


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    gpt = module()
    gpt.configure_model()
    gpt.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = next(iter(loader()))
    out = gpt.training_step(batch, 0)
    assert out["num_items"] == 4 * 7
    torch.testing.assert_close(
        out["loss"], gpt.model(batch["tokens"], labels=batch["labels"])[:, 1:].mean()
    )  # type: ignore[misc]
    masked = batch["labels"].clone()
    masked[:, 0] = -100
    out_labels = gpt.training_step({"tokens": batch["tokens"], "labels": masked}, 0)
    torch.testing.assert_close(out_labels["loss"], out["loss"])
    assert out_labels["num_items"] == out["num_items"]


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_gradients_of_the_fused_optimizer_are_clipped(strategy: str) -> None:
    """Lightning refuses to clip, under autocast, for optimizers that say that they unscale
    gradients themselves."""
    clipped: list[float] = []

    class Norms(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gradients = [p.grad for p in gpt.parameters() if p.grad is not None]
            clipped.append(float(torch.nn.utils.get_total_norm(gradients)))

    gpt, options = module(), {"precision": "bf16-mixed", "gradient_clip_val": 1e-3}
    fit = trainer(strategy, max_steps=2, callbacks=[Norms()], **options)
    fit.fit(gpt, loader())
    assert all(group["fused"] for group in fit.optimizers[0].param_groups)
    assert clipped == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_one_kernel_for_the_step_unless_the_user_says_otherwise() -> None:
    def fused(module: GPTLightningModule, device: str) -> Any:
        module.configure_model()
        optimizer: Any = module.to(device).configure_optimizers()
        return {group["fused"] for group in optimizer.param_groups}

    assert fused(GPTLightningModule(CONFIG), "cpu") == {True}
    assert fused(GPTLightningModule(CONFIG), "meta") == {True}  # before it has a device
    assert fused(GPTLightningModule(CONFIG, fused=False), "cpu") == {None}


def test_the_schedule() -> None:
    rates = _rates(module(warmup_steps=2, decay_steps=6, min_learning_rate=1e-3), 8)
    assert rates == pytest.approx([0.0, 5e-3, 1e-2, 8.681981e-3, 5.5e-3, 2.318019e-3, 1e-3, 1e-3])
    assert _rates(module(warmup_steps=2), 4) == [0.0, 5e-3, 1e-2, 1e-2]
    assert _rates(module(), 2) == [1e-2, 1e-2]
    samples = LRSchedule(
        lr_decay_style="linear", lr_decay_steps=40, unit="samples", samples_per_step=10
    )
    assert _rates(module(lr_schedule=samples), 5) == pytest.approx(
        [1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0]
    )
    with pytest.raises(ConfigError, match="lr_decay_steps=3 ends before lr_warmup_steps=5"):
        module(warmup_steps=5, decay_steps=3)
    with pytest.raises(ConfigError, match=r"min_learning_rate=1\.0"):
        module(min_learning_rate=1.0)
    with pytest.raises(
        ConfigError,
        match=r"min_learning_rate=0\.0001 is where the decay ends, and decay_steps is not set",
    ):
        module(min_learning_rate=1e-4)
    with pytest.raises(
        ConfigError, match=r"lr_schedule is given beside min_learning_rate=0\.0, warmup_steps=5"
    ):
        module(warmup_steps=5, lr_schedule=samples)


def _rates(gpt: GPTLightningModule, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    gpt.configure_model()
    configured: Any = gpt.configure_optimizers()
    if not isinstance(configured, dict):
        return [configured.param_groups[0]["lr"]] * steps
    rates = []
    for _ in range(steps):
        rates += configured["lr_scheduler"]["scheduler"].get_last_lr()[:1]
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    return rates


def _losses(stages: str | None) -> list[float]:
    strategy: Any = "auto"
    if stages is not None:
        options = PipelineOptions(pipeline_model_parallel_layout=stages)
        strategy = MegatronStrategy(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            micro_batch_size=2,
            pipeline_options=options,
        )
    record = Losses()
    trainer(strategy, max_steps=3, callbacks=[record]).fit(module(), loader())
    return record.losses


def test_stages_without_layers_train_as_one_device() -> None:
    """Two layers on four stages; losses differ by the order in which fp32 sums are taken."""
    expected = run_ranks(1, _losses, None)[0]
    assert len(expected) == 3
    assert run_ranks(2, _losses, "E|t|t|L") == [pytest.approx(expected, rel=1e-5)] * 2


def _logged_loss(data_parallel: int) -> list[float]:
    """Return ``train_loss`` after each step of 8 samples."""
    rows = tokens(24, 9)
    samples: Any = [{"tokens": r[:-1], "labels": r[1:]} for r in rows]
    seen: list[float] = []
    # Hosts wait in it, and need not in a step.
    no_barrier = patch("torch.distributed.barrier", side_effect=AssertionError)

    class Logged(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            no_barrier.start()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            no_barrier.stop()
            seen.append(float(trainer.callback_metrics["train_loss"]))

    strategy: Any = "auto" if data_parallel == 1 else MegatronStrategy()
    trainer(strategy, max_epochs=1, callbacks=[Logged()]).fit(
        module(), DataLoader(samples, batch_size=8 // data_parallel)
    )
    return seen


def test_the_logged_training_loss_is_that_of_all_data_parallel_ranks() -> None:
    expected = run_ranks(1, _logged_loss, 1)[0]
    assert len(expected) == 3
    assert run_ranks(2, _logged_loss, 2) == [pytest.approx(expected, rel=1e-5)] * 2


def test_the_command_line_starts_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.helpers.gpt_folders import make_folder

    folder = make_folder("llama", tmp_path)
    args = [
        f"--model.init_from_hf={folder}", "--model.learning_rate=1e-5",
        "--data.data_prefix=text", "--data.sequence_length=8", "--data.batch_size=2",
        "--trainer.accelerator=cpu", "--trainer.logger=false",
    ]  # fmt: skip
    gpt = trainer_cli(args, run=False).model
    assert isinstance(gpt, GPTLightningModule)
    assert gpt.config.rope_scaling is not None
    assert dict(gpt.hparams)["init_from_hf"] == str(folder)
    gpt.configure_model()
    path = tmp_path / "model.ckpt"
    plain = trainer("auto", max_epochs=1)
    plain.strategy.connect(gpt)
    plain.save_checkpoint(path)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    shutil.rmtree(folder)  # a checkpoint has configuration, weights, and the folder's other files
    loaded = GPTLightningModule.load_from_checkpoint(path, weights_only=True)
    for name, parameter in gpt.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    loaded.save_hf_pretrained(str(tmp_path / "saved"))
    commands.export(str(path), str(tmp_path / "exported"))
    for target in ("saved", "exported"):
        found = {file.name: file.read_bytes() for file in (tmp_path / target).iterdir()}
        assert found == files
    untouched = HuggingFaceModule(str(path))  # of the other kind
    untouched.configure_model()
    again = GPTLightningModule(init_from_hf=str(path))
    again.configure_model()
    inputs = torch.arange(12)[None]
    torch.testing.assert_close(untouched(inputs), again.eval()(inputs), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="config and init_from_hf are left out"):
        GPTLightningModule()


def _resume(folder: str, ckpt_path: str, max_epochs: int) -> list[float]:
    record = Losses()
    fit = trainer(MegatronStrategy(), max_epochs=max_epochs, callbacks=[record])
    gpt = GPTLightningModule(init_from_hf=folder, learning_rate=1e-2)
    fit.fit(gpt, loader(), ckpt_path=ckpt_path or None)
    if not ckpt_path:
        fit.save_checkpoint(f"{folder}.ckpt")
    assert gpt.config.num_layers == 2
    return record.losses


def test_a_resumed_run_needs_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.helpers.gpt_folders import make_folder

    folder = make_folder("llama", tmp_path)
    run_ranks(1, _resume, str(folder), "", 1)
    ((expected),) = run_ranks(1, _resume, str(folder), f"{folder}.ckpt", 2)
    shutil.rmtree(folder)
    ((losses),) = run_ranks(1, _resume, str(folder), f"{folder}.ckpt", 2)
    assert losses == expected and len(losses) == 4
    gpt = GPTLightningModule(init_from_hf=str(folder))
    with pytest.raises(MissingCheckpointError, match="Checkpoint file not found"):
        gpt.configure_model()
