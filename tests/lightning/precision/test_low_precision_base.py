"""Checkpoints, merges and refusals beside a frozen base in 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers", "5")

from lightning.pytorch.callbacks import BackboneFinetuning
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.cli import main
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError, MegatronLightningError
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.parallel.shards.stored_weight import StoredWeight, stored_weights
from megatron_lightning.peft import LoRA, load_adapters, merge_adapters
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.parity.test_low_precision_base import PP, STEPS, TEXT, TP, fit, folder, llama

__all__ = ["folder"]

_SIZES: Any = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 67,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**_SIZES))


def gpt_oss() -> Any:
    return GptOssForCausalLM(GptOssConfig(**_SIZES, layer_types=["full_attention"]))


def _fit(*args: Any) -> tuple[list[float], list[float]]:
    *given, options = args
    return fit(*given, **options)


@pytest.fixture(scope="module")
def saved(folder: str) -> str:
    """Two steps under PP 2 with a base of 4 bits. Nothing asks for adapters alone."""
    path = f"{folder}/base4.ckpt"
    options = {PP: 2, "micro_batch_size": 2}
    run_ranks(2, _fit, "llama", folder, options, "nvfp4", {"steps": 2, "save": path}, timeout_s=110)
    return path


@pytest.mark.slow
def test_checkpoints_hold_adapters_and_resume_on_another_layout(folder: str, saved: str) -> None:
    names = {name for name in open_checkpoint(saved).tensors() if name.startswith("state_dict.")}
    assert names and all(".adapters." in name for name in names)
    [(losses, norms)] = run_ranks(1, _fit, "llama", folder, None, "nvfp4", {"rounds": True})
    options = {"data": 2, "load": saved}
    ranks = run_ranks(2, _fit, "llama", folder, {"data_parallel": "fsdp"}, "nvfp4", options)
    for number in range(2, STEPS):
        own = sum(rank[0][number - 2] for rank in ranks) / 2
        assert own == pytest.approx(losses[number], rel=2e-6)  # fp32, after steps of AdamW
    assert ranks[0][1] == pytest.approx(norms[2:], rel=1e-5)


@pytest.mark.slow
def test_adapters_are_merged_into_the_folders_own_values(
    folder: str, saved: str, tmp_path: Path
) -> None:
    main(["adapters", "merge", saved, str(tmp_path / "merged")])
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = load_adapters(llama(), saved)
    assert not stored_weights(adapted)
    with torch.no_grad():
        expected = adapted(TEXT[:2]).logits
        torch.testing.assert_close(merged(TEXT[:2]).logits, expected, rtol=0, atol=2e-6)
        assert (expected - llama()(TEXT[:2]).logits).abs().max() > 1e-3
    unchanged = dict(llama().named_parameters())
    named = dict(merged.named_parameters())
    assert torch.equal(named["lm_head.weight"], unchanged["lm_head.weight"])


def _trainer(**options: Any) -> pl.Trainer:
    strategy = options.pop("strategy", None) or MegatronStrategy()
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, **options,
    )  # fmt: skip


class _Unfrozen(HuggingFaceModule):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.model.layers[1].mlp.up_proj.requires_grad_(True)


def test_what_needs_values_is_refused(folder: str, tmp_path: Path) -> None:
    module = LoRA(base="mxfp8").apply(llama())
    with pytest.raises(ConfigError, match="adapters merge"):
        merge_adapters(module)
    with pytest.raises(MegatronLightningError, match="would write values"):
        module.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(ConfigError, match="a format of bitsandbytes"):
        LoRA(base="nf4")  # type: ignore[arg-type]
    tuned = HuggingFaceModule(f"{folder}/llama", peft=LoRA(base="nvfp4"))
    folders = CheckpointOptions(also_save_hf="end")
    with pytest.raises(ConfigError, match="also_save_hf"):
        _trainer(strategy=MegatronStrategy(checkpoint_options=folders)).fit(tuned, [])
    trained = _Unfrozen(f"{folder}/llama", peft=LoRA(base="nvfp4"))
    with pytest.raises(ConfigError, match=r"up_proj\.weight is to be trained"):
        _trainer().fit(trained, [])
    with pytest.raises(ConfigError, match="BaseFinetuning"):
        _trainer(callbacks=[BackboneFinetuning()]).fit(tuned, [])


def test_plain_lightning_saves_adapters_and_resumes(folder: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    [(losses, _)] = run_ranks(1, _fit, "llama", folder, None, "nvfp4", {"rounds": True})
    first = fit("llama", folder, None, "nvfp4", steps=2, save=path)[0]
    assert first == pytest.approx(losses[:2], rel=1e-6)
    names = torch.load(path, weights_only=True)["state_dict"]
    assert names and not any("proj.weight" in name for name in names)
    # Plain Lightning begins with the first batch again.
    again = fit("llama", folder, None, "nvfp4", steps=3, load=path)[0]
    assert len(again) == 1 and again[0] < losses[0]


def _blocks_of_16(folder: str) -> str:
    try:
        fit("llama", folder, {TP: 2}, "blockwise")
    except MegatronLightningError as error:
        return str(error)
    return ""


def test_a_rank_boundary_inside_a_block_is_refused(folder: str) -> None:
    for error in run_ranks(2, _blocks_of_16, folder):
        assert "keeps 128 columns with a common scale" in error and "o_proj" in error


@pytest.mark.parametrize(("trained", "expected"), [(None, "eager"), (["experts"], "grouped_mm")])
def test_only_quantized_experts_are_computed_one_by_one(trained: Any, expected: str) -> None:
    """Trained experts keep their values, and the grouped GEMM."""
    model = mixtral()
    model.set_experts_implementation("grouped_mm")
    LoRA(r=2, target_modules=["q_proj"], modules_to_save=trained, base="mxfp8").apply(model)
    assert model.config._experts_implementation == expected


@pytest.mark.parametrize("family", [mixtral, gpt_oss])
def test_backward_keeps_no_values_of_untouched_experts(family: Any) -> None:
    """GPT-OSS stores matrices as [in, out]."""
    torch.manual_seed(0)
    model = LoRA(r=2, target_modules=["q_proj"], base="mxfp8").apply(family())
    size = {p.numel() for n, p in model.named_parameters() if ".experts." in n and p.ndim > 2}
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(0 if isinstance(tensor, StoredWeight) else tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TEXT[:2], use_cache=False).logits.square().mean()
    experts = model.config.num_local_experts
    assert 0 < max(kept) < 4 * min(size) // experts  # below one matrix in fp32
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_trained_modules_keep_their_values() -> None:
    module = LoRA(base="nvfp4", modules_to_save=["layers.0.mlp.up_proj"],
                  exclude_modules=["layers.0.mlp.up_proj"]).apply(llama())  # fmt: skip
    stored = stored_weights(module)
    assert "model.layers.0.mlp.up_proj.weight" not in stored
    assert len(stored) == 4 * 7 - 1 and len(adapted_layers(module)) == 4 * 7 - 1
    assert not {name for name in stored if "lm_head" in name or "embed" in name}
