"""Transformer Engine on a GPU: trainings beside bf16, products beside the emulation's, and state.
Skipped where it cannot be used. On one GPU, so at tensor-parallel size 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.config import MoEConfig, RecomputeOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim.gradients.parameter_storage import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.backends import Backend
from megatron_lightning.precision.quantized_data import (
    Range,
    WeightRanges,
    encode,
)
from megatron_lightning.precision.transformer_engine.library import load
from megatron_lightning.precision.transformer_engine.recipes import check_available, te_recipe
from megatron_lightning.precision.transformer_engine.weights import QuantizedWeight
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.trainers import Losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEQUENCE, BATCH, VOCABULARY = 128, 8, 256
RECOMPUTE = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


@pytest.fixture(params=["delayed", "current", "blockwise", "mxfp8", "nvfp4"])
def recipe(request: Any) -> FP8Recipe:
    """A recipe that this GPU's Transformer Engine can run."""
    found = FP8Recipe(scaling=request.param)
    try:
        check_available(found, load(has_gpu=True))
    except ConfigError as error:
        pytest.skip(str(error))
    return found


def _data(steps: int) -> DataLoader[dict[str, Tensor]]:
    """Return sequences x(t + 1) = (3 x(t) + step) mod 256 of 8 different steps."""
    start = torch.randint(
        0, VOCABULARY, (BATCH * steps,), generator=torch.Generator().manual_seed(5)
    )
    tokens = [start]
    for _ in range(SEQUENCE):
        tokens.append((3 * tokens[-1] + torch.arange(BATCH * steps) % 8) % VOCABULARY)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.stack(tokens, dim=1)]
    return DataLoader(rows, batch_size=BATCH)


def _fit(
    recipe: FP8Recipe | None,
    *,
    steps: int = 50,
    backend: Backend = "transformer_engine",
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    ckpt_path: str | None = None,
) -> list[float]:
    pl.seed_everything(1)
    record = Losses()
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe is not None:
        precision = {"plugins": [MegatronFP8Precision(recipe, backend=backend)]}
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=512, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        hidden_dropout=0.0, attention_dropout=0.0, **(model or {}),
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[record, *callbacks],
        enable_checkpointing=bool(callbacks),
        strategy=MegatronStrategy(**{"micro_batch_size": 2, **(strategy or {})}), **precision,
    )  # fmt: skip
    trainer.fit(GPTLightningModule(config, learning_rate=1e-3), _data(50), ckpt_path=ckpt_path)
    return record.losses


@pytest.mark.parametrize(
    "model", [{}, {"moe": MoEConfig(num_experts=4)}, {"normalization": "LayerNorm"}],
    ids=["dense", "experts", "layernorm"],
)  # fmt: skip
def test_a_training_tracks_bf16(recipe: FP8Recipe, model: dict[str, Any]) -> None:
    """Within 5 % (15 % with 4 bits) of bf16 at the end, and not equal to it."""
    losses, bf16 = _fit(recipe, model=model), _fit(None, model=model)
    limit = 0.15 if recipe.scaling == "nvfp4" else 0.05
    assert losses != bf16
    assert sum(losses[-10:]) == pytest.approx(sum(bf16[-10:]), rel=limit)


def test_it_tracks_the_emulation(recipe: FP8Recipe) -> None:
    """The same scales and rounding: the first losses within 1 % (kernels add up otherwise)."""
    losses, emulated = _fit(recipe, steps=5), _fit(recipe, steps=5, backend="emulation")
    assert losses == pytest.approx(emulated, rel=1e-2)


def test_recomputation_changes_nothing(recipe: FP8Recipe) -> None:
    """The second forward has the scales of the first: equal bit by bit, but for stochastic
    rounding."""
    again = _fit(recipe, steps=5, strategy={"recompute": RECOMPUTE})
    limit = 1e-2 if recipe.scaling == "nvfp4" else 0.0
    assert _fit(recipe, steps=5) == pytest.approx(again, rel=limit, abs=0.0)


def test_resume_continues_with_the_scales(recipe: FP8Recipe, tmp_path: Path) -> None:
    """From a checkpoint without a pickle; bf16 continues from it as well."""
    save = ModelCheckpoint(dirpath=tmp_path, filename="at", every_n_train_steps=3, save_top_k=1)
    full = _fit(recipe, steps=6)
    _fit(recipe, steps=3, callbacks=(save,))
    path = str(tmp_path / "at.ckpt")
    limit = 1e-2 if recipe.scaling == "nvfp4" else 1e-6
    assert _fit(recipe, steps=6, ckpt_path=path)[-3:] == pytest.approx(full[-3:], rel=limit)
    assert _fit(None, steps=6, ckpt_path=path)[-3:] == pytest.approx(full[-3:], rel=5e-2)


@pytest.fixture
def group() -> Iterator[AxisGroup]:
    """A group of this rank alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield AxisGroup("dp-cp", (0,), 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_codes_are_those_that_a_module_makes(recipe: FP8Recipe, group: AxisGroup) -> None:
    """Output and gradients of a module whose weight is codes are those of one that quantizes it,
    bit by bit, before and after the weight has changed."""
    if recipe.scaling in ("mxfp8", "nvfp4"):
        pytest.skip("weights are not kept as codes")
    library = load(has_gpu=True)
    te, own = library.pytorch, te_recipe(recipe, library, reduces=False)
    sizes: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "device": "cuda"}
    plain = te.Linear(256, 512, **sizes)
    with te.quantized_model_init(enabled=True, recipe=own):
        module = te.Linear(256, 512, init_method=nn.init.zeros_, **sizes)
    layer = nn.Linear(256, 512, bias=False, device="cuda")
    quantizer = QuantizedWeight(layer, {"weight": module.weight}, own, library.tensors)
    codes = torch.zeros(512, 256, dtype=torch.uint8, device="cuda")
    layer.weight.data = codes.view(quantizer.dtype)
    set_grad_dtype(layer.weight, None)
    main = plain.weight.detach().flatten()
    weight = WeightRanges(quantizer, [Range(0, main, codes.view(-1))], codes.device)
    for _ in range(2):
        x = torch.randn(64, 256, device="cuda")
        results = []
        encode([weight], group, all_reduce)
        for each, parameter in ((plain, plain.weight), (module, layer.weight)):
            if each is module:
                each._parameters.update(quantizer.bound())
            parameter.grad, inputs = None, x.clone().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16), te.autocast(enabled=True, recipe=own):
                y = each(inputs, is_first_microbatch=True)
            y.sum().backward()
            results.append((y, inputs.grad, parameter.grad))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        plain.weight.data.mul_(1.5)
