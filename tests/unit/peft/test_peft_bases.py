"""Adapters and their base, against stock ``peft``: tied weights, other sizes, initializations,
layers without tensors, and modules trained in full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")
import peft
import transformers
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.hf_models.meta_models import deferred_weights
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.peft import LoRA, load_adapters, save_adapters
from megatron_lightning.peft.commands import import_, merge
from megatron_lightning.peft.folder import read_folder
from megatron_lightning.peft.methods.applied import applied_to

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
IDS = torch.arange(3, 19)[None]
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def _base(folder: Path, *, tied: bool = True) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def _logits(model: Any, **inputs: Tensor) -> Tensor:
    logits: Tensor = model.eval()(**(inputs or {"input_ids": IDS})).logits
    return logits


def _randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _peft_folder(
    base: Path, target: Path, resize: int | None = None, **options: Any
) -> tuple[Path, Tensor]:
    """Write random adapters by stock peft. Return the folder and the logits."""
    model = _load(base)
    if resize is not None:
        model.resize_token_embeddings(resize, mean_resizing=False)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})
    adapted = peft.get_peft_model(model, config)
    _randomize(adapted)
    adapted.save_pretrained(target)
    return target, _logits(adapted)


# ----------------------------------------------------------------------------------- tied weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "stays_tied"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
    ],
)
def test_a_tied_weight_that_adapters_tear_apart_is_two_weights_in_a_merged_folder(
    tmp_path: Path, options: dict[str, Any], stays_tied: bool
) -> None:
    base = _base(tmp_path / "base")
    folder, logits = _peft_folder(base, tmp_path / "adapter", **options)
    merge(str(folder), str(tmp_path / "merged"), base=str(base))
    merged = _load(tmp_path / "merged")
    torch.testing.assert_close(_logits(merged), logits, rtol=0, atol=2e-5)
    assert merged.config.tie_word_embeddings is stays_tied
    names = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("lm_head.weight" in names) is not stays_tied
    model = _load(base)
    if stays_tied:
        load_adapters(model, folder)
        torch.testing.assert_close(_logits(model), logits, rtol=0, atol=2e-6)
        return
    with pytest.raises(CheckpointError, match=r"adapters merge|tie_word_embeddings: false"):
        load_adapters(model, folder)
    with pytest.raises(CheckpointError, match=r"adapters merge|tie_word_embeddings: false"):
        import_(str(folder), str(tmp_path / "imported.ckpt"), base=str(base))


@pytest.mark.filterwarnings("ignore")
def test_a_tied_base_with_a_head_of_its_own_takes_copies_that_differ(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    folder, logits = _peft_folder(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    bridge = AutoBridge.from_hf_pretrained(base, config_overrides={"tie_word_embeddings": False})
    model: Any = bridge.to_model()
    torch.testing.assert_close(_logits(model), _logits(_load(base)), rtol=0, atol=0)
    torch.testing.assert_close(_logits(load_adapters(model, folder)), logits, rtol=0, atol=2e-6)
    bridge.save_hf_pretrained(model, tmp_path / "whole")
    whole = _load(tmp_path / "whole")
    assert whole.config.tie_word_embeddings is False
    assert torch.equal(whole.lm_head.weight, model.lm_head.weight)
    # Under a strategy, values are read later, from a folder that lacks the head.
    with deferred_weights():
        later: Any = bridge.to_model()
    assert later.lm_head.weight.is_meta and later.lm_head.weight.requires_grad
    assert later.lm_head.weight is not later.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=re.escape(f"{folder} has values of lm_head.weight")):
        load_adapters(later, folder)
    with pytest.raises(ConfigError, match="config_overrides has 'tie_embeddings'"):
        AutoBridge.from_hf_pretrained(base, config_overrides={"tie_embeddings": False})


@pytest.mark.filterwarnings("ignore")
def test_a_weight_of_two_names_is_written_under_both(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    names = ["embed_tokens", "lm_head"]
    model = LoRA(r=4, target_modules=["q_proj"], modules_to_save=names).apply(_load(base))
    _randomize(model)
    save_adapters(model, tmp_path / "adapter")
    folder = read_folder(tmp_path / "adapter")
    assert set(folder.saved) == set(TIED)
    again = peft.PeftModel.from_pretrained(_load(base), tmp_path / "adapter")
    torch.testing.assert_close(_logits(again), _logits(model), rtol=0, atol=2e-6)


# ------------------------------------------------------------------- sizes, values, missing layers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [100, 88])
def test_a_vocabulary_of_another_size_is_refused_with_both_sizes(tmp_path: Path, rows: int) -> None:
    base = _base(tmp_path / "base", tied=False)
    folder, _ = _peft_folder(base, tmp_path / "adapter", resize=rows)
    sizes = rf"lm_head.weight is \[{rows}, 32\] in the adapters and \[96, 32\].*embed_tokens"
    for way in (
        lambda: merge(str(folder), str(tmp_path / "merged"), base=str(base)),
        lambda: import_(str(folder), str(tmp_path / "imported.ckpt"), base=str(base)),
        lambda: load_adapters(_load(base), folder),
    ):
        with pytest.raises(CheckpointError, match=sizes):
            way()
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga"])
def test_adapters_of_a_changed_base_are_refused(tmp_path: Path, init: str) -> None:
    folder = _ours(tmp_path, init_lora_weights=init)
    with pytest.raises(ConfigError, match=r"init_lora_weights=.*path_initial_model_for_weight"):
        read_folder(folder)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_adapters_of_the_base_as_it_is_are_read(tmp_path: Path, init: bool | str) -> None:
    values: dict[str, Any] = {"init_lora_weights": init, "eva_config": {"rho": 2.0}}
    assert read_folder(_ours(tmp_path, **values)).method.r == 8


def _ours(tmp_path: Path, model: Any = None, **values: Any) -> Path:
    if model is None:
        config = transformers.LlamaConfig(**SIZES)
        model = LoRA(target_modules=["q_proj", "v_proj"]).apply(
            transformers.LlamaForCausalLM(config)
        )
    save_adapters(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({}, "model.layers.1.self_attn.v_proj"),
        ({"target_modules": r".*\.(q|v)_proj"}, "model.layers.1.self_attn.v_proj"),
        ({"layers_to_transform": [0]}, None),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "model.layers.1"),
        ({"exclude_modules": ["layers.1.self_attn.v_proj"]}, None),
        ({"exclude_modules": r".*layers\.1\..*"}, None),
        ({"modules_to_save": ["layers.1.self_attn"]}, None),
    ],
)
def test_a_layer_without_tensors_is_refused(
    tmp_path: Path, values: dict[str, Any], missing: str | None
) -> None:
    folder = _ours(tmp_path, **values)
    file = folder / "adapter_model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if "layers.1.self_attn.v_proj" not in n}
    save_file(kept, file, {"format": "pt"})
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if missing is None:
        load_adapters(model, folder)
    else:
        with pytest.raises(CheckpointError, match=rf"1 layers .* \({missing}"):
            load_adapters(model, folder)


# ------------------------------------------------------------------------ modules trained in full


def _llava() -> tuple[Any, dict[str, Tensor], LoRA]:
    text = transformers.LlamaConfig(**SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=95,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    ids = IDS.clone()
    ids[:, 1:5] = 95
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    model = transformers.LlavaForConditionalGeneration(config)
    inputs = {"input_ids": ids, "pixel_values": pixels}
    return model, inputs, LoRA(modules_to_save=["multi_modal_projector"])


def _roberta() -> tuple[Any, dict[str, Tensor], LoRA]:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.RobertaConfig(**sizes, num_labels=3, max_position_embeddings=32)
    model = transformers.RobertaForSequenceClassification(config)
    return model, {"input_ids": IDS}, LoRA()


def _one_norm() -> tuple[Any, dict[str, Tensor], LoRA]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    lora = LoRA(target_modules=["q_proj"], modules_to_save=["layers.1.input_layernorm"])
    return model, {"input_ids": IDS}, lora


def _experts() -> tuple[Any, dict[str, Tensor], LoRA]:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    lora = LoRA(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    return transformers.Qwen3MoeForCausalLM(config), {"input_ids": IDS}, lora


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "modules", "task"),
    [
        (_experts, None, "CAUSAL_LM"),
        (_llava, ["multi_modal_projector"], "CAUSAL_LM"),
        (_roberta, ["classifier"], "SEQ_CLS"),
        (_one_norm, ["1.input_layernorm"], "CAUSAL_LM"),
    ],
)
def test_a_module_trained_in_full_has_no_adapters_inside(
    tmp_path: Path,
    make: Callable[[], tuple[Any, dict[str, Tensor], LoRA]],
    modules: list[str] | None,
    task: str,
) -> None:
    torch.manual_seed(0)
    model, inputs, lora = make()
    model.save_pretrained(tmp_path / "base")
    lora.apply(model)
    saved = applied_to(model)[""].saved
    assert all(model.get_parameter(name).requires_grad for name in saved)
    assert not any(".adapters." in name for name in saved)
    _randomize(model)
    logits = _logits(model, **inputs)
    config = json.loads((_ours(tmp_path, model) / "adapter_config.json").read_text())
    assert config["modules_to_save"] == modules and config["task_type"] == task
    folder, base = tmp_path / "adapter", tmp_path / "base"
    theirs = peft.PeftModel.from_pretrained(type(model).from_pretrained(base), folder)
    torch.testing.assert_close(_logits(theirs, **inputs), logits, rtol=0, atol=2e-5)
    ours = load_adapters(type(model).from_pretrained(base), folder)
    torch.testing.assert_close(_logits(ours, **inputs), logits, rtol=0, atol=2e-5)
    merge(str(folder), str(tmp_path / "merged"), base=str(base))
    merged = type(model).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_logits(merged, **inputs), logits, rtol=0, atol=1e-4)


def test_dense_layers_beside_experts_are_named_where_stock_peft_drops_them(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**SIZES, **sizes, head_dim=8, decoder_sparse_step=2)
    model = transformers.Qwen3MoeForCausalLM(config)
    LoRA(target_modules=["up_proj"], target_parameters=["experts.down_proj"]).apply(model)
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.up_proj .* adapters merge"):
        save_adapters(model, tmp_path / "adapter")


def test_a_new_head_trains_beside_adapters(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    bridge = AutoBridge.from_hf_pretrained(
        base,
        architecture="LlamaForSequenceClassification",
        new_tensors=["score.weight"],
        left_out=["lm_head.*"],
    )
    model: Any = LoRA(target_modules=["q_proj"]).apply(bridge.to_model())
    assert model.score.weight.requires_grad and not hasattr(model.score, "adapters")


def test_nothing_is_left_to_adapt_beside_saved_modules() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match=r"modules_to_save \(model\.layers\.0.*leave out all"):
        LoRA(target_modules=["layers.0.self_attn.q_proj"], modules_to_save=["layers.0"]).apply(
            model
        )
