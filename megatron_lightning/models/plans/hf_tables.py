"""Short sharding tables of ``transformers`` families without a plan: GPT-2, BERT, ViT, T5.

A table belongs to a base model, by class name. Subclasses and models around the base model (with a
head) get the table, too. Paths begin at the base model. Parameters tied to the word embedding (the
output layer) are split with the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import (
    ColumnParallel,
    ParameterShards,
    RowParallel,
    Split,
    TransposedColumnParallel,
    TransposedRowParallel,
)
from megatron_lightning.models.plans.hf_rows import VOCABULARY, as_patterns, split_both_ends
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style


def local_shard(size: int, context: ParallelContext) -> int:
    """Return a rank's share of a size."""
    return size // context.tp.size


@dataclass(frozen=True, kw_only=True)
class Table:
    """How a family's base model is split."""

    heads: str
    """Name of the head count in the configuration."""
    modules: Mapping[str, Style]
    """Path pattern in the base model -> style."""
    local: tuple[str, ...] = ()
    """Path patterns of attributes reduced to a rank's share."""


_GPT2 = Table(
    heads="num_attention_heads",
    modules={
        "wte": VOCABULARY,
        "h.*.attn.c_attn": TransposedColumnParallel(num_blocks=3),
        "h.*.attn.c_proj": TransposedRowParallel(),
        "h.*.crossattention.q_attn": TransposedColumnParallel(),
        "h.*.crossattention.c_attn": TransposedColumnParallel(num_blocks=2),
        "h.*.crossattention.c_proj": TransposedRowParallel(),
        "h.*.mlp.c_fc": TransposedColumnParallel(),
        "h.*.mlp.c_proj": TransposedRowParallel(),
    },
    local=("h.*.attn.split_size", "h.*.crossattention.split_size"),
)

_BERT = Table(
    heads="num_attention_heads",
    modules={
        "embeddings.word_embeddings": VOCABULARY,
        **{
            f"encoder.layer.*.{attention}.self.{name}": ColumnParallel()
            for attention in ("attention", "crossattention")
            for name in ("query", "key", "value")
        },
        "encoder.layer.*.attention.output.dense": RowParallel(),
        "encoder.layer.*.crossattention.output.dense": RowParallel(),
        "encoder.layer.*.intermediate.dense": ColumnParallel(),
        "encoder.layer.*.output.dense": RowParallel(),
    },
)

_VIT = Table(
    heads="num_attention_heads",
    modules={
        **{f"layers.*.attention.{name}_proj": ColumnParallel() for name in ("q", "k", "v")},
        "layers.*.attention.o_proj": RowParallel(),
        "layers.*.mlp.fc1": ColumnParallel(),
        "layers.*.mlp.fc2": RowParallel(),
    },
)

_T5 = Table(
    heads="num_heads",
    modules={
        "shared": VOCABULARY,
        "**.embed_tokens": VOCABULARY,
        **{
            f"**.{attention}.{name}": ColumnParallel()
            for attention in ("SelfAttention", "EncDecAttention")
            for name in ("q", "k", "v")
        },
        "**.SelfAttention.o": RowParallel(),
        "**.EncDecAttention.o": RowParallel(),
        # [buckets, heads]: the bias of a rank's heads. The layers pass the bias on.
        "**.SelfAttention.relative_attention_bias": ParameterShards({"weight": Split(1)}),
        "**.DenseReluDense.wi": ColumnParallel(),
        "**.DenseReluDense.wi_0": ColumnParallel(),
        "**.DenseReluDense.wi_1": ColumnParallel(),
        "**.DenseReluDense.wo": RowParallel(),
    },
    local=("**.SelfAttention.n_heads", "**.EncDecAttention.n_heads"),
)

_TABLES: Mapping[str, Table] = {
    "GPT2Model": _GPT2,
    "BertModel": _BERT,
    "ViTModel": _VIT,
    "T5Model": _T5,
    "T5EncoderModel": _T5,
    "T5ForConditionalGeneration": _T5,
}
"""Class of the module at the root of a table's paths -> table."""


def table_of(model: nn.Module, tensor_size: int) -> ShardingPlan | None:
    """Return the plan of a model from a family with a table, or None.

    Raises:
        ConfigError: If the ranks cannot share the heads.
    """
    table_found = next(
        (
            (path, _TABLES[kind.__name__], kind.__name__)
            for path, module in model.named_modules()
            # Subclasses of a family's model have the family's layers.
            for kind in type(module).__mro__
            if kind.__name__ in _TABLES and kind.__module__.startswith("transformers.")
        ),
        None,
    )
    if table_found is None:
        return None
    path, table, table_name = table_found
    heads = getattr(model.get_submodule(path).config, table.heads)
    if heads % tensor_size:
        raise ConfigError(
            f"{type(model).__name__} has {heads} attention heads, which {tensor_size} "
            "tensor-parallel ranks cannot share equally. Set tensor_model_parallel_size to a "
            f"divisor of {heads}."
        )
    prefix, paths = f"{path}." if path else "", [name for name, _ in model.named_modules()]
    rows = {prefix + pattern: style for pattern, style in table.modules.items()}
    attributes: dict[str, Callable[[int, ParallelContext], int]] = {
        prefix + pattern: local_shard
        for pattern in table.local
        if any(map(compile_pattern(prefix + pattern.rpartition(".")[0]).fullmatch, paths))
    }
    return ShardingPlan(
        modules=as_patterns(split_both_ends(model, _by_path(model, rows)), paths),
        sequence_dim=1,
        attributes=attributes,
        why_full_sequence=f"the table of {table_name} shards features only",
    )


def _by_path(model: nn.Module, rows: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style of every module matched by a row.

    A model has only part of a family's layers.
    """
    plan = ShardingPlan(modules=rows)
    styles = ((path, plan.style_of(path)) for path, _ in model.named_modules())
    return {path: style for path, style in styles if style is not None}
