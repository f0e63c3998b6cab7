"""Models of ``transformers`` whose mixers of tokens are found and proven, on ranks that share each
sequence, against one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.config import CompileOptions, ContextOptions, RecomputeOptions
from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.layers.shared_rows import mixers
from megatron_lightning.layers.shared_rows.entry import shared_models
from megatron_lightning.peft import LoRA
from tests.helpers.adapted import fill
from tests.lightning.support import Layout, layouts, make_layout, run, single
from tests.lightning.training.test_context_transformers import (
    CP2,
    CP2_DP2,
    CP2_EP2,
    CP2_FSDP,
    CP2_PP2,
    CP2_TP2,
    CP4,
    SIZES,
    Hides,
    Module,
    Packed,
    _fit,
    _loader,
    _predict,
)

CP2_SP = make_layout(
    "cp2-sp", 4, 1, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
)
CP2_DIVIDED = make_layout(
    "cp2-divided", 2, 1, context_parallel_size=2, context_options=ContextOptions(mixers="divided")
)
CP2_GATHERED = make_layout(
    "cp2-gathered",
    2,
    1,
    context_parallel_size=2,
    context_options=ContextOptions(mixers={"**.self_attn": "gather"}),
)
RECOMPUTED = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CP2_RECOMPUTED = make_layout(
    "cp2-recomputed",
    2,
    1,
    context_parallel_size=2,
    recompute=RECOMPUTED,
)
CP2_PP2_VPP2 = make_layout(
    "cp2-pp2-vpp2",
    4,
    1,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)
CP2_PP2_FSDP = make_layout(
    "cp2-pp2-fsdp",
    4,
    1,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    micro_batch_size=4,
    data_parallel="fsdp",
)
CP2_UNGUARDED = make_layout("cp2-unguarded", 2, 1, context_parallel_size=2, guards="ignore")
COMPILED: dict[str, Any] = {
    "context_parallel_size": 2,
    "compile": "block",
    "compile_options": CompileOptions(backend="aot_eager"),
}
CP2_COMPILED = make_layout("cp2-compiled", 2, 1, **COMPILED)
CP2_COMPILED_RECOMPUTED = make_layout(
    "cp2-compiled-recomputed", 2, 1, **COMPILED, recompute=RECOMPUTED
)
CP2_WHOLE_GRAPHS = make_layout(
    "cp2-whole-graphs",
    2,
    1,
    **COMPILED | {"compile_options": CompileOptions(backend="aot_eager", fullgraph=True)},
)


def _gpt_oss(**more: Any) -> nn.Module:
    """Sinks and windows, and experts."""
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, sliding_window=5, **more
    )
    return transformers.GptOssForCausalLM(config)


def _qwen3_5() -> nn.Module:
    """Convolutions and gated delta rules beside attention, from weights with which a rounding leads
    no farther than the tolerance in six steps (1e-7 to 5e-4 from the usual ones).
    """
    delta = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    sizes = SIZES | {"initializer_range": 0.05}
    config = transformers.Qwen3_5TextConfig(**sizes, **delta, **dims, layer_types=kinds)
    return transformers.Qwen3_5ForCausalLM(config)


def _deep() -> nn.Module:
    """A window, capped scores, and a layer for each of four stages."""
    config = transformers.Gemma2Config(
        **SIZES | {"num_hidden_layers": 4}, head_dim=8, sliding_window=5
    )
    return transformers.Gemma2ForCausalLM(config)


def _bloom(**more: Any) -> nn.Module:
    """Biases by distance."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **more))


def _gemma() -> nn.Module:
    """Capped scores."""
    config = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=5)
    return transformers.Gemma2ForCausalLM(config)


MODELS = {"gpt_oss": _gpt_oss, "qwen3_5": _qwen3_5, "bloom": _bloom, "gemma2": _gemma}


def _assert_equal(ranks: Any, make: Callable[[], nn.Module]) -> None:
    """Losses of six steps and of validation; fp32 on other partial sums: 1e-5."""
    losses, value = single(_fit, make)
    steps = [
        sum(of_step) / len(ranks) for of_step in zip(*(rank[0] for rank in ranks), strict=True)
    ]
    assert steps == pytest.approx(losses, rel=1e-5)  # a data-parallel rank has its own
    assert [rank[1] for rank in ranks] == pytest.approx([value] * len(ranks), rel=1e-5)


@layouts(CP2, slow=[CP2_PP2, CP4, CP2_DP2, CP2_FSDP, CP2_TP2, CP2_EP2, CP2_RECOMPUTED])
def test_sinks_and_windows(layout: Layout, tmp_path: Path) -> None:
    _assert_equal(run(layout, _fit, tmp_path, _gpt_oss), _gpt_oss)


@pytest.mark.slow
@layouts(CP2, CP4, CP2_DP2, CP2_FSDP, CP2_RECOMPUTED, CP2_PP2)
def test_linear_attention(layout: Layout, tmp_path: Path) -> None:
    _assert_equal(run(layout, _fit, tmp_path, _qwen3_5), _qwen3_5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "gemma2"])
@layouts(CP2, CP2_FSDP)
def test_other_families(layout: Layout, name: str, tmp_path: Path) -> None:
    _assert_equal(run(layout, _fit, tmp_path, MODELS[name]), MODELS[name])


def _adapted() -> nn.Module:
    """Adapters inside of modules that mix tokens."""
    return fill(LoRA(target_modules=["q_proj", "v_proj", "o_proj"]).apply(_gpt_oss()), zero=False)


@pytest.mark.slow
@layouts(CP2_GATHERED, CP2, CP2_FSDP, CP2_PP2)
def test_adapters(layout: Layout, tmp_path: Path) -> None:
    _assert_equal(run(layout, _fit, tmp_path, _adapted), _adapted)


@pytest.mark.slow
@layouts(CP2_PP2_VPP2, CP2_PP2_FSDP)
def test_stages_of_a_pipeline(layout: Layout, tmp_path: Path) -> None:
    """Each rank finds what mixes tokens in the stages that it holds."""
    _assert_equal(run(layout, _fit, tmp_path, _deep), _deep)


@pytest.mark.slow
@layouts(CP2, CP2_PP2)
def test_predictions_are_full_sequences_in_order(layout: Layout, tmp_path: Path) -> None:
    expected = single(_predict, _qwen3_5)
    for rank in run(layout, _predict, tmp_path, _qwen3_5):
        assert rank["logits"] == pytest.approx(expected["logits"], rel=1e-4, abs=1e-5)
        assert torch.equal(rank["rows"], expected["rows"])


def _fit_compiled(*arguments: Any) -> tuple[list[float], float, int]:
    """Return the losses and the value of :func:`_fit`, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    losses, value = _fit(*arguments)
    return losses, value, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5"])
@layouts(CP2_COMPILED, CP2_COMPILED_RECOMPUTED)
def test_compiled_blocks(layout: Layout, name: str, tmp_path: Path) -> None:
    """Graphs before and behind a module that mixes tokens, with gradients and without: blocks of a
    kind share them.
    """
    ranks = run(layout, _fit_compiled, tmp_path, MODELS[name])
    _assert_equal([rank[:2] for rank in ranks], MODELS[name])
    assert {rank[2] for rank in ranks} == {8 if name == "qwen3_5" else 4}  # two kinds of blocks


# ----------------------------------------------------------------------------------------- refusals


class _Mixes(nn.Module):
    """A norm behind the blocks that moves tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


def _mixed_behind() -> nn.Module:
    model: Any = _gpt_oss()
    model.model.norm = _Mixes()
    return model


def _mixed_inside() -> nn.Module:
    model: Any = _gpt_oss()
    model.model.layers[1].input_layernorm = _Mixes()
    return model


class _Positions(Packed):
    """Documents within a row."""


class _Crops(Module):
    """Calls the model with fewer tokens than the rank's part, which no guard looks for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"][:, :-2]).logits
        targets = batch["targets"][:, :-2]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Blurs(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A subclass of a known family that mixes tokens behind the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = _Mixes()(output.logits)
        return output


def _blurred() -> nn.Module:
    return _Blurs(transformers.LlamaConfig(**SIZES))


def _zero_outputs() -> nn.Module:
    """Attention begins as nothing, as in models that start training so."""
    model: Any = _qwen3_5()
    nn.init.zeros_(model.model.layers[0].linear_attn.out_proj.weight)
    return model


CASES: dict[str, tuple[Layout, type[Module], Callable[[], nn.Module], str]] = {
    "sequence parallel": (CP2_SP, Module, _gpt_oss, "sequence_parallel|gathers its output"),
    "divided": (CP2_DIVIDED, Module, _mixed_inside, r"input_layernorm .* share it \(ring, exch"),
    "cropped rows": (CP2_UNGUARDED, _Crops, _gpt_oss, "input_ids of 6 columns, .* 16 .* 8"),
    "weights of zeros": (CP2, Module, _zero_outputs, r"linear_attn.*out_proj.weight of zeros"),
    "whole graphs": (CP2_WHOLE_GRAPHS, Module, _gpt_oss, "makes? no graph. Set fullgraph"),
    "mask": (CP2, Hides, _gpt_oss, "attention_mask hides positions"),
    "documents": (CP2, _Positions, _gpt_oss, "position_ids that begin documents"),
    "behind the blocks": (CP2, Module, _mixed_behind, "does not give on ranks that share rows"),
    "subclass": (CP2, Module, _blurred, "_Blurs does not give on ranks that share rows"),
    "dropout": (CP2, Module, lambda: _bloom(attention_dropout=0.1), "has dropout of 0.1"),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    _, kind, make, _ = CASES[case]
    try:
        layout.trainer(folder, max_epochs=1).fit(kind(make), _loader(1))
    except MegatronLightningError as error:
        return str(error)
    return None


@pytest.mark.spread(4)
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_shared_is_refused(case: str, tmp_path: Path) -> None:
    layout, _, _, message = CASES[case]
    for found in run(layout, _refused, tmp_path, case):
        assert found and re.search(message, found), found


@dataclass
class _OneRowMore(mixers.DividedRows):
    """Takes the mask of the next rank's queries."""

    def _causal(self, kwargs: dict[str, Any]) -> Tensor | None:
        mask = super()._causal(kwargs)
        return None if mask is None else mask.roll(1, 3)


def _kinds(layout: Layout, folder: str, make: Callable[[], nn.Module]) -> list[str]:
    from megatron_lightning.layers.shared_rows import kinds

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kinds, "KINDS", (_OneRowMore, mixers.GatheredMixer))
        module = Module(make)
        trainer = layout.trainer(folder, max_steps=1)
        trainer.fit(module, _loader(1))
    trainer.save_checkpoint(f"{folder}/saved")
    [shared] = shared_models(module).values()
    recorded = read_manifest(f"{folder}/saved").info["context_mixers"]
    assert recorded == {f"model.{path}": kind for path, kind in shared.kinds.items()}
    return list(shared.kinds.values())


def test_a_way_that_is_wrong_is_not_taken(tmp_path: Path) -> None:
    """A mask that is off by one key fails the proof; full rows are gathered."""
    for kinds in run(CP2, _kinds, tmp_path, _qwen3_5):
        assert kinds == ["gather", "gather"]
