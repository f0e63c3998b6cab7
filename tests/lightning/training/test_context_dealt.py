"""Packed rows dealt to ranks that share each sequence, against one process: what is found in a
model of ``transformers``, modules of a user, images, evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import ContextOptions, PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import CoreAttention
from megatron_lightning.layers.styles import ContextAttention, DividedRows, GatheredTokens
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.strategies import run_pipeline
from tests.lightning.support import Layout, layouts, make_layout, run, single
from tests.lightning.training.test_context_found import _gemma
from tests.lightning.training.test_context_transformers import (
    CP2_DEALT,
    DEALT,
    LENGTH,
    PACKED,
    SIZES,
    VOCABULARY,
    Module,
    _fit,
    _loader,
    _predict,
)

_PARTS: dict[str, Any] = {"context_parallel_size": 2, "micro_batch_size": 1}
CP4_DEALT = make_layout("cp4-dealt", 4, 1, context_parallel_size=4, micro_batch_size=2, **DEALT)
CP2_AUTO = make_layout("cp2-auto", 2, 1, **_PARTS)
CP2_EXPLICIT = make_layout(
    "cp2-explicit", 2, 1, **_PARTS, **DEALT, pipeline_options=PipelineOptions(explicit_steps=True)
)
CP2_PP2_DEALT = make_layout(
    "cp2-pp2-dealt", 4, 1, pipeline_model_parallel_size=2, **_PARTS, **DEALT
)


def _of_ways(way: str) -> Layout:
    options = ContextOptions(chunks_per_rank=4, mixers={"**.self_attn": way})  # type: ignore[dict-item]
    return make_layout(f"cp2-{way}", 2, 1, **_PARTS, context_options=options)


ROWS, GATHER = _of_ways("rows"), _of_ways("gather")


@layouts(CP2_DEALT, slow=[CP4_DEALT, ROWS, GATHER])
def test_mixers_that_are_found(layout: Layout, tmp_path: Path) -> None:
    """Losses of six steps and of validation; fp32 on other partial sums: 1e-5."""
    losses, value = single(_fit, _gemma, Module, True)
    for rank in run(layout, _fit, tmp_path, _gemma, Module, True):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.mark.parametrize("make", [_llama, pytest.param(_gemma, marks=pytest.mark.slow)])
@layouts(CP2_DEALT, slow=[CP4_DEALT])
def test_predictions_are_full_rows_in_order(
    layout: Layout, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Of all micro-batches, which are dealt alike."""
    expected = single(_predict, make, True)
    for rank in run(layout, _predict, tmp_path, make, True):
        assert rank["logits"] == pytest.approx(expected["logits"], rel=1e-4, abs=1e-5)
        assert torch.equal(rank["rows"], expected["rows"])


class _Explicit(Module):
    """Predicts with gradients, as attributions do."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            logits = run_pipeline(self, self._logits, batch)
        return {"logits": logits.detach()}


def _predict_explicitly(layout: Layout, folder: str) -> Tensor:
    predicting = layout.trainer(folder, inference_mode=False)
    outputs = predicting.predict(_Explicit(_llama), _loader(layout.data, True))
    return torch.cat([out["logits"] for out in outputs])


def test_predictions_with_gradients_are_in_order(tmp_path: Path) -> None:
    expected = single(_predict, _llama, True)["logits"]
    for logits in run(CP2_EXPLICIT, _predict_explicitly, tmp_path):
        assert logits == pytest.approx(expected, rel=1e-4, abs=1e-5)


class _Undeclared(Module):
    """Divides positions itself, for two chunks."""

    sequence_dims: ClassVar[Any] = {"input_ids": 1, "targets": 1}

    def _logits(self, batch: Any) -> Tensor:
        tokens, positions = batch["input_ids"], batch["position_ids"]
        if tokens.shape != positions.shape:
            positions = SequencePart(dist.get_rank(), 2).split(positions, 1)
        return self.model(input_ids=tokens, position_ids=positions).logits


@pytest.mark.slow
def test_positions_that_a_step_divides(tmp_path: Path) -> None:
    losses, value = single(_fit, _gemma, _Undeclared, True)
    for rank in run(CP2_DEALT, _fit, tmp_path, _gemma, _Undeclared, True):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


# ----------------------------------------------------------------------------------------- own plan


class _Mean(nn.Module):
    """A mean of the tokens of a document so far, weighted by features."""

    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        same = document_ids[:, :, None] == document_ids[:, None]
        seen = (same & torch.ones_like(same).tril()).to(x)
        return (seen @ x) / seen.sum(-1, keepdim=True)


class _Attends(nn.Module):
    """Attention of a user, which reads a cache where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, attention_mask: Any = None, past_key_values: Any = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 24).transpose(1, 2).chunk(3, -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v)
        causal = attention_mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal)
        return out.transpose(1, 2).flatten(2)


class _Block(nn.Module):
    """A module of each style of a user's plan."""

    def __init__(self, core: nn.Module | None) -> None:
        super().__init__()
        self.mean, self.attention, self.core = _Mean(), _Attends(), core
        self.qkv = None if core is None else nn.Linear(32, 96)

    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        x = x + self.mean(x, document_ids)
        x = x + self.attention(x)
        if self.core is None or self.qkv is None:
            return x
        q, k, v = self.qkv(x).transpose(0, 1).unflatten(2, (4, 24)).chunk(3, -1)
        return x + self.core(q, k, v).transpose(0, 1)


class _Net(nn.Module):
    """Its modules do not keep documents apart, but for one. Whatever they do, ranks do."""

    def __init__(self, *, attends: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        cores = (CoreAttention(0.0) if attends else None for _ in range(2))
        self.layers = nn.ModuleList(map(_Block, cores))
        self.head = nn.Linear(32, VOCABULARY)
        self._rows: dict[str, Any] = {
            "layers.*.mean": GatheredTokens(),
            "layers.*.attention": DividedRows(),
        }
        if attends:
            self._rows["layers.*.core"] = ContextAttention()

    def forward(
        self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embedding(input_ids)
        x = x + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, document_ids)
        return self.head(x)

    def sharding_plan(self) -> ShardingPlan:
        return ShardingPlan(
            modules=self._rows, positions="position_ids", sequence_dim=1, takes_deals=True
        )


class _Own(Module):
    sequence_dims: ClassVar[Any] = {"input_ids": 1, "targets": 1, "document_ids": 1}

    def _logits(self, batch: Any) -> Tensor:
        return self.model(batch["input_ids"], batch["document_ids"])


def _with_documents() -> DataLoader[Any]:
    rows = _loader(1, packed=True).dataset
    for row in rows:
        row["document_ids"] = (row.pop("position_ids") == 0).cumsum(0)
    return DataLoader(rows, batch_size=8)


def _fit_own(layout: Layout, folder: str) -> Any:
    module = _Own(_Net)
    fit = layout.trainer(folder, max_epochs=3)
    fit.fit(module, _with_documents(), _with_documents())
    return module.losses, float(fit.callback_metrics["val"])


@layouts(CP2_DEALT, slow=[CP4_DEALT, CP2_PP2_DEALT])
def test_modules_of_a_user_s_plan(layout: Layout, tmp_path: Path) -> None:
    losses, value = single(_fit_own)
    for rank in run(layout, _fit_own, tmp_path):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


def _refused(layout: Layout, folder: str) -> str:
    module = _Own(lambda: _Net(attends=True))
    with pytest.raises(ConfigError) as refusal:
        layout.trainer(folder, max_steps=1).fit(module, _with_documents())
    return str(refusal.value)


def test_attention_that_is_not_told_the_chunks_is_refused(tmp_path: Path) -> None:
    """A plan says that all its modules take them."""
    for message in run(CP2_DEALT, _refused, tmp_path):
        assert "a CoreAttention was called without the documents of the rows" in message


# --------------------------------------------------------------------------------------- long rows

_LONG = 512


def _long_gemma() -> nn.Module:
    sizes = SIZES | {"max_position_embeddings": _LONG}
    config = transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=50)
    return transformers.Gemma2ForCausalLM(config)


def _fit_long(layout: Layout, folder: str) -> Any:
    lengths = [[32 * n for n in row] for row in PACKED]
    positions = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    tokens = torch.randint(VOCABULARY, (4, _LONG + 1), generator=torch.Generator().manual_seed(1))
    rows = [
        {"input_ids": row[:-1], "targets": row[1:], "position_ids": own}
        for row, own in zip(tokens, positions, strict=True)
    ]
    module = Module(_long_gemma)
    fit = layout.trainer(folder, max_epochs=2)
    fit.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=2))
    return module.losses, float(fit.callback_metrics["val"])


@pytest.mark.slow
def test_the_number_of_chunks_is_found(tmp_path: Path) -> None:
    losses, value = single(_fit_long)
    for rank in run(CP2_AUTO, _fit_long, tmp_path):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)
