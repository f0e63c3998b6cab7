"""Muon under ``data_parallel="fsdp"``, of experts in every layout, and of compiled blocks: matrices
are put together over data- and tensor-parallel ranks, as one uncompiled device has them.

torch's Muon orthogonalises in bf16, where a gradient that differs in its last fp32 digit may round
to another value (2^-8), which five iterations amplify by up to 3.4^5 in the directions of small
singular values. Here both sides do it in fp64, so that what is compared is what the matrices are
made of. A matrix that is stepped as rows differs by the size of the update itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import CompileOptions, DataParallelOptions, MoEConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import ChainedOptimizer, Muon
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.ties import tied_names
from tests.helpers.layouts import EP, ETP, PP, TP, fit
from tests.helpers.ranks import run_ranks
from tests.parity.test_layouts import _config, _samples

LR, BATCH, STEPS = 0.02, 12, 2
RTOL = 1e-5  # as in test_layouts
# Gradients agree to about 1e-6 of their norm; in a direction of a small singular value five
# iterations amplify that by up to 3.4^5, about 500. Updates have singular values about 1: a matrix
# that is stepped in pieces is wrong by LR.
TOLERANCE = LR * 1e-6 * 500
FSDP = {"data_parallel": "fsdp"}
OPTIONS: dict[str, Any] = {
    # Rows of matrices that do not divide; the last rank has none of the small ones.
    "fsdp3": (3, 3, FSDP),
    "tp2-fsdp2": (4, 2, {**FSDP, TP: 2}),
    "pp2-fsdp2": (4, 2, {**FSDP, PP: 2, "micro_batch_size": 1}),
    "hybrid-offload": (
        4,
        4,
        {
            **FSDP,
            "data_parallel_options": DataParallelOptions(
                num_distributed_optimizer_instances=2, optimizer_cpu_offload=True
            ),
        },
    ),
    "tp2-hybrid": (
        8,
        4,
        {
            **FSDP,
            TP: 2,
            "data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2),
        },
    ),
}
COMPILE = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
COMPILED: dict[str, Any] = {
    "one": (1, 1, COMPILE),
    "zero1": (2, 2, COMPILE),
    "tp2": (2, 1, {**COMPILE, TP: 2}),
    "tp2-fsdp2": (4, 2, {**COMPILE, **FSDP, TP: 2}),
}
BIAS = {"add_bias_linear": True, "normalization": "LayerNorm"}
MOE = {"moe": MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=24)}
EXPERTS: dict[str, Any] = {
    # Parts of every expert: two of its rows, or of its columns.
    "fsdp3": (3, 3, FSDP),
    # One expert on a rank, and half of two: matrices of four ranks.
    "ep2-fsdp2": (4, 4, {**FSDP, EP: 2}),
    "etp2-fsdp2": (4, 4, {**FSDP, ETP: 2}),
    "tp4-ep2-fsdp2": (4, 1, {**FSDP, TP: 4, ETP: 1, EP: 2}),
    "ep2-etp2": (4, 4, {EP: 2, ETP: 2}),
    "ep2-zero1": (4, 4, {EP: 2}),
    "ep2-pp2": (4, 2, {EP: 2, PP: 2, "micro_batch_size": 1}),
    "ep4-etp2-ddp": (8, 4, {EP: 4, TP: 2, "data_parallel": "ddp"}),
    "tp2-ep2-etp2-fsdp2": (8, 4, {**FSDP, TP: 2, EP: 2}),
    "ep2-etp2-hybrid": (8, 4, {**OPTIONS["tp2-hybrid"][2], EP: 2}),
}
LAYOUTS = {
    **{name: (*case, BIAS) for name, case in OPTIONS.items()},
    **{f"compiled-{name}": (*case, BIAS) for name, case in COMPILED.items()},
    **{f"experts-{name}": (*case, MOE) for name, case in EXPERTS.items()},
    # Biases of experts are whole where the layout divides biases of others (Megatron-LM 6099).
    "experts-biases": (4, 2, {TP: 2, ETP: 1, EP: 2}, {**MOE, **BIAS}),
}
"""Name -> ranks, data-parallel size, options, model."""


class _WithMuon(GPTLightningModule):
    def configure_optimizers(self) -> Any:
        matrices, rest, owners = [], [], tied_names(self)
        for name, p in self.named_parameters():
            own = owners.get(name, name)
            inside = ".layers." in own and own.endswith("weight") and p.dim() > 1
            (matrices if inside else rest).append(p)
        # Groups, which may be empty: a stage may have no layers.
        return ChainedOptimizer(
            Muon([{"params": matrices}], lr=LR, weight_decay=0.1),
            AdamW([{"params": rest}], lr=1e-3),
        )


def _orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Newton-Schulz in fp64: x <- a x + (b x x^T + c (x x^T)^2) x, from x = matrix / norm on."""
    a, b, c = coefficients
    x = matrix.double() / matrix.double().norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrix)


def _train(
    options: dict[str, Any],
    replicas: int,
    model: dict[str, Any],
    precision: str,
    steps: int,
    save: str,
    load: str | None,
) -> list[float]:
    """Train until ``steps`` are taken, those of the checkpoint included, and save."""
    module = _WithMuon(_config(num_layers=2, **model), learning_rate=1e-3)
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonalised):
        loader = DataLoader(_samples(5)[: BATCH * 3], batch_size=BATCH // replicas)
        run = fit(options, module, loader, steps=steps, ckpt_path=load, precision=precision)
    run.trainer.save_checkpoint(save)
    return run.norms


def _tensors(path: str) -> dict[str, torch.Tensor]:
    saved = read_full(path)
    rows = saved["optimizer_states"][0]["state"].items()
    found = {
        **saved["state_dict"],
        **{f"{index}.{key}": value for index, row in rows for key, value in row.items()},
    }
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("tp2-fsdp2", "32-true"),
        ("fsdp3", "32-true"),
        ("pp2-fsdp2", "32-true"),
        ("hybrid-offload", "32-true"),
        ("tp2-hybrid", "32-true"),
        ("tp2-fsdp2", "bf16-true"),
        *((f"compiled-{name}", "32-true") for name in COMPILED),
        *((f"experts-{name}", "32-true") for name in EXPERTS),
        ("experts-biases", "32-true"),
    ],
)
def test_muon_steps_whole_matrices(layout: str, precision: str, tmp_path: Path) -> None:
    world, replicas, options, model = LAYOUTS[layout]
    one, sharded = str(tmp_path / "one"), str(tmp_path / "sharded")
    expected = run_ranks(1, _train, {}, 1, model, precision, STEPS, one, None, timeout_s=100)[0]
    # In bf16 the gradients of other sums differ by a digit, and so may the weights, which are about
    # 1.
    rel, rounding = (RTOL, 0.0) if precision == "32-true" else (2**-7, 2**-7)
    for norms in run_ranks(
        world, _train, options, replicas, model, precision, STEPS, sharded, None, timeout_s=100
    ):
        assert norms == pytest.approx(expected, rel=rel)
    values, found = _tensors(one), _tensors(sharded)
    assert found.keys() == values.keys()
    matrices = [
        name
        for name, value in values.items()
        if ".layers." in name and name.endswith("weight") and value.dim() > 1
    ]
    assert len(matrices) == (8 if model is BIAS else 10)
    for name in matrices:
        torch.testing.assert_close(
            found[name].float(), values[name].float(), rtol=rel, atol=TOLERANCE + rounding
        )


def test_gate_and_up_of_an_expert_are_two_matrices() -> None:
    specs = named_shard_specs(GPTModel(_config(num_layers=1, **MOE)))
    experts = "decoder.layers.0.mlp.experts.linear_fc"
    assert specs[f"{experts}1.weight"].fused_rows == (24, 24)
    assert specs[f"{experts}2.weight"].fused_rows == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *(name for name in OPTIONS if name != "pp2-fsdp2"),
        *(f"experts-{name}" for name in EXPERTS if "-fsdp" in name),
    ],
)
def test_what_is_saved_is_exact(layout: str, tmp_path: Path) -> None:
    """Saved by shards, read and saved by one device, and by shards again: the same bits."""
    world, replicas, options, model = LAYOUTS[layout]
    shards, one, again = (str(tmp_path / name) for name in ("shards", "one", "again"))
    case = options, replicas, model, "32-true", 1
    run_ranks(world, _train, *case, shards, None, timeout_s=100)
    run_ranks(1, _train, {}, 1, model, "32-true", 1, one, shards, timeout_s=100)
    run_ranks(world, _train, *case, again, one, timeout_s=100)
    saved = _tensors(shards)
    for path in (one, again):
        read = _tensors(path)
        assert read.keys() == saved.keys()
        assert all(torch.equal(read[name], saved[name]) for name in saved)
