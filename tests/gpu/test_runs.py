"""What surrounds the steps of a training on a GPU: data, checkpoints, streams of weights and steps
that run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig
from megatron_lightning.models.upcycling import upcycle
from megatron_lightning.modules import GPTLightningModule
from tests.gpu.against_cpu import (
    NEEDS_GPU,
    NORM_RTOL,
    RTOL,
    accelerators,
    assert_equals_cpu,
    on_gpu,
    train,
)
from tests.helpers import hf_models
from tests.helpers.blends import blended_data, blended_module, write_blends
from tests.helpers.layouts import tiny_config, token_rows
from tests.helpers.toy import ToyData
from tests.lightning.modules.test_masked_module import data_of, folder, module_of
from tests.lightning.resume.test_rerun import _Again, _Drawing

transformers = pytest.importorskip("transformers", "5")

__all__ = ["folder"]  # the fixture

pytestmark = NEEDS_GPU

BATCH, SEQUENCE, VOCABULARY = 4, 16, 64
CONFIG = tiny_config(vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)


def rows(steps: int = 3) -> DataLoader[Any]:
    """Return batches of random tokens."""
    return DataLoader(token_rows(steps * BATCH, SEQUENCE, VOCABULARY), batch_size=BATCH)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_masked_data(folder: Path, kind: Any) -> None:
    run = assert_equals_cpu(
        lambda: module_of(kind), {"micro_batch_size": 2}, lambda: data_of(folder, kind, 8),
        val_check_interval=3, limit_val_batches=1,
    )  # fmt: skip
    assert "val_loss" in run.logged


def test_mamba_of_transformers() -> None:
    """By kernels of mamba_ssm where they are installed."""

    def make() -> pl.LightningModule:
        torch.manual_seed(0)
        config = transformers.MambaConfig(
            hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=hf_models.VOCABULARY,
            tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.MambaForCausalLM(config)
        return hf_models.Loaded(lambda: model)

    assert_equals_cpu(make, None, lambda: hf_models.loader("llama"), gradient_clip_val=None)


def test_blended_data(tmp_path: Path) -> None:
    """Batches come from pinned memory."""
    write_blends(tmp_path)
    run = assert_equals_cpu(
        blended_module, None, lambda: blended_data(str(tmp_path)), val_check_interval=3
    )
    assert {"val_loss/code", "val_loss/web"} <= run.logged.keys()


def test_upcycled_checkpoints(tmp_path: Path) -> None:
    """Experts begin as the dense model, to the bit of fp32 sums in another order."""
    dense, new = tmp_path / "dense", tmp_path / "new"
    run = on_gpu(lambda: GPTLightningModule(CONFIG, learning_rate=1e-2), None, rows(), steps=3)
    run.trainer.save_checkpoint(dense)
    (before,) = run.trainer.validate(run.module, rows(1), verbose=False)
    moe = MoEConfig(num_experts=4, router_topk=2)
    upcycle(str(dense), str(new), moe=moe)
    config = tiny_config(vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, moe=moe)
    for accelerator in accelerators():
        first = train(
            accelerator, lambda: GPTLightningModule(config), None, rows(1), steps=1, ckpt_path=new,
            built=False,
        )  # fmt: skip
        assert first.losses[0] == pytest.approx(before["val_loss"], rel=1e-5)


class _Weights(pl.Callback):
    """Takes the weights for transformers after each batch."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []
        self.source: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.source = self.source or strategy.weights("transformers")
        self.taken.append({name: tensor.clone() for name, tensor in self.source})


def test_weights_for_other_programs() -> None:
    streams = [_Weights(), _Weights()]
    for accelerator, stream in zip(accelerators(), streams, strict=True):
        make = lambda: GPTLightningModule(CONFIG, learning_rate=1e-3)  # noqa: E731
        train(accelerator, make, None, rows(), callbacks=[stream])
    expected, found = (stream.taken for stream in streams)
    assert len(found) == 3 and found[-1].keys() == expected[-1].keys()
    for name, tensor in found[-1].items():
        torch.testing.assert_close(tensor.cpu(), expected[-1][name], rtol=NORM_RTOL, atol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_runs_again(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits, by deterministic kernels, with dropout."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    again, weights = _Again("on_before_optimizer_step"), []
    for callbacks in ([], [again]):
        run = on_gpu(
            _Drawing, {"micro_batch_size": 4}, ToyData(num_samples=32), callbacks=callbacks,
            steps=4, precision=precision, deterministic=True,
        )  # fmt: skip
        weights.append([parameter.detach().clone() for parameter in run.module.parameters()])
    torch.use_deterministic_algorithms(False)
    [result] = again.results
    assert result.reproducible and result.loss == result.loss_again and not result.differences
    assert all(map(torch.equal, *weights))


def test_a_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    """Weights on the GPU, in a file of plain torch, go on under the strategy."""
    plain = pl.Trainer(
        accelerator=accelerators()[1], devices=1, max_steps=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    pl.seed_everything(3, verbose=False)
    module = GPTLightningModule(CONFIG, learning_rate=1e-3)
    module.configure_model()
    plain.fit(module, rows(4))
    path = str(tmp_path / "plain.ckpt")
    plain.save_checkpoint(path)
    make = lambda: GPTLightningModule(CONFIG, learning_rate=1e-3)  # noqa: E731
    losses = [
        train(each, make, None, rows(4), steps=4, ckpt_path=path).losses for each in accelerators()
    ]
    assert losses[1] == pytest.approx(losses[0], rel=RTOL) and len(losses[0]) == 2
