"""The model of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.from_megatron.options import Options

_GPT2, _LLAMA2 = 50257, 32000
_VOCABULARIES: Mapping[str, int] = {"GPT2BPETokenizer": _GPT2, "Llama2Tokenizer": _LLAMA2}
_KERNELS: Mapping[str, str] = {"fused": "cudnn", "unfused": "math", "local": "math"}
_ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu")
_LENGTH_OF_LLAMA3, _LENGTH_OF_YARN = 8192, 4096


def convert_model(options: Options) -> dict[str, Any]:
    """Return the values of the model that are no plain numbers, by Megatron's names.

    Raises:
        ConfigError: If the size of the vocabulary is unknown.
    """
    values: dict[str, Any] = _positions(options) | _vocabulary(options)
    latent = options.take("multi_latent_attention")
    if latent:
        values["q_lora_rank"] = options.take("q_lora_rank")
        options.take("kv_channels")  # of no effect in latent attention
    groups = options.take("num_query_groups")
    options.leave("spec", "moe_layer_recompute")
    if options.take("group_query_attention"):
        values["num_query_groups"] = 1 if groups is None else groups
    without_bias = options.take("disable_bias_linear", default=False)
    values["disable_bias_linear"] = not without_bias
    if not without_bias:
        options.take("add_qkv_bias")  # included
    untied = options.take("untie_embeddings_and_output_weights", default=False)
    values["untie_embeddings_and_output_weights"] = not untied
    plain = options.take("no_bias_gelu_fusion")
    if not any(name in options for name in _ACTIVATIONS):
        # Megatron's fused GELU, which it takes with biases, is the approximation by tanh.
        values["swiglu"] = "gelu" if plain or without_bias else "gelu_tanh"
    window = options.take("window_size")
    is_masked = window is not None or options.look("softmax_type", "vanilla") != "vanilla"
    flash = "flash" if options.take("use_flash_attn") else None
    kernel = options.take("attention_backend", flash)
    # Transformer Engine's flash kernels have windows and sinks; PyTorch's do not.
    if kernel is not None and not (is_masked and kernel in ("flash", "fused")):
        values["attention_backend"] = _KERNELS.get(kernel, kernel)
    if window is not None:
        text = " ".join(map(str, window)) if isinstance(window, list) else window
        values["window_size"] = [int(side) for side in text.strip("()").replace(",", " ").split()]
    return values


def _positions(options: Options) -> dict[str, Any]:
    kind = options.take("position_embedding_type")
    if options.take("use_rotary_position_embeddings"):
        kind = "rope"
    options.take("no_position_embedding")  # learned positions are off by their type
    latent = "multi_latent_attention" in options
    if latent:
        kind = options.take("rope_type", "yarn")
    options.take("rope_type")
    values: dict[str, Any] = {"position_embedding_type": "rope" if kind == "yarn" else kind}
    if kind == "none":
        values["position_embedding_type"] = "none"
    yarn = _yarn(options)  # of no effect with other rotary positions
    scaling = yarn if kind == "yarn" else None
    if options.take("use_rope_scaling"):
        scaling = {
            "rope_type": "llama3",
            "factor": options.take("rope_scaling_factor", 8.0),
            "original_max_position_embeddings": _LENGTH_OF_LLAMA3,
        }
    elif factor := options.take("rotary_seq_len_interpolation_factor"):
        scaling = {"rope_type": "linear", "factor": factor}
    options.take("rope_scaling_factor")
    if scaling is not None:
        values["use_rope_scaling"] = scaling
    return values


def _yarn(options: Options) -> dict[str, Any] | None:
    factor = options.take("rotary_scaling_factor", 1.0)
    scales = {name: options.take(name) for name in ("mscale", "mscale_all_dim")}
    bounds = {name: options.take(f"yarn_{name}") for name in ("beta_fast", "beta_slow")}
    length = options.take("yarn_original_max_position_embeddings", _LENGTH_OF_YARN)
    if factor == 1.0:  # no longer than in the pretraining
        return None
    given = {name: value for name, value in (scales | bounds).items() if value is not None}
    return {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **given,
    }  # fmt: skip


def _vocabulary(options: Options) -> dict[str, Any]:
    """Return the sizes of the data's and of the model's vocabulary, the latter padded."""
    size = options.take("vocab_size")
    if size is None:
        default = "GPT2BPETokenizer" if "vocab_file" in options else None
        size = _VOCABULARIES.get(options.look("tokenizer_type", default))
    if size is None:
        raise ConfigError(
            "the command leaves the size of the vocabulary to its tokenizer "
            f"({options.look('tokenizer_model') or options.look('tokenizer_type')}). Give the "
            'size: --extra "--vocab-size 32000".'
        )
    multiple = options.take("make_vocab_size_divisible_by")
    multiple *= options.look("tensor_model_parallel_size")
    return {
        "vocab_size": size,
        "make_vocab_size_divisible_by": -(-size // multiple) * multiple,
    }
