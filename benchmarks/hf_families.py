"""Tiny random models of every causal-LM family of the installed ``transformers``.

A family's own configuration is shrunk by the names of its fields. Where the generic values
contradict each other, further attempts change a few of them; some families have values of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

VOCABULARY = 128
LENGTH = 32

_NUM_LAYERS = 4
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size", "n_inner", "dff"), 64
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "mlp_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _NUM_LAYERS
    ),
    "encoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": _NUM_LAYERS,
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "chunk_size"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "dropout",
            "activation_dropout",
            "embedding_dropout",
            "layerdrop",
            "encoder_layerdrop",
            "decoder_layerdrop",
            "summary_first_dropout",
            "classifier_dropout",
            "residual_dropout",
            "residual_dropout_prob",
            "embd_dropout",
            "ffn_dropout",
            "dropout_rate",
            "router_jitter_noise",
            "input_jitter_noise",
        ),
        0.0,
    ),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "first_k_dense_replace": 1,
    "is_decoder": True,
    "output_router_logits": False,
}

_ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"intermediate_size": 32},
    {"head_dim": None, "first_k_dense_replace": None},
)
"""Changes to the generic values; None: the family's own value."""


_IMAGE, _PATCH, _CLASSES = 8, 4, 4
_PICTURES: dict[str, Any] = {
    "image_size": _IMAGE, "patch_size": _PATCH,
    "id2label": {index: str(index) for index in range(_CLASSES)},
}  # fmt: skip
_LLAVA: dict[str, Any] = {
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": _IMAGE,
        "patch_size": _PATCH, "projection_dim": 16,
    },
    "text_config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "image_token_index": VOCABULARY - 1, "vision_feature_layer": -1, "image_seq_length": 4,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deit", "dinov2", "vit"), _PICTURES),
    "llava": _LLAVA,
    # Indexers that leave keys out, in short rows.
    **{name: {"index_topk": 6} for name in ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4")},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}
    },
    "cpmant": {"dim_ff": 64, "dim_head": 8, "prompt_length": 4, "init_std": 0.02},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * _NUM_LAYERS,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "gptj": {"rotary_dim": 4},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "nemotron_h": {
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "layer_types": ["mamba", "moe", "attention", "mamba"],
    },
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 64,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of single families."""


class Family(NamedTuple):
    """A family of models."""

    name: str
    model_class: str
    kind: str = "causal"
    """causal, masked, translating, "images and text", or images: what the model predicts."""


class NotBuiltError(RuntimeError):
    """No attempt gave a model whose loss is finite; the message is the last attempt's error."""


def families() -> list[Family]:
    """Return the causal-LM families of the installed ``transformers``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(Family(*item) for item in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


def other_families() -> list[Family]:
    """Return encoders, encoder-decoders and models with images."""
    masked, translating = "ForMaskedLM", "ForConditionalGeneration"
    names = {
        "masked": {
            "albert": "Albert", "bert": "Bert", "deberta-v2": "DebertaV2",
            "distilbert": "DistilBert", "electra": "Electra", "esm": "Esm",
            "modernbert": "ModernBert", "roberta": "Roberta",
        },
        "translating": {
            "bart": "Bart", "mbart": "MBart", "mt5": "MT5", "pegasus": "Pegasus", "t5": "T5",
            "umt5": "UMT5",
        },
        "images and text": {"llava": "Llava"},
        "images": {"deit": "DeiT", "dinov2": "Dinov2", "vit": "ViT"},
    }  # fmt: skip
    heads = {"masked": masked, "images": "ForImageClassification"}
    return [
        Family(name, prefix + heads.get(kind, translating), kind)
        for kind, prefixes in names.items()
        for name, prefix in prefixes.items()
    ]


def load(family: Family) -> type[nn.Module]:
    """Import the family's modules, and return its class."""
    import transformers

    found: type[nn.Module] = getattr(transformers, family.model_class)
    return found


def small_config(family: Family) -> Any:
    """Return the first shrunk configuration that gives a model with a finite loss.

    Raises:
        NotBuiltError: If none does.
    """
    error: Exception | None = None
    for options in _candidates(family):
        try:
            config = _config_class(family)(**options)
            model = build(family, config)
            loss = loss_of(model, default_collate(rows(2, family.kind)))
            loss.backward()  # type: ignore[no-untyped-call]
            if bool(loss.isfinite()):
                return config
            error = ValueError(f"the loss is {loss.item()}")
        except Exception as failure:
            error = failure
    raise NotBuiltError(f"{type(error).__name__}: {str(error).strip()[:200]}")


def build(family: Family, config: Any) -> nn.Module:
    """Return the model with seeded weights, to which noise is added, so that no zero hides
    another.
    """
    torch.manual_seed(0)
    model = load(family)(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    return model.train()


def rows(count: int, kind: str = "causal") -> list[dict[str, Tensor]]:
    """Return ``count`` rows of random tokens, none of them special, and of those that follow, or of
    images with a class or beside the tokens.
    """
    generator = torch.Generator().manual_seed(2)
    highest = VOCABULARY - (kind == "images and text")  # the last token stands for an image
    text = torch.randint(3, highest, (count, LENGTH + 1), generator=generator)
    found = [{"inputs": row[:-1].clone(), "targets": row[1:]} for row in text]
    if kind == "translating":  # a source of another length than the text that the decoder reads
        found = [row | {"source": row["inputs"].flip(0)[:-3]} for row in found]
    if not kind.startswith("images"):
        return found
    pictures = torch.randn(count, 3, _IMAGE, _IMAGE, generator=generator)
    if kind == "images":
        return [
            {"images": picture, "targets": row["targets"][:1] % _CLASSES}
            for row, picture in zip(found, pictures, strict=True)
        ]
    for row in found:
        row["inputs"][1 : 1 + (_IMAGE // _PATCH) ** 2] = VOCABULARY - 1
    return [row | {"images": p} for row, p in zip(found, pictures, strict=True)]


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of predicting the next token, or the class of an image."""
    images = batch.get("images")
    given: dict[str, Any] = {} if images is None else {"pixel_values": images}
    if "source" in batch:
        given |= {"input_ids": batch["source"], "decoder_input_ids": batch["inputs"]}
    elif "inputs" in batch:
        given["input_ids"] = batch["inputs"]
    if "inputs" in batch and not type(model).__name__.endswith("MaskedLM"):
        given["use_cache"] = False
    logits = model(**given).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), batch["targets"].flatten())


def _config_class(family: Family) -> type[Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: type[Any] = CONFIG_MAPPING[family.name]
    return kind


def _candidates(family: Family) -> Iterator[Mapping[str, Any]]:
    """Yield the keywords of configurations, the likeliest first."""
    default = _config_class(family)()
    known = {name: value for name, value in _SMALL.items() if _has(default, name)}
    if family.kind != "causal" and "is_decoder" in known:
        known["is_decoder"] = False
    known |= _OWN.get(family.name, {})
    lists = {n: value for n, value in _short_lists(default).items() if n not in known}
    for change in _ATTEMPTS:
        options = {**known, **{name: v for name, v in change.items() if name in known}}
        options = {name: v for name, v in options.items() if v is not None}
        yield options
        if lists:
            yield {**options, **lists}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except Exception:  # a configuration whose layers differ refuses to name one value
        return False


def _short_lists(config: Any) -> dict[str, Any]:
    """Return the values per layer, as many as the shrunk model has."""
    count = getattr(config, "num_hidden_layers", None)
    return {
        name: value[:_NUM_LAYERS]
        for name, value in vars(config).items()
        if isinstance(value, list) and isinstance(count, int) and len(value) == count
    }
