"""The rules that span a model's configuration and a layout, checked before any process group exists. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.parallel.layout import ParallelLayout


def check_model_layout(
    config: TransformerConfig,
    layout: ParallelLayout,
    world_size: int,
    *,
    sequence_length: int | None = None,
    explicit_stages: bool = False,
) -> None:
    """Check that ``world_size`` ranks in ``layout`` can hold and run the model.

    Args:
        config: The model.
        layout: Sizes of the parallel axes.
        world_size: Number of ranks.
        sequence_length: Tokens of a training sample, where it is known.
        explicit_stages: Whether the user lists the layers of every stage, of which some may have none.

    Raises:
        ConfigError: Naming the two values that do not fit, why, and what to set.
    """
    layout.data_parallel_size(world_size)
    _check_tensor(config, layout)
    _check_sequence(config, layout, sequence_length)
    if layout.num_stages > config.num_layers and not explicit_stages:
        chunks, ranks = config.num_layers // layout.pp, config.num_layers // layout.vpp
        fixes = [f"num_layers to {layout.num_stages} or more"]
        fixes += [f"virtual_pipeline_model_parallel_size to {chunks}"] if chunks else []
        fixes += [f"pipeline_model_parallel_size to {ranks}"] if ranks else []
        raise ConfigError(
            f"num_layers={config.num_layers} are fewer than the {layout.num_stages} pipeline stages "
            f"(pipeline_model_parallel_size={layout.pp} x virtual_pipeline_model_parallel_size={layout.vpp}), and a stage "
            f"without a layer has no work. Set {', or '.join(fixes)}."
        )
    if layout.ep > 1:
        raise ConfigError(
            f"expert_model_parallel_size={layout.ep} shares experts among ranks, and this model has none. "
            "Set expert_model_parallel_size to 1."
        )


def check_vocabulary(config: TransformerConfig, num_ids: int | None) -> None:
    """Check that the model has a row for every one of the ``num_ids`` ids that the data may hold; None: they do not say.

    Raises:
        ConfigError: Naming both vocabularies.
    """
    if num_ids is not None and num_ids > config.vocab_size:
        raise ConfigError(
            f"the data's vocab_size={num_ids} (their tokenizer's, unless it is set) is above the model's {config.vocab_size}, "
            f"which has no embedding for the ids from {config.vocab_size} on. Set the model's vocab_size to {num_ids} or more."
        )


def _check_tensor(config: TransformerConfig, layout: ParallelLayout) -> None:
    tp = layout.tp
    shared = [("num_attention_heads", config.num_attention_heads), ("ffn_hidden_size", config.ffn_size)]
    for name, value in shared:
        if value % tp:
            raise ConfigError(
                f"{name}={value} is not divisible by tensor_model_parallel_size={tp}; every rank takes an equal share. "
                f"Set {name} to a multiple of {tp}, or tensor_model_parallel_size to a divisor of {value}."
            )
    groups = config.query_groups
    if groups % tp and tp % groups:
        raise ConfigError(
            f"num_query_groups={groups} and tensor_model_parallel_size={tp}: neither divides the other, so ranks and key/value "
            f"heads cannot be shared equally. Set tensor_model_parallel_size to a divisor or a multiple of {groups}."
        )
    if config.qkv_rows % tp:
        raise ConfigError(
            f"the {config.qkv_rows} rows of linear_qkv are not divisible by tensor_model_parallel_size={tp}, and ranks that "
            f"outnumber num_query_groups={groups} share them. Set kv_channels, now {config.head_dim}, to a multiple of "
            f"{tp // groups}."
        )
    rows = -(-config.vocab_size // tp)
    if rows * (tp - 1) >= config.vocab_size:
        raise ConfigError(
            f"vocab_size={config.vocab_size} leaves a rank without a row of the embedding when "
            f"tensor_model_parallel_size={tp} ranks take {rows} rows each. Lower tensor_model_parallel_size."
        )


def _check_sequence(config: TransformerConfig, layout: ParallelLayout, sequence_length: int | None) -> None:
    if sequence_length is None:
        return
    if sequence_length > config.max_sequence_length:
        raise ConfigError(
            f"samples of {sequence_length} tokens are longer than the model's max_sequence_length="
            f"{config.max_sequence_length}. Set max_sequence_length to {sequence_length} or more, or shorten the samples."
        )
    if layout.sp and sequence_length % layout.tp:
        raise ConfigError(
            f"samples of {sequence_length} tokens cannot be cut into equal parts for the tensor_model_parallel_size="
            f"{layout.tp} ranks of sequence parallelism. Set the sequence length to a multiple of {layout.tp}, or "
            "sequence_parallel to false."
        )
