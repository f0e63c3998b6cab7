"""Contents of a Megatron-LM checkpoint beside its tensors (``common.pt``): arguments, counts,
groups of the optimizer, and its scheduler.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lightning.config import RopeScaling, TransformerConfig
from megatron_lightning.errors import ConfigError

_ACTIVATIONS: Mapping[str, Mapping[str, bool]] = {
    "swiglu": {"swiglu": True},
    "gelu": {},
    "squared_relu": {"squared_relu": True},
}
_ONLY: Mapping[str, Any] = {
    "norm_placement": "pre", "layernorm_bias": True, "position_embedding_type": "rope",
    "window_size": None,
    "window_rotary_base": None, "no_rope_freq": None, "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0, "qk_layernorm_per_head": True, "attention_output_gate": False,
    "softmax_scale": None, "softmax_type": "vanilla", "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "mla": None, "mamba": None, "delta_net": None,
    "linear_attention_freq": None, "layer_pattern": None, "mtp_num_layers": None,
    "rotary_interleaved": False,
}  # fmt: skip
"""Values of a model whose export is proven against Megatron-Core."""
_EMPTY_STATES = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention",
    "self_attention.q_layernorm", "self_attention.k_layernorm",
)  # fmt: skip


class AdamOptions(NamedTuple):
    """The state of Adam beside its tensors."""

    step: float
    learning_rate: float
    min_learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def check_exported(config: TransformerConfig) -> None:
    """Check that a model is of a kind that Megatron-Core was seen to load.

    Raises:
        ConfigError: Naming the setting.
    """
    found = {name: getattr(config, name) for name in _ONLY}
    other = [
        f"{name}={value!r}"
        for name, value in found.items()
        if value != _ONLY[name] and not (name == "position_embedding_type" and value is None)
    ]
    if config.activation not in _ACTIVATIONS:
        other.append(f"activation={config.activation!r}")
    if config.rope_scaling is not None and not _is_of_megatron(config.rope_scaling):
        other.append(f"rope_scaling={config.rope_scaling!r}")
    if config.moe is not None and config.moe.router_bias:
        other.append("moe.router_bias=True")
    if config.moe is not None and config.moe.latent_size:
        other.append(f"moe.latent_size={config.moe.latent_size}")
    if other:
        raise ConfigError(
            f"format is 'torch_dist', and the model has {', '.join(other)}: only models were seen "
            "to be loaded by Megatron-Core that have rotary attention, norms before layers, and "
            f"{', '.join(_ACTIVATIONS)} or experts (Llama, Qwen2, Qwen3, Mixtral and Qwen-MoE). "
            "Write a Hugging Face folder, and import it by Megatron Bridge."
        )


def _is_of_megatron(scaling: RopeScaling) -> bool:
    """Return whether Megatron-Core has this scaling: Llama 3's, of which it has the factor alone as
    an option.
    """
    fixed = RopeScaling(
        rope_type="llama3", factor=scaling.factor, original_max_position_embeddings=8192
    )
    return scaling == fixed


def megatron_args(
    config: TransformerConfig, *, samples: int, has_optimizer: bool, bf16: bool
) -> Namespace:
    """Return the arguments of Megatron-LM that describe a model."""
    rope = config.rope_scaling
    args: dict[str, Any] = {
        "num_layers": config.num_layers, "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size, "seq_length": config.max_sequence_length,
        "max_position_embeddings": config.max_sequence_length,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.query_groups, "kv_channels": config.head_dim,
        "group_query_attention": config.query_groups != config.num_attention_heads,
        "position_embedding_type": "rope", "add_position_embedding": True,
        "use_rotary_position_embeddings": False, "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent, "rotary_interleaved": False,
        "use_rope_scaling": rope is not None,
        "rope_scaling_factor": 8.0 if rope is None else rope.factor,
        "add_bias_linear": config.add_bias_linear, "add_qkv_bias": config.add_qkv_bias,
        "swiglu": False, "squared_relu": False, **_ACTIVATIONS[config.activation],
        "untie_embeddings_and_output_weights": not config.share_embeddings_and_output_weights,
        "normalization": config.normalization, "norm_epsilon": config.layernorm_epsilon,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "qk_layernorm": config.qk_layernorm, "apply_query_key_layer_scaling": False,
        "attention_dropout": config.attention_dropout, "hidden_dropout": config.hidden_dropout,
        "vocab_size": config.vocab_size, "ckpt_format": "torch_dist", "bf16": bf16,
        "world_size": 1, "data_parallel_size": 1, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "no_save_rng": True,
        "no_save_optim": not has_optimizer, "use_distributed_optimizer": has_optimizer,
        "dist_ckpt_optim_fully_reshardable": has_optimizer,
        "consumed_train_samples": samples, "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }  # fmt: skip
    moe = config.moe
    if moe is not None:
        args |= {
            "num_experts": moe.num_experts, "moe_router_topk": moe.router_topk,
            "moe_layer_freq": moe.layer_freq if isinstance(moe.layer_freq, int)
            else list(moe.layer_freq),
            "moe_ffn_hidden_size": config.expert_ffn_size,
            "moe_router_pre_softmax": moe.router_pre_softmax,
            "moe_router_score_function": moe.router_score_function,
            "moe_router_enable_expert_bias": moe.router_enable_expert_bias,
            "moe_router_topk_scaling_factor": moe.router_topk_scaling_factor,
            "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
            "moe_shared_expert_gate": moe.shared_expert_gate,
            "moe_router_num_groups": moe.router_num_groups,
            "moe_router_group_topk": moe.router_group_topk,
        }  # fmt: skip
    return Namespace(**args)


def common_state(
    args: Namespace, *, iteration: int, adam: AdamOptions | None, has_experts: bool
) -> dict[str, Any]:
    """Return what Megatron-LM reads beside tensors.

    Megatron-Core keeps experts in a second optimizer if there are expert-parallel ranks.
    """
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if adam is None:
        return state
    sharding = "fully_reshardable"
    state["content_metadata"] |= {
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }

    def optimizer(*groups: tuple[float, bool]) -> dict[str, Any]:
        made = [_group(adam, decay, of_experts=of_experts) for decay, of_experts in groups]
        return {"optimizer": {"param_groups": made}, "param_state_sharding_type": sharding}

    dense = optimizer((1.0, False), (0.0, False))
    state["optimizer"] = {0: dense, 1: optimizer((1.0, True))} if has_experts else dense
    state["opt_param_scheduler"] = {
        "max_lr": adam.learning_rate, "min_lr": adam.min_learning_rate, "lr_warmup_steps": 0,
        "num_steps": args.consumed_train_samples, "lr_decay_style": "constant",
        "lr_decay_steps": max(1, args.consumed_train_samples), "start_wd": adam.weight_decay,
        "end_wd": adam.weight_decay, "wd_incr_style": "constant",
        "wd_incr_steps": max(1, args.consumed_train_samples),
    }  # fmt: skip
    return state


def _group(adam: AdamOptions, decay: float, *, of_experts: bool) -> dict[str, Any]:
    return {
        "is_expert_parallel": of_experts, "default_config": True, "wd_mult": decay,
        "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": adam.learning_rate,
        "min_lr": adam.min_learning_rate, "lr": adam.learning_rate, "betas": adam.betas,
        "eps": adam.eps, "weight_decay": adam.weight_decay * decay, "step": adam.step,
        "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
        "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip


def empty_states(config: TransformerConfig) -> Iterator[tuple[int, str, int]]:
    """Yield layer, path in the layer and number of experts (0: not of experts) of the states that
    layers of Transformer Engine and Megatron-Core ask for.
    """
    for layer, kind in enumerate(config.layer_kinds):
        paths = [*_EMPTY_STATES]
        if kind == "expert" and config.moe is not None:
            paths += ["pre_mlp_layernorm", *(f"mlp.shared_experts.linear_fc{n}" for n in (1, 2))]
            for number in (1, 2):
                yield layer, f"mlp.experts.experts.linear_fc{number}", config.moe.num_experts
        else:
            paths += [f"mlp.linear_fc{number}" for number in (1, 2)]
        yield from ((layer, path, 0) for path in paths)
