"""Checkpoints of the GPT across layouts: stop anywhere, go on in any other layout, on plain Lightning or from plain Lightning.

Every tensor is exact: what the new layout has loaded is saved again, and both checkpoints hold the same bits. So the losses
after the change differ from the uninterrupted run only by the layouts' order of summation: 1e-5 relative, as in test_layouts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import GradientNormMonitor
from megatron_lightning.checkpoint import consolidate, read_full
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy, ShardedCheckpointIO
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, STOP, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 6, 3, 8, 8, 30
RTOL = 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "dp4": (4, {}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),  # more ranks than query groups
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 4}),
    "tp2-pp2-dp2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "pp2-fsdp2": (4, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "data_parallel": "fsdp"}),
    "tp2-fsdp2": (4, {"tensor_model_parallel_size": 2, "data_parallel": "fsdp"}),
    "pp2-vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "pp2-zbv-cut": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 2,
            "pipeline_schedule": "zbv",
            "pipeline_options": PipelineOptions(pipeline_model_parallel_layout="E|ttt|t|L"),
        },
    ),
    "pp4-ddp2": (8, {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "data_parallel": "ddp"}),
}


def _module(tied: bool) -> GPTLightningModule:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        init_method_std=0.1,
        share_embeddings_and_output_weights=tied,
    )
    return GPTLightningModule(config, learning_rate=3e-3, warmup_steps=2, decay_steps=20)


def _loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    return DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in text], batch_size=batch_size, shuffle=True)


class _SaveAgain(pl.Callback):
    """Saves what was loaded, before anything is computed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _fit(layout: str | None, tied: bool, *, checkpoint: str | None = None, folder: str | None = None) -> list[list[float]]:
    """Return the losses of this rank and the gradient norms, equal on all ranks, of the steps taken."""
    pl.seed_everything(5)
    world, options = LAYOUTS.get(layout or "", (1, {}))
    record = Losses()
    callbacks: list[pl.Callback] = [record]
    if checkpoint is not None:
        callbacks.append(_SaveAgain(f"{checkpoint}.again"))
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1))
    plugins = [ShardedCheckpointIO()] if layout is None else []
    strategy = "auto" if layout is None else MegatronStrategy(**options)
    fit = trainer(
        strategy,
        max_epochs=1,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        plugins=plugins,
        enable_checkpointing=folder is not None,
    )
    replicas = world // math.prod(options.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    fit.fit(_module(tied), _loader(GLOBAL_BATCH // replicas), ckpt_path=checkpoint)
    return [record.losses, record.norms]


def _content(path: Path) -> dict[str, Any]:
    """Return weights, optimizer state and progress of a checkpoint, a directory or a plain file."""
    whole = read_full(path) if path.is_dir() else torch.load(path, weights_only=True)
    return {key: whole[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def _assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values to the bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            _assert_same(*pair, f"{where}[{i}]")
    else:
        same = torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
        assert same, f"{where}: {found} and {expected}"


def _means(ranks: list[list[list[float]]]) -> list[float]:
    """Return the mean of each step's loss over the ranks, each of which has its share of the batch."""
    return [sum(step) / len(step) for step in zip(*(losses for losses, _ in ranks), strict=True)]


def _pairs() -> list[Any]:
    names = [*LAYOUTS, None]
    spread = {
        ("one", "tp2-pp2-dp2"),
        ("tp2-pp2-dp2", "pp2"),
        ("pp4-ddp2", "tp2"),
        ("tp2-pp2", None),
        (None, "tp2-pp2"),
        ("dp4", "tp2-pp2"),
        ("tp2", "pp2-vpp2"),
        ("tp4", "pp2"),
        ("pp2-vpp2", "pp2-zbv-cut"),
        ("tp2-fsdp2", "pp2-fsdp2"),
        ("pp2-fsdp2", "tp2"),
        ("dp4", "tp2-fsdp2"),
    }
    return [
        pytest.param(a, b, id=f"{a or 'plain'}-to-{b or 'plain'}", marks=() if (a, b) in spread else pytest.mark.slow)
        for a in names
        for b in names
    ]


@pytest.mark.parametrize(("saved", "loaded"), _pairs())
def test_training_goes_on_in_another_layout(saved: str | None, loaded: str | None, tmp_path: Path) -> None:
    tied = (len(saved or "") + len(loaded or "")) % 2 == 0  # both kinds of output over the matrix
    world = {None: 1, **{name: size for name, (size, _) in LAYOUTS.items()}}
    path = tmp_path / f"step={STOP}.ckpt"
    whole = run_ranks(world[saved], _save, saved, tied, str(tmp_path), timeout_s=100)
    rest = run_ranks(world[loaded], _load, loaded, tied, str(path), timeout_s=100)
    _assert_same(_content(Path(f"{path}.again")), _content(path))
    if None in (saved, loaded):  # plain Lightning neither keeps nor reads the position in the data: it starts the epoch again
        run_ranks(1, _save, None, tied, str(tmp_path / "plain"))
        whole = run_ranks(1, _load, None, tied, str(tmp_path / "plain" / path.name))
    else:
        whole = [[numbers[STOP:] for numbers in rank] for rank in whole]
    assert len(whole[0][1]) == STEPS - STOP
    assert _means(rest) == pytest.approx(_means(whole), rel=RTOL)
    for _, norms in rest:
        assert norms == pytest.approx(whole[0][1], rel=RTOL)


def _save(layout: str | None, tied: bool, folder: str) -> list[list[float]]:
    return _fit(layout, tied, folder=folder)


def _load(layout: str | None, tied: bool, checkpoint: str) -> list[list[float]]:
    return _fit(layout, tied, checkpoint=checkpoint)


def test_consolidated_checkpoint_loads_into_the_module(tmp_path: Path) -> None:
    run_ranks(4, _save, "tp2-pp2", True, str(tmp_path), timeout_s=100)
    consolidate(tmp_path / f"step={STOP}.ckpt", tmp_path / "whole.ckpt")
    module = GPTLightningModule.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert module.model.output_layer.weight is module.model.embedding.word_embeddings.weight
    assert not torch.equal(module.model.output_layer.weight, _whole_at_start().model.output_layer.weight)


def _whole_at_start() -> GPTLightningModule:
    module = _module(tied=True)
    module.configure_model()
    return module


def _monitored(options: dict[str, Any] | None) -> float:
    fit = trainer("auto" if options is None else MegatronStrategy(**options), max_steps=1, callbacks=[GradientNormMonitor()])
    fit.fit(_module(tied=True), _loader(GLOBAL_BATCH))
    return float(fit.callback_metrics["grad_norm"])


def test_gradient_norm_monitor_sees_one_norm() -> None:
    expected = run_ranks(1, _monitored, None)[0]
    options = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert run_ranks(4, _monitored, options) == pytest.approx([expected] * 4, rel=RTOL)
