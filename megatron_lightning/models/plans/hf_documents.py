"""Documents in a shared row, in models of ``transformers``.

In these models a token sees only its own document if positions restart with every document, no mask
is given, and there is no cache. Other token-mixing layers (state spaces, convolutions, linear
attention) continue across the end of a document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.foreign_code import foreign_code

PACKED_FAMILIES = frozenset({
    "apertus", "arcee", "aria_text", "axk1", "bitnet", "codegen", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "diffllama",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint",
    "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese",
    "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama",
    "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip
"""``model_type`` of configurations whose models separate the documents of a row: packed rows gave
the logits and gradients of single documents (``python -m benchmarks.hf_packed``).
"""

PACKED_WITH_TOWERS = frozenset({
    "aria", "aya_vision", "deepseek_vl", "gemma3", "idefics3", "internvl", "llava", "llava_next",
    "llava_onevision", "ovis2", "vipllava",
})  # fmt: skip
"""``model_type`` of models with a tower, for which the same holds with images, if it holds for
their text model (``python -m benchmarks.hf_packed --images``).
"""

PACKED_WITH_POSITION_ROWS = frozenset({
    "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
    "qwen3_vl_moe",
})  # fmt: skip
"""``model_type`` of models with a tower that count time, height and width apart, for which the same
holds with these three positions of each document behind the flat position."""

_KNOWN = PACKED_FAMILIES | PACKED_WITH_TOWERS | PACKED_WITH_POSITION_ROWS
_CHECKED = "code_separates_documents"
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def separating_positions(
    model: Any,
    document_ids: Tensor,
    position_ids: Tensor | None,
    position_rows: Tensor | None = None,
) -> Tensor:
    """Return positions that make a model of ``transformers`` separate the documents of a row.

    They are [b, s], or [4, b, s] for a model that counts time, height and width apart.

    Args:
        model: Causal language model.
        document_ids: Document number of each token in its row [b, s].
        position_ids: Positions of the batch [b, s]. None: positions are computed.
        position_rows: Flat positions, and the model's own three of each document [b, 4, s]. None:
            rows of text, whose three are the flat ones.

    Raises:
        ConfigError: If the model would let documents see each other all the same.
    """
    config, name = model.config, type(model).__name__
    if not vars(model).get(_CHECKED):  # code of all modules is read once
        check_parts_documents(config, name, foreign_code(model))
        model.__dict__[_CHECKED] = True
    check_parts_documents(config, name)
    attention = str(getattr(config, "_attn_implementation", ""))
    if attention.startswith("flash") and document_ids.shape[0] > 1:
        raise ConfigError(
            f"{name} runs attn_implementation={attention!r} on {document_ids.shape[0]} rows that "
            "hold several documents, and transformers parts them there in calls of one row only. "
            "Set micro_batch_size to 1, or attn_implementation to sdpa."
        )
    if any(getattr(one, "use_cache", False) for one in (config, _text_config(config))):
        raise ConfigError(
            f"use_cache of {name} is on, with which transformers lets the documents of a row see "
            "each other. Set it to False in the model's configuration."
        )
    if position_rows is not None:
        return position_rows.transpose(0, 1)
    positions = restarting(document_ids) if position_ids is None else position_ids
    is_counted_apart = config.model_type in PACKED_WITH_POSITION_ROWS
    return positions.expand(4, -1, -1) if is_counted_apart else positions


def check_parts_documents(config: Any, name: str, code: str | None = None) -> None:
    """Check that a model of ``transformers`` can separate the documents of a row.

    Args:
        config: The model's configuration.
        name: Class or folder of the model.
        code: Code in the model that is not the family's. None: there is none.

    Raises:
        ConfigError: If the family is not known to separate documents, or has other code.
    """
    if code is not None:
        raise ConfigError(
            f"the batch has document_ids, and {name} ({config.model_type}) has code that is not of "
            f"transformers ({code}), which may mix tokens of several documents that share a row. "
            "Set packing to none (reset_attention_mask of PretrainDataModule to false), or leave "
            "the code out."
        )
    is_known = config.model_type in PACKED_WITH_POSITION_ROWS
    if is_known or config.model_type in PACKED_WITH_TOWERS:
        config = _text_config(config)
    other_types = set(getattr(config, "layer_types", None) or ()).difference(_ATTENTION)
    if not (is_known or config.model_type in PACKED_FAMILIES) or other_types:
        kinds = f"layers of the types {sorted(other_types)}" if other_types else "layers"
        raise ConfigError(
            f"the batch has document_ids, and {name} ({config.model_type}) is not known to part "
            f"documents that share a row: it may have {kinds} that mix tokens of several. Set "
            "packing to none (reset_attention_mask of PretrainDataModule to false), or use a model "
            f"of one of the families {', '.join(sorted(_KNOWN))}."
        )


def code_of_folder(config: Any, *, trusts: bool) -> str | None:
    """Return the class of a language model in the code of its folder. None: it has none.

    Args:
        config: Configuration of the folder.
        trusts: Whether code in the folder may run.
    """
    classes = getattr(config, "auto_map", None) or {}
    return classes.get("AutoModelForCausalLM") if trusts else None


def check_position_rows(config: Any, position_rows: Tensor | None) -> None:
    """Check that packed rows with images have the positions that a model needs.

    Raises:
        ConfigError: If the model counts time, height and width apart, and they are missing.
    """
    if position_rows is None and config.model_type in PACKED_WITH_POSITION_ROWS:
        raise ConfigError(
            f"the batch has images and document_ids, and no position_rows: {config.model_type} "
            "counts time, height and width of an image in every document. Add position_rows "
            "[b, 4, s], as FinetuneDataModule does, or one document a row."
        )


def _text_config(config: Any) -> Any:
    """Return the configuration of the text model inside a model with a tower."""
    own = getattr(config, "get_text_config", None)
    return config if own is None else own()


def restarting(document_ids: Tensor) -> Tensor:
    """Return positions [b, s] that restart at every change of the document number, without a wait
    for the device.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return positions - torch.where(begins, positions, 0).cummax(1).values
