"""A plain Lightning checkpoint becomes a sharded one and a plain one again, and Lightning resumes
from it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.checkpoint import (
    TensorShards,
    consolidate,
    load_sharded,
    open_checkpoint,
    save_sharded,
)
from megatron_lightning.checkpoint.format.plain_state import dump_state
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel.shards.spec import Shard


class _Module(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.01
        )


def _trainer(folder: Path, steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _data() -> Any:
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(40, 3), batch_size=4)


def test_plain_to_sharded_to_plain_and_lightning_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, trainer = _Module(width=6), _trainer(tmp_path, 3)
    trainer.fit(module, _data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    optimizer = trainer.optimizers[0]
    by_id = {id(p): name for name, p in module.named_parameters()}
    names = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]

    source = open_checkpoint(tmp_path / "plain.ckpt", optimizer_parameters=[names])
    infos = source.tensors()
    assert (
        "state_dict.net.0.weight" in infos
        and "optimizer_states.0.state.net.0.weight.exp_avg" in infos
    )
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    load_sharded(source, [TensorShards.full(name, t) for name, t in tensors.items()])
    half = torch.zeros(3, 3)
    load_sharded(
        source,
        [TensorShards("state_dict.net.0.weight", (6, 3), torch.float32, [Shard((3, 0), half)])],
        strict=False,
    )
    assert torch.equal(half, module.net[0].weight[3:])
    with pytest.raises(CheckpointError, match="has 6 parameters, and this model's optimizer has 1"):
        open_checkpoint(tmp_path / "plain.ckpt", optimizer_parameters=[["a"]])

    save_sharded(
        tmp_path / "dir.ckpt",
        [TensorShards.full(name, t) for name, t in tensors.items()],
        source.state(),
    )
    consolidate(tmp_path / "dir.ckpt", tmp_path / "again.ckpt")
    original = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert again.keys() == original.keys()
    torch.testing.assert_close(
        dict(again["state_dict"]), dict(original["state_dict"]), rtol=0, atol=0
    )
    torch.testing.assert_close(
        again["optimizer_states"], original["optimizer_states"], rtol=0, atol=0
    )
    assert again["loops"] == original["loops"] and again["hyper_parameters"] == {"width": 6}

    restored = _Module.load_from_checkpoint(tmp_path / "again.ckpt")
    assert restored.hparams["width"] == 6 and torch.equal(
        restored.net[2].weight, module.net[2].weight
    )
    finals = []
    for file in ("plain.ckpt", "again.ckpt"):
        continued = _Module(width=6)
        _trainer(tmp_path, 7).fit(continued, _data(), ckpt_path=tmp_path / file)
        finals.append([p.detach() for p in continued.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


class _Configured(pl.LightningModule):
    def __init__(self, conf: Any) -> None:
        super().__init__()
        self.width = conf.width


def test_hyper_parameters_of_a_class_are_read_by_lightning(tmp_path: Path) -> None:
    """As OmegaConf's are: Lightning notes their class, which could only be read back by importing
    it."""
    state = {
        "hyper_parameters": {"width": 3},
        "hparams_name": "conf",
        "hparams_type": OrderedDict,
        "state_dict": {},
    }
    (tmp_path / "plain.ckpt").write_bytes(
        dump_state({**state, "pytorch-lightning_version": pl.__version__})
    )
    assert _Configured.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True).width == 3
