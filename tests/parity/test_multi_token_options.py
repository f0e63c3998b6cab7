"""Multi-token prediction with Muon and with compiled blocks: layouts equal one process.

Muon: its products in fp64 and the tolerance are those of ``test_sharded_muon``. Compiled blocks:
``aot_eager`` and the tolerances of ``test_compile_option``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import AdamW

from megatron_lightning.config import CompileOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import ChainedOptimizer, Muon
from tests.helpers.ranks import run_ranks
from tests.parity.test_multi_token_prediction import (
    _config,
    _layouts,
    train,
)
from tests.parity.test_sharded_muon import TOLERANCE, _orthogonalised, _tensors, _WithMuon

COMPILED = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
CASES = [
    *(
        ("untied", name)
        for name in ("tp2", "pp2-vpp2", "pp4-own", "pp2-zb", "cp2", "zero1", "fsdp", "tp2-pp2-zbv")
    ),
    *(("tied", name) for name in ("pp4-own", "pp2-fsdp2", "tp2-uniform")),
    *(("experts", name) for name in ("ep2-tp2", "ep2-fsdp", "ep2-tp2-pp2")),
]


def _replicas(model: str, layout: str) -> int:
    world, options = _layouts(model)[layout]
    sizes = ("tensor_model", "pipeline_model", "context")
    for size in sizes:
        world //= options.get(f"{size}_parallel_size", 1)
    return world


def _with_muon(model: str, layout: str | None, path: str) -> Any:
    options = {} if layout is None else _layouts(model)[layout][1]
    replicas = 1 if layout is None else _replicas(model, layout)
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonalised):
        return train(_config(model), options, replicas, kind=_WithMuon, steps=2, end=path)


@pytest.mark.slow  # test_sharded_muon steps matrices
@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*c, marks=() if c == ("untied", "tp2") else pytest.mark.slow) for c in CASES],
)
def test_muon_steps_the_matrices_of_all_depths(model: str, layout: str, tmp_path: Path) -> None:
    one, parts = str(tmp_path / "one"), str(tmp_path / "parts")
    [expected] = run_ranks(1, _with_muon, model, None, one)
    for found in run_ranks(_layouts(model)[layout][0], _with_muon, model, layout, parts):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    values, found = _tensors(one), _tensors(parts)
    assert found.keys() == values.keys()
    assert "model.mtp.layers.0.eh_proj.weight" in values
    for name, value in values.items():
        # Gradients of the biases of keys are rounding alone, which AdamW amplifies.
        if not name.endswith("bias"):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=TOLERANCE, msg=name)


class _ByName(GPTLightningModule):
    """Selects matrices by the names of the rank, where the copy of the embedding is in a layer."""

    def configure_optimizers(self) -> Any:
        names = {name: ".layers." in name and p.dim() > 1 for name, p in self.named_parameters()}
        parts = (
            [p for n, p in self.named_parameters() if names[n] is own] for own in (True, False)
        )
        matrices, rest = parts
        return ChainedOptimizer(Muon(matrices, lr=0.02), AdamW(rest))


def _refused() -> None:
    message = (
        r"model.embedding.word_embeddings.weight is one parameter with copies .*"
        r"rank 0: model.mtp.layers.0.embedding.word_embeddings.weight by Muon\(.*lr=0.02"
        r".*rank 1: model.embedding.word_embeddings.weight by AdamW\(.*tied_names"
    )
    with pytest.raises(ConfigError, match=message):
        train(_config("untied"), _layouts("untied")["pp2"][1], kind=_ByName)


def test_copies_of_one_parameter_in_different_groups_are_refused() -> None:
    """They would diverge without a word."""
    run_ranks(2, _refused)


@cache
def _plain(model: str) -> Any:
    return run_ranks(1, train, _config(model), None)[0]


def _compiled(model: str, layout: str) -> Any:
    torch._dynamo.reset()
    options = {**_layouts(model)[layout][1], **COMPILED}
    return train(_config(model), options, _replicas(model, layout))


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_compiled_blocks_train_as_one_process_without(model: str, layout: str) -> None:
    expected, replicas = _plain(model), _replicas(model, layout)
    for found in run_ranks(_layouts(model)[layout][0], _compiled, model, layout, timeout_s=380):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        if replicas == 1:
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert found["logged"] == pytest.approx(expected["logged"], rel=1e-6)
