"""Models of ``transformers`` with attention over the tokens of other ranks.

The models' attention looks its function up by name, and ours is one of the functions. A listed
family mixes the tokens of a sequence only in attention, and the attention needs only causality and
a window. Each family trains on ranks with shared sequences as in one process (docs/hf_coverage.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.transformers_attention import looks_attention_up
from megatron_lightning.layers.shared_rows.row_names import reads_source
from megatron_lightning.layers.styles import ContextAttention
from megatron_lightning.layers.styles.divided_embeddings import DividedEmbeddings, documents_of
from megatron_lightning.layers.styles.shared_rows import FoundMixers
from megatron_lightning.models.plans.foreign_code import foreign_code
from megatron_lightning.models.plans.hf_rows import as_patterns
from megatron_lightning.models.plans.hf_towers import towers_of
from megatron_lightning.models.router_loss import LOGITS
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style

FAMILIES = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "jetmoe",
    "llama", "longcat_flash", "mellum", "minicpm3", "minimax_m2", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "youtu",
})  # fmt: skip
"""``model_type`` of the configurations."""

IMAGE_FAMILIES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "aria", "aya_vision", "deepseek_vl", "idefics3", "internvl", "llava", "llava_next",
                "llava_onevision", "mistral3", "ovis2", "smolvlm", "vipllava",
            ),
            FAMILIES,
        ),
        **{
            name: frozenset({f"{name}_text"})
            for name in (
                "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl",
                "qwen3_vl", "qwen3_vl_moe",
            )
        },
    }
)  # fmt: skip
"""``model_type`` of models that merge images with the embeddings of text -> ``model_type`` of the
text models, called with embeddings."""
_TEXT_MODELS = ("language_model", "text_model")
_HEADS_OF_TOKENS = (
    "ForCausalLM", "LMHeadModel", "WithLMHead", "ForMaskedLM", "ForConditionalGeneration",
    "MTModel", "GenerationDecoder", "Text2Text",
)  # fmt: skip
"""Ends of the names of classes of ``transformers``."""

_FULL_ROWS = ("input_ids", "position_ids", "mm_token_type_ids", "token_type_ids")
"""Keywords of models with images for values of tokens, which they get of full rows."""
_DOCUMENTS = "documents"
"""Keyword that reaches our attention through the layers' calls."""


def with_context(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with rows that bind the attention of a model of ``transformers``.

    Raises:
        ConfigError: If the attention cannot be bound, or other layers mix the tokens of a sequence.
    """
    config: Any = model.config
    name = type(model).__name__
    if takes_images(model):
        return _with_divided_embeddings(model, plan)
    if not _is_language_model(model):
        raise ConfigError(
            f"{name} is not known to work on ranks that share sequences: its head may mix tokens, "
            "as heads that judge a whole text do. Set context_parallel_size to 1, or use a "
            "language model."
        )
    if getattr(model, "pooler", None) is not None:
        raise ConfigError(
            f"{name}.pooler_output is made of one token of a row, and ranks that share rows would "
            "each take one of their own part. Make the model with add_pooling_layer=False, or set "
            "context_parallel_size to 1."
        )
    if finds_mixers(model):
        return _with_found_mixers(model, plan)
    _check_positions(config, name)
    paths = dict(model.named_modules())
    return plan | ShardingPlan(
        modules=as_patterns(_attention_rows(paths, plan), paths),
        sequence_dim=plan.sequence_dim,
        positions="position_ids",
        documents=_DOCUMENTS,
        packed_positions=True,
        takes_deals=True,
    )


def finds_mixers(model: nn.Module) -> bool:
    """Return whether what mixes tokens in a language model of ``transformers`` is not known: by
    its family, or since code of others is in it.
    """
    config: Any = model.config
    is_known = config.model_type in FAMILIES and foreign_code(model) is None
    return not takes_images(model) and not is_known


def _with_found_mixers(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with a row for the model, whose mixers of tokens are found before the first
    step.

    Raises:
        ConfigError: If the model cannot share rows, see :func:`_check_rows`.
    """
    _check_rows(model)
    return plan | ShardingPlan(
        modules={"": FoundMixers(also=plan.style_of(""), takes_media=bool(towers_of(model)))},
        sequence_dim=plan.sequence_dim,
        positions="",
        packed_positions=True,
        takes_deals=not towers_of(model),
    )


def _check_rows(model: nn.Module) -> None:
    """Check what a short row does not show, or shows only when processes run.

    Raises:
        ConfigError: If the model takes other rows than those of text, has experts with a capacity,
            or drops attention weights.
    """
    own: Any = model
    config, name = own.config, type(model).__name__
    has_parts = config.get_text_config() is not config
    if has_parts and config.is_encoder_decoder and own.main_input_name == "input_ids":
        raise ConfigError(
            f"{name} has a decoder with a configuration of its own, and ranks that share rows know "
            "encoder-decoders with one configuration (T5, BART). Set context_parallel_size to 1, "
            "or use such a model."
        )
    if (has_parts and not towers_of(model)) or own.main_input_name != "input_ids":
        raise ConfigError(
            f"{name} takes other rows beside those of text, and context-parallel ranks share rows "
            "of text. Set context_parallel_size to 1, or use a model with cp2 in "
            "docs/hf_coverage.md."
        )
    if any(hasattr(owner, "expert_capacity") for owner in (config, *model.modules())):
        raise ConfigError(
            f"{name} has experts with a capacity (expert_capacity), which drop tokens by those "
            "before them in the row, and ranks that share rows would count those of their part. "
            "Set context_parallel_size to 1, or use a model whose experts take every token."
        )
    if rate := getattr(config.get_text_config(), "dropout_rate", 0):
        raise ConfigError(
            f"{name} has dropout_rate={rate} in its configuration, which drops attention weights "
            "too, and ranks that share rows would drop different ones. Set dropout_rate to 0, or "
            "context_parallel_size to 1."
        )


def takes_images(model: nn.Module) -> bool:
    """Return whether a model of ``transformers`` merges images with text in a known way."""
    config: Any = getattr(model, "config", None)
    known = IMAGE_FAMILIES.get(getattr(config, "model_type", ""), frozenset())
    return bool(known) and config.get_text_config().model_type in known


def _with_divided_embeddings(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with rows for the text model of a model with images. Its tower sees all
    images on every rank.
    """
    if code := foreign_code(model, beside=towers_of(model)):  # every rank runs them on all images
        raise ConfigError(
            f"{type(model).__name__} has code that is not of transformers ({code}), which may mix "
            "the tokens of a row, and ranks that share sequences know what the family does. Leave "
            "the code out, or set context_parallel_size to 1."
        )
    paths = dict(model.named_modules())
    text = next(path for path in paths if path.rpartition(".")[2] in _TEXT_MODELS)
    _check_positions(model.config.get_text_config(), type(model).__name__)  # type: ignore[union-attr,operator]
    inner = {path: child for path, child in paths.items() if path.startswith(f"{text}.")}
    rows = _attention_rows(inner, plan) | {text: DividedEmbeddings(also=plan.style_of(text))}
    return plan | ShardingPlan(
        modules=as_patterns(rows, paths),
        sequence_dim=plan.sequence_dim,
        positions="",
        packed_positions=True,
        takes_deals=True,
        full_rows=_FULL_ROWS,
    )


def _attention_rows(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> dict[str, Style]:
    """Return the row of every attention among ``modules`` (path -> module)."""
    return {
        path: ContextAttention(also=plan.style_of(path))
        for path, child in modules.items()
        if looks_attention_up(child)
    }


def _is_language_model(model: nn.Module) -> bool:
    """Return whether a model has the base model's outputs, or a head for each token alone:
    ``BertForPreTraining`` and ``GPT2DoubleHeadsModel`` judge a whole text, too.
    """
    classes = (cls.__name__ for cls in type(model).__mro__)
    return getattr(model, "base_model", model) is model or any(
        name.endswith(_HEADS_OF_TOKENS) for name in classes
    )


def _check_positions(config: Any, name: str) -> None:
    """Check that rotary frequencies do not depend on the longest position.

    Only one rank has the longest position.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        rope_settings.get("rope_type")
        for rope_settings in rope.values()
        if isinstance(rope_settings, Mapping)
    }
    if unsupported := kinds & {"dynamic", "longrope"}:
        raise ConfigError(
            f"{name} has rope_parameters of the type {unsupported.pop()!r}, whose frequencies "
            "depend on the longest position of a call, and ranks that share a sequence hold other "
            "positions. Use another type (llama3, yarn, linear), or set context_parallel_size to 1."
        )


def check_call(
    model: nn.Module, given: Mapping[str, Any], added: Mapping[str, Any], length: int
) -> None:
    """Check that a call of a model of ``transformers`` means the same on a sequence shard.

    Args:
        model: The model.
        given: Arguments of the call, by name.
        added: Arguments added to the call.
        length: Positions of the full rows.

    Raises:
        ConfigError: If the call would shift labels within the shard, or let documents see each
            other.
    """
    name = type(model).__name__
    documents = added.get(_DOCUMENTS)
    if takes_images(model):
        _check_full_rows(name, {**given, **added}, length)
        documents = documents_of(added.get("position_ids", given.get("position_ids")))
    if given.get("labels") is not None and reads_source(model):
        _check_decoder(name, given)
    elif given.get("labels") is not None and given.get("shift_labels") is None:
        raise ConfigError(
            f"{name} was given labels, which it shifts within the part of the sequence that a rank "
            "holds, so that tokens at its edges have a wrong target or none. Shift them in the "
            'dataset, add them to sequence_dims, and pass "shift_labels" beside "labels", or '
            "compute the loss from the logits."
        )
    caches = _is_on(model, given, "use_cache")
    parted = documents is not None and not documents.are_full_rows
    if parted and (caches or given.get("attention_mask") is not None):
        finding = "use_cache is on" if caches else "there is an attention_mask"
        raise ConfigError(
            f"position_ids of {name} start again within a row, and {finding}, with which "
            "transformers lets the documents of a row see each other. Set use_cache to False in "
            "the model's configuration and leave the mask out, where they should not."
        )
    if _is_on(model, given, LOGITS):
        raise ConfigError(
            f"{name} was asked for router logits, whose balancing loss would be that of a rank's "
            "part of each sequence. Set output_router_logits to False, or context_parallel_size "
            "to 1."
        )


def _is_on(model: nn.Module, given: Mapping[str, Any], name: str) -> bool:
    """Return an option of a call: its own, or else that of the configuration. With images the text
    model reads its own configuration, and the whole model may ask it for router logits.
    """
    if given.get(name) is not None:
        return bool(given[name])
    config: Any = model.config
    reads_both = name == LOGITS or takes_images(model)
    configs = (config, config.get_text_config()) if reads_both else (config,)
    return any(getattr(one, name, False) for one in configs)


def _check_decoder(name: str, given: Mapping[str, Any]) -> None:
    """Check that a decoder's tokens are not made of a rank's part of the labels.

    Raises:
        ConfigError: If they are.
    """
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    if all(given.get(key) is None for key in names):
        raise ConfigError(
            f"{name} was given labels without decoder_input_ids, which it makes by shifting the "
            "labels within the part of the row that a rank holds. Make them in the dataset "
            "(prepare_decoder_input_ids_from_labels), and add both to sequence_dims."
        )


def _check_full_rows(name: str, given: Mapping[str, Any], length: int) -> None:
    """Check that a model with images is called with full rows.

    Raises:
        ConfigError: If rows have other tokens.
    """
    tokens = given.get("input_ids")
    if tokens is None or tokens.shape[1] != length:
        found = "no input_ids" if tokens is None else f"input_ids of {tokens.shape[1]} columns"
        raise ConfigError(
            f"{name} was called with {found}, and the full rows have {length} positions. A model "
            "with images merges them with input_ids of its rows: declare their entry of the batch "
            "in sequence_dims, or pass input_ids in full."
        )
