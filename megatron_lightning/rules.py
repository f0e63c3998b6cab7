"""Checks of the strategy's options, a layout and a model, before any process group exists. No torch
here.
"""

from __future__ import annotations

from math import gcd, lcm, prod
from typing import TYPE_CHECKING

from megatron_lightning.config import (
    ContextOptions,
    DataParallelOptions,
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.config.attention_kernels import choose_kernel, kernel_form
from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.parallel.grid.grid import RankGrid
    from megatron_lightning.parallel.grid.layout import ParallelLayout


def check_compiled_shards(data_parallel: str, num_shards: int, schedule: str) -> None:
    """Check that compiled blocks with weight gradients deferred by ``schedule`` keep the blocks'
    weights.
    """
    if data_parallel == "fsdp" and num_shards > 1:
        raise ConfigError(
            f'compile="block", pipeline_schedule="{schedule}", which defers weight gradients, and '
            'data_parallel="fsdp" cannot be combined: a compiled block defers with its weights, '
            'which fsdp replaces. Set data_parallel to "zero1", pipeline_schedule to "1f1b" or '
            '"interleaved", or leave compile out.'
        )


def check_data_parallel(grid: RankGrid, data_parallel: str, options: DataParallelOptions) -> None:
    """Check how gradients and optimizer state are sharded over the ranks of ``grid``."""
    instances = options.num_distributed_optimizer_instances
    if options.overlap_param_gather and data_parallel != "zero1":
        raise ConfigError(
            "overlap_param_gather=True gathers the shards of the zero1 optimizer, and "
            f"data_parallel is {data_parallel!r}. "
            'Set data_parallel="zero1", or overlap_param_gather=False.'
        )
    if instances != 1 and data_parallel == "ddp":
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} divides the ranks that share shards, "
            "and data_parallel is "
            '\'ddp\', which has none. Set data_parallel="zero1" or "fsdp", or '
            "num_distributed_optimizer_instances=1."
        )
    if data_parallel != "fsdp" and (
        options.reshard_after_forward is not None or options.reduce_every_microbatch
    ):
        raise ConfigError(
            f"reshard_after_forward={options.reshard_after_forward} and "
            f"reduce_every_microbatch={options.reduce_every_microbatch} "
            f'are options of fsdp, and data_parallel is "{data_parallel}", which does not shard '
            'parameters. Set data_parallel="fsdp", or leave both unset.'
        )
    size = grid.size("dp-cp")
    if data_parallel == "fsdp" and 1 < instances == size:
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} divides the {instances} data x "
            "context parallel ranks into "
            'groups of one, which would shard nothing. Set data_parallel="ddp", or fewer instances.'
        )
    if size % instances:
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} does not divide the {size} data x "
            f"context parallel ranks into equal groups. Set it to a divisor of {size}."
        )
    copies = grid.size("edp")
    if copies % instances:
        raise ConfigError(
            f"num_distributed_optimizer_instances={instances} does not divide the {copies} ranks "
            f"that hold the same experts ({grid.world_size} ranks in expert tensor "
            f"{grid.size('etp')} x expert {grid.size('ep')} x pipeline {grid.size('pp')}) into "
            f"equal groups. Set it to a divisor of {gcd(copies, size)}, or lower "
            "expert_model_parallel_size or expert_tensor_parallel_size."
        )


def check_accumulation(num_batches: int) -> None:
    """Check the number of batches of an optimizer step. Lightning's loop divides by the number."""
    if num_batches < 1:
        raise ConfigError(
            f"accumulate_grad_batches is {num_batches}; it must be a positive integer. Set it to 1 "
            "or more."
        )


def check_model_layout(
    config: TransformerConfig,
    layout: ParallelLayout,
    world_size: int,
    *,
    sequence_length: int | None = None,
    pipeline: PipelineOptions | None = None,
    num_models: int = 1,
) -> None:
    """Check that ``world_size`` ranks in ``layout`` can hold and run the model.

    Args:
        config: The model.
        layout: Sizes of the parallel axes.
        world_size: Number of ranks.
        sequence_length: Tokens of a training sample, if known.
        pipeline: Partition into stages. A stage listed by the user may have no layers, and
            embedding and loss may take a layer's place each. None: layers are spread evenly.
        num_models: Models of about this size in the pipeline, such as a frozen model beside
            the trained model.
    """
    layout.data_parallel_size(world_size)
    _check_tensor(config, layout)
    _check_sequence(config, layout, sequence_length)
    options = pipeline or PipelineOptions()
    beside = (
        options.account_for_embedding_in_pipeline_split + options.account_for_loss_in_pipeline_split
    )
    places = config.num_layers * num_models + beside
    if layout.num_stages > places and options.pipeline_model_parallel_layout is None:
        chunks, ranks = places // layout.pp, places // layout.vpp
        counted = f" and {beside} places of embedding and loss" if beside else ""
        fixes = [f"num_layers to {layout.num_stages - beside} or more"]
        fixes += [f"virtual_pipeline_model_parallel_size to {chunks}"] if chunks else []
        fixes += [f"pipeline_model_parallel_size to {ranks}"] if ranks else []
        raise ConfigError(
            f"num_layers={config.num_layers}{counted} are fewer than the {layout.num_stages} "
            f"pipeline stages (pipeline_model_parallel_size={layout.pp} x "
            f"virtual_pipeline_model_parallel_size={layout.vpp}), and a stage without a layer has "
            f"no work. Set {', or '.join(fixes)}."
        )
    _check_experts(config, layout)


def _check_tensor(config: TransformerConfig, layout: ParallelLayout) -> None:
    tp, attends = layout.tp, config.attends
    shared_names = [
        ("num_attention_heads", config.num_attention_heads, attends),
        ("ffn_hidden_size", config.ffn_size, config.has_feed_forward),
    ]
    for name, value, is_used in shared_names:
        if is_used and value % tp:
            raise ConfigError(
                f"{name}={value} is not divisible by tensor_model_parallel_size={tp}; every rank "
                f"takes an equal share. Set {name} to a multiple of {tp}, or "
                f"tensor_model_parallel_size to a divisor of {value}."
            )
    groups = config.query_groups
    if attends and groups % tp and tp % groups:
        raise ConfigError(
            f"num_query_groups={groups} and tensor_model_parallel_size={tp}: neither divides the "
            "other, so ranks and key/value heads cannot be split equally. Set "
            f"tensor_model_parallel_size to a divisor or a multiple of {groups}."
        )
    if attends and config.qkv_rows % tp:
        raise ConfigError(
            f"the {config.qkv_rows} rows of linear_qkv are not divisible by "
            f"tensor_model_parallel_size={tp}, and ranks that outnumber num_query_groups={groups} "
            f"share them. Set kv_channels, now {config.head_dim}, to a multiple of {tp // groups}."
        )
    rows = -(-config.vocab_size // tp)
    if rows * (tp - 1) >= config.vocab_size:
        raise ConfigError(
            f"vocab_size={config.vocab_size} leaves a rank without a row of the embedding when "
            f"tensor_model_parallel_size={tp} ranks take {rows} rows each. Lower "
            "tensor_model_parallel_size."
        )


def _check_sequence(
    config: TransformerConfig, layout: ParallelLayout, sequence_length: int | None
) -> None:
    if sequence_length is None:
        return
    if sequence_length > config.max_sequence_length:
        raise ConfigError(
            f"samples of {sequence_length} tokens are longer than the model's "
            f"max_sequence_length={config.max_sequence_length}. Set max_sequence_length to "
            f"{sequence_length} or more, or shorten the samples."
        )
    check_sequence_length(
        sequence_length, layout.cp, layout.tp if layout.sp else 1, "a sample of the data"
    )
    if layout.sp and sequence_length % layout.tp:
        raise ConfigError(
            f"samples of {sequence_length} tokens cannot be split equally over the "
            f"tensor_model_parallel_size={layout.tp} ranks of sequence parallelism. Set the "
            f"sequence length to a multiple of {layout.tp}, or sequence_parallel to false."
        )


def _check_experts(config: TransformerConfig, layout: ParallelLayout) -> None:
    moe, ep, etp = config.moe, layout.ep, layout.etp
    if moe is None:
        if ep > 1:
            raise ConfigError(
                f"expert_model_parallel_size={ep} splits experts over ranks, and this model has "
                "none. Set expert_model_parallel_size to 1."
            )
        if etp != layout.tp:
            raise ConfigError(
                f"expert_tensor_parallel_size={etp} divides the matrices of experts otherwise "
                f"than tensor_model_parallel_size={layout.tp}, and this model has no experts. "
                "Leave it unset."
            )
        return
    if moe.num_experts % ep:
        works = [size for size in range(1, moe.num_experts + 1) if moe.num_experts % size == 0]
        raise ConfigError(
            f"moe.num_experts={moe.num_experts} is not divisible by expert_model_parallel_size="
            f"{ep}; every rank takes an equal share. Set expert_model_parallel_size to one of "
            f"{works}."
        )
    if config.expert_ffn_size % etp:
        raise ConfigError(
            f"experts have a width of {config.expert_ffn_size}, which is not divisible by "
            f"expert_tensor_parallel_size={etp}. Set moe.ffn_hidden_size to a multiple of {etp}, "
            "or expert_tensor_parallel_size to 1."
        )
    shared_size = moe.shared_expert_intermediate_size
    if shared_size is not None and shared_size % layout.tp:
        raise ConfigError(
            f"moe.shared_expert_intermediate_size={shared_size} is not divisible by "
            f"tensor_model_parallel_size={layout.tp}. Set it to a multiple of {layout.tp}."
        )


def check_trained_experts(config: TransformerConfig, layout: ParallelLayout) -> None:
    """Check that tensor-parallel ranks have different tokens, in training."""
    if config.moe is not None and layout.tp > 1 and not layout.sp:
        raise ConfigError(
            f"experts with tensor_model_parallel_size={layout.tp} and sequence_parallel=False: "
            "each rank would route all tokens. Set sequence_parallel to True or auto."
        )


def check_vocabulary(config: TransformerConfig, num_ids: int | None) -> None:
    """Check that the model has a row for each of the ``num_ids`` ids of the data. None: unknown."""
    if num_ids is not None and num_ids > config.vocab_size:
        raise ConfigError(
            f"the data's vocab_size={num_ids} (their tokenizer's, unless it is set) is above the "
            f"model's {config.vocab_size}, which has no embedding for the ids from "
            f"{config.vocab_size} on. Set the model's vocab_size to {num_ids} or more."
        )


def check_sequence_length(length: int, num_ranks: int, tensor_ranks: int, name: str) -> None:
    """Check that a sequence can be split over ``num_ranks`` context-parallel ranks, and the parts
    of the sequence over ``tensor_ranks`` (1: without sequence parallelism).

    Raises:
        ConfigError: Naming the nearest valid lengths.
    """
    step = lcm(2 * num_ranks, num_ranks * tensor_ranks)
    if num_ranks > 1 and length % step:
        below, above = length // step * step, (length // step + 1) * step
        nearest = f"{below} or {above}" if below else str(above)
        also = f" and sequence parallelism over {tensor_ranks} ranks" if tensor_ranks > 1 else ""
        raise ConfigError(
            f"{name} has {length} positions, and context_parallel_size={num_ranks}{also} needs a "
            f"multiple of {step}. Pad or cut it to {nearest}, or change context_parallel_size."
        )


def check_levels(options: ContextOptions, num_ranks: int) -> None:
    """Check that the levels of "a2a+p2p" multiply to ``num_ranks`` context-parallel ranks.

    Raises:
        ConfigError: Naming the nearest valid sizes.
    """
    sizes = options.hierarchical_context_parallel_sizes
    if sizes is None or prod(sizes) == num_ranks:
        return
    works = [[size, num_ranks // size] for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    works.sort(key=lambda pair: sum(abs(a - b) for a, b in zip(pair, sizes, strict=True)))
    raise ConfigError(
        f"hierarchical_context_parallel_sizes={sizes} are levels of {prod(sizes)} ranks, and "
        f"context_parallel_size is {num_ranks}. Set the sizes to "
        f"{' or '.join(map(str, works[:2]))}, or context_parallel_size to {prod(sizes)}."
    )


def check_chunks(options: ContextOptions, num_ranks: int, *, compiles: bool) -> None:
    """Check that blocks that deal packed rows to ``num_ranks`` context-parallel ranks are not
    compiled.

    Raises:
        ConfigError: If they are.
    """
    chunks = options.chunks_per_rank
    if compiles and num_ranks > 1 and chunks not in ("auto", 2):
        raise ConfigError(
            f"chunks_per_rank is {chunks}, and compile is set: blocks would be compiled anew for "
            'the chunks of each micro-batch of packed rows. Set chunks_per_rank to "auto" or 2, or '
            "leave compile out."
        )


def check_cp_comm_heads(
    config: TransformerConfig, layout: ParallelLayout, options: ContextOptions
) -> None:
    """Check that the heads of a tensor-parallel rank divide over the head-exchanging ranks."""
    heads = config.num_attention_heads // layout.tp
    for cp_comm_type in options.cp_comm_types:
        size = options.num_a2a_ranks(cp_comm_type, layout.cp)
        if heads % size:
            works = [number for number in range(1, heads + 1) if heads % number == 0]
            name = "context_parallel_size"
            if cp_comm_type == "a2a+p2p":
                name = "the first of hierarchical_context_parallel_sizes"
            raise ConfigError(
                f'cp_comm_type="{cp_comm_type}" divides the {heads} attention heads of a '
                f"tensor-parallel rank over {size} ranks, {name}. Set it to one of {works}, "
                'or cp_comm_type to "p2p" or "all_gather".'
            )


def attention_dtype(precision: str | int | None) -> str:
    """Return torch's name for the dtype of queries and keys under a precision of the Trainer."""
    dtypes = {"bf16": "bfloat16", "16": "float16", "64": "float64"}
    name = str(precision)
    return next((dtype for key, dtype in dtypes.items() if name.startswith(key)), "float32")


def check_attention_backend(
    config: TransformerConfig,
    num_context_ranks: int,
    *,
    device: str,
    precision: str | int | None,
    training: bool = True,
) -> None:
    """Check that a device has the model's attention kernels, and that the kernels support the
    options. torch checks the rest.

    Args:
        config: The model.
        num_context_ranks: Ranks of a sequence.
        device: Type of the device. Only CPUs and CUDA are checked.
        precision: Precision of the Trainer.
        training: Whether gradients are computed.
    """
    if device in ("cpu", "cuda"):
        dtype = attention_dtype(precision)
        form = kernel_form(config, num_context_ranks, device=device, dtype=dtype, trained=training)
        choose_kernel(config.attention_backend, form)
