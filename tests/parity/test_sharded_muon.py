"""Muon under ``data_parallel="fsdp"``: matrices are put together over data- and tensor-parallel ranks, as one device has them.

Muon orthogonalises in bf16 (tests/distributed/test_muon.py): 2^-8 of lr x singular values about 1, an element, on
both sides. Stepped as rows, matrices would differ by the size of the update itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Muon
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.parity.test_layouts import _config, _samples

LR, BATCH = 0.02, 12
# Gradients agree to the last digits of fp32. Newton-Schulz runs in bf16 (2^-8), and over its five iterations a rounding that
# falls the other way grows to some of these; a matrix stepped in pieces is wrong by LR.
TOLERANCE = LR * 2**-6
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
FSDP = {"data_parallel": "fsdp"}
OPTIONS: dict[str, Any] = {
    "fsdp3": (3, 3, FSDP),  # rows of matrices that do not divide; the last rank has none of the small ones
    "tp2-fsdp2": (4, 2, {**FSDP, TP: 2}),
    "pp2-fsdp2": (4, 2, {**FSDP, PP: 2, "micro_batch_size": 1}),
    "hybrid-offload": (
        4,
        4,
        {
            **FSDP,
            "data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2, optimizer_cpu_offload=True),
        },
    ),
    "tp2-hybrid": (8, 4, {**FSDP, TP: 2, "data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2)}),
}


class _WithMuon(GPTLightningModule):
    def configure_optimizers(self) -> Any:
        inside = {name for name, p in self.named_parameters() if ".layers." in name and p.dim() == 2}
        matrices = [p for name, p in self.named_parameters() if name in inside]
        rest = [p for name, p in self.named_parameters() if name not in inside]
        return ChainedOptimizer(Muon(matrices, lr=LR, weight_decay=0.1), AdamW(rest, lr=1e-3))


def _train(options: dict[str, Any], replicas: int, precision: str, steps: int, save: str, load: str | None) -> list[float]:
    """Train until ``steps`` are taken, those of the checkpoint included, and save."""
    record = Losses()
    fit = trainer(MegatronStrategy(**options), max_steps=steps, callbacks=[record], precision=precision)
    module = _WithMuon(_config(num_layers=2, add_bias_linear=True, normalization="LayerNorm"), learning_rate=1e-3)
    fit.fit(module, DataLoader(_samples()[: BATCH * 3], batch_size=BATCH // replicas), ckpt_path=load)
    fit.save_checkpoint(save)
    return record.norms


def _tensors(path: str) -> dict[str, torch.Tensor]:
    saved = read_full(path)
    rows = saved["optimizer_states"][0]["state"].items()
    found = {**saved["state_dict"], **{f"{index}.{key}": value for index, row in rows for key, value in row.items()}}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("tp2-fsdp2", "32-true"),
        pytest.param("fsdp3", "32-true", marks=pytest.mark.slow),
        pytest.param("pp2-fsdp2", "32-true", marks=pytest.mark.slow),
        pytest.param("hybrid-offload", "32-true", marks=pytest.mark.slow),
        pytest.param("tp2-hybrid", "32-true", marks=pytest.mark.slow),
        pytest.param("tp2-fsdp2", "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_muon_steps_whole_matrices(layout: str, precision: str, tmp_path: Path) -> None:
    """A step from new weights, and one from the same checkpoint; what is saved is exact, by the shards and by one device."""
    world, replicas, options = OPTIONS[layout]

    def run(where: str, steps: int, load: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        save = str(tmp_path / f"{where}-{steps}-{Path(load or 'new').name}")
        ranks, size, given = (1, 1, {}) if where == "one" else (world, replicas, options)
        norms = run_ranks(ranks, _train, given, size, precision, steps, save, load, timeout_s=100)
        assert all(rank == norms[0] for rank in norms)
        return norms[0], _tensors(save)

    # In bf16 the gradients of other sums differ by a digit, and so may the weights, which are about 1.
    rel, rounding = (1e-5, 0.0) if precision == "32-true" else (2**-7, 2**-7)
    first = str(tmp_path / "sharded-1-new")
    for load in (None, first):
        steps = 1 if load is None else 2
        (expected, one), (norms, sharded) = run("one", steps, load), run("sharded", steps, load)
        assert norms == pytest.approx(expected, rel=rel)
        assert one.keys() == sharded.keys()
        for name, value in one.items():
            if ".layers." in name and value.dim() == 2:
                torch.testing.assert_close(sharded[name].float(), value.float(), rtol=0, atol=TOLERANCE + rounding)
    saved = _tensors(first)
    _, copied = run("one", 1, first)
    _, again = run("sharded", 1, str(tmp_path / "one-1-sharded-1-new"))
    assert all(torch.equal(copied[name], saved[name]) and torch.equal(again[name], saved[name]) for name in saved)
