"""Options of data, context and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.value_checks import check_choice, check_counts, is_count
from megatron_lightning.errors import ConfigError

DataParallel = Literal["ddp", "zero1", "fsdp"]
MomentsDtype = Literal["fp32", "bf16"]
CPCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
MixerKind = Literal["ring", "exchange", "rows", "gather"]
ContextMixers = Literal["auto", "divided"] | dict[str, MixerKind]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Sharding and communication of gradients and optimizer state over the data-parallel ranks."""

    bucket_size: int | None = None
    """Elements of a full gradient bucket, ready for the reduction. None: Megatron's max(40e6, 1e6
    per data-parallel rank), but no more than an eighth of the parameters, to let small models
    overlap as well."""
    grad_reduce_in_bf16: bool = False
    """Send gradients as bf16, half the bytes. The accumulation over micro-batches stays in fp32."""
    num_distributed_optimizer_instances: int = 1
    """Number of groups of neighboring ranks among the data-parallel ranks: zero1 and fsdp shard
    inside a group (a node), and every group keeps a replica (hybrid sharding)."""
    overlap_param_gather: bool = False
    """Gather the parameters stepped by zero1 during the next forward instead of inside the step.
    Code reading weights between step and forward (a callback, the module's hooks, a step before the
    call of the layer) sees old weights."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state and master weights in host memory, and step there."""
    moments_dtype: MomentsDtype = "fp32"
    """Dtype of the optimizer's moments between the steps. The step itself computes in fp32."""
    reshard_after_forward: bool | None = None
    """fsdp: release a unit's full parameters between forward and backward, and gather again
    (ZeRO-3). None: only if a step has a single micro-batch. With several micro-batches parameters
    are otherwise gathered once a step (ZeRO-2)."""
    reduce_every_microbatch: bool = False
    """fsdp: reduce-scatter gradients after every micro-batch instead of once a step. Full gradients
    are then never kept."""
    whole_tensors: bool = False
    """Step each full parameter on one rank, also with optimizers that look element-wise when tried.
    Known element-wise optimizers, such as AdamW, still divide parameters."""

    def __post_init__(self) -> None:
        check_counts(self, "bucket_size", "num_distributed_optimizer_instances")
        check_choice("moments_dtype", self.moments_dtype, get_args(MomentsDtype))


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Attention over sequences sharded over ranks, with Megatron-Core's names."""

    cp_comm_type: CPCommType | list[CPCommType] = "p2p"
    """Context-parallel communication: "p2p" passes keys and values around the ranks (ring
    attention), "all_gather" gathers keys and values, "a2a" exchanges parts of the sequence for
    heads (Ulysses), "a2a+p2p" exchanges heads among neighbors and passes keys and values around the
    groups of neighbors. A list has an entry for each attention module of the full model, in
    order."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    """Ranks of the two levels of "a2a+p2p": neighbors to exchange heads, and groups of neighbors in
    a ring. The product is context_parallel_size. None: no levels."""
    mixers: ContextMixers = "auto"
    """How a model without a plan of its attention shares rows. "auto": each module that mixes
    tokens divides its work, or else computes full rows on every rank. "divided" refuses modules
    that do not divide. A mapping of path patterns ("model.layers.*.self_attn") to ways (ring,
    exchange, rows, gather) sets them, and other modules are as in "auto"."""
    chunks_per_rank: Literal["auto"] | int = "auto"
    """Chunks of a packed row that each rank holds, dealt by the work of attention for each
    micro-batch. "auto": up to 8, or 32 for rows of many documents, of 64 tokens or more. 2: the two
    chunks of rows with one document, for every row."""

    def __post_init__(self) -> None:
        self._check_chunks()
        for name in self.cp_comm_types:
            check_choice("cp_comm_type", name, get_args(CPCommType))
        if isinstance(self.mixers, dict):
            for pattern, kind in self.mixers.items():
                check_choice(f"mixers[{pattern!r}]", kind, get_args(MixerKind))
        else:
            check_choice("mixers", self.mixers, ("auto", "divided"))
        sizes, needed = self.hierarchical_context_parallel_sizes, "a2a+p2p" in self.cp_comm_types
        if sizes is None and needed:
            raise ConfigError(
                'cp_comm_type "a2a+p2p" has two levels of ranks, and '
                "hierarchical_context_parallel_sizes is not set. Set it to the ranks that exchange "
                "heads and the number of their groups, such as [2, 2] for context_parallel_size=4."
            )
        if sizes is None:
            return
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(is_count, sizes)):
            raise ConfigError(
                f"hierarchical_context_parallel_sizes is {sizes!r}. Set it to two positive "
                "integers: the ranks that exchange heads and the number of their groups, such as "
                "[2, 2] for context_parallel_size=4."
            )
        if not needed:
            raise ConfigError(
                f"hierarchical_context_parallel_sizes={sizes} are the levels of cp_comm_type "
                f'"a2a+p2p", and cp_comm_type is {self.cp_comm_type!r}. Set the sizes to None, or '
                'cp_comm_type to "a2a+p2p".'
            )

    def _check_chunks(self) -> None:
        """Check the number of chunks."""
        chunks = self.chunks_per_rank
        if chunks == "auto":
            return
        if not is_count(chunks) or chunks == 1:
            raise ConfigError(
                f'chunks_per_rank is {chunks!r}. Set it to "auto", or to an integer from 2 on.'
            )
        if chunks > 2 and "a2a+p2p" in self.cp_comm_types:
            raise ConfigError(
                f'chunks_per_rank={chunks} deals chunks by work, and cp_comm_type "a2a+p2p" needs '
                "adjacent chunks on neighbors. Set chunks_per_rank to 2, or another cp_comm_type."
            )

    @property
    def cp_comm_types(self) -> tuple[CPCommType, ...]:
        """The types in use, each once."""
        types = self.cp_comm_type
        return tuple(dict.fromkeys(types if isinstance(types, list) else [types]))

    def num_a2a_ranks(self, cp_comm_type: CPCommType, num_ranks: int) -> int:
        """Return the number of context-parallel ranks, among ``num_ranks``, to divide the heads."""
        if cp_comm_type == "a2a+p2p" and self.hierarchical_context_parallel_sizes is not None:
            return self.hierarchical_context_parallel_sizes[0]
        return num_ranks if cp_comm_type == "a2a" else 1


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Partition of the model into pipeline stages and order of the micro-batches, with
    Megatron-Core's names.
    """

    units: list[str] | None = None
    """Path patterns of the units of the pipeline split, in the order of calls in a forward. None:
    the model's declared units, or units found by a search."""
    replicated_modules: list[str] | None = None
    """Path patterns of modules outside of the units that every stage holds and runs. Other modules
    that a forward calls before the units belong to the first stage."""
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    """Layers of every stage in Megatron's notation, such as "Et*3|(tt|)*29,mL", or as lists of
    "embedding", "decoder", "mtp" and "loss". None: layers are spread evenly."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank, all chunks together. None: like the other ranks."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank, all chunks together. None: like the other ranks."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are spread."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer when layers are spread."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Micro-batches in a row through the same model chunk, for the interleaved schedule. None: as
    few as possible."""
    variable_seq_lengths: bool = False
    """Whether micro-batches of equal shapes may still differ in the shapes between stages, or in
    the tensors with a gradient. Examples: steps that trim a batch by the batch's values, or layers
    frozen within an epoch. Every message then carries the shapes."""
    explicit_steps: bool = False
    """Whether steps get full batches and call ``run_pipeline(self, fn, batch)`` to run ``fn`` on
    each micro-batch, instead of being run once for each."""

    def __post_init__(self) -> None:
        check_counts(
            self,
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "microbatch_group_size_per_vp_stage",
        )
        ways = {
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout is not None,
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage
            is not None,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage is not None,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding_in_pipeline_split,
            "account_for_loss_in_pipeline_split": self.account_for_loss_in_pipeline_split,
        }
        ways_set = [name for name, is_set in ways.items() if is_set]
        kinds = {name.split("_")[0] for name in ways_set}  # pipeline, num or account
        if len(kinds) > 1:
            raise ConfigError(
                f"{' and '.join(ways_set)} are set; each is a way of its own to partition the "
                "model. Set a layout, or the layers of the first and last stage, or count "
                "embedding and loss."
            )
