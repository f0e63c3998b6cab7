"""Options of data, context and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.value_checks import check_choice, check_counts, is_count
from megatron_lightning.errors import ConfigError

DataParallel = Literal["ddp", "zero1", "fsdp"]
MomentsDtype = Literal["fp32", "bf16"]
ContextExchange = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Sharding and communication of gradients and optimizer state over the data-parallel ranks."""

    bucket_size: int | None = None
    """Elements at which a gradient bucket closes and its reduction may start; None: Megatron's
    max(40e6, 1e6 per data-parallel rank), and no more than an eighth of the parameters, so that
    small models overlap as well."""
    grad_reduce_in_bf16: bool = False
    """Send gradients as bf16, half the bytes; they are accumulated over micro-batches in fp32 all
    the same."""
    num_distributed_optimizer_instances: int = 1
    """Groups of neighboring ranks into which the data-parallel ranks are split: zero1 and fsdp
    shard inside a group (a node) and keep a replica in each of the others (hybrid sharding)."""
    overlap_param_gather: bool = False
    """Gather the parameters that zero1 has stepped beside the next forward instead of inside the
    step. Code that reads weights between the two (a callback, the module's own hooks, a step before
    it calls the layer) sees old ones."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state and master weights in host memory, and step there."""
    moments_dtype: MomentsDtype = "fp32"
    """Dtype of the optimizer's moments between the steps; the step itself computes in fp32."""
    reshard_after_forward: bool | None = None
    """fsdp: release a unit's full parameters between forward and backward (ZeRO-3) and gather them
    again; None: where a step is one micro-batch. With micro-batches they are otherwise gathered
    once a step (ZeRO-2)."""
    reduce_every_microbatch: bool = False
    """fsdp: reduce-scatter gradients after every micro-batch, so that full gradients are never
    kept, instead of once a step."""

    def __post_init__(self) -> None:
        check_counts(self, "bucket_size", "num_distributed_optimizer_instances")
        check_choice("moments_dtype", self.moments_dtype, get_args(MomentsDtype))


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Attention over sequences that are divided over ranks, with Megatron-Core's names."""

    cp_comm_type: ContextExchange | list[ContextExchange] = "p2p"
    """How queries meet the keys of other ranks: "p2p" passes keys and values around the ranks (ring
    attention), "all_gather" gathers them, "a2a" exchanges parts of the sequence for heads
    (Ulysses), "a2a+p2p" does so among neighbors and passes keys and values around their groups. A
    list has one entry for each attention module of the full model, in order."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    """Ranks of the two levels of "a2a+p2p": neighbors that exchange heads, and groups of them in a
    ring; their product is context_parallel_size. None: there are no levels."""

    def __post_init__(self) -> None:
        for name in self.exchanges:
            check_choice("cp_comm_type", name, get_args(ContextExchange))
        sizes, needed = self.hierarchical_context_parallel_sizes, "a2a+p2p" in self.exchanges
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

    @property
    def exchanges(self) -> tuple[ContextExchange, ...]:
        """The types in use, each once."""
        given = self.cp_comm_type
        return tuple(dict.fromkeys(given if isinstance(given, list) else [given]))

    def num_exchanging(self, exchange: ContextExchange, num_ranks: int) -> int:
        """Return how many of ``num_ranks`` context-parallel ranks divide the heads among them."""
        if exchange == "a2a+p2p" and self.hierarchical_context_parallel_sizes is not None:
            return self.hierarchical_context_parallel_sizes[0]
        return num_ranks if exchange == "a2a" else 1


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Partition of the model into pipeline stages and order of the micro-batches, with
    Megatron-Core's names.
    """

    units: list[str] | None = None
    """Path patterns of the units between which the model may be divided, in the order in which one
    forward calls them; None: the model's own, or else they are found."""
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    """Layers of every stage in Megatron's notation, such as "Et*3|(tt|)*29,mL", or as lists of
    "embedding", "decoder", "mtp" and "loss"; None: layers are spread evenly."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank, all of its chunks together; None: like the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank, all of its chunks together; None: like the others."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are spread."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer when layers are spread."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Micro-batches that visit a model chunk in one go, for the interleaved schedule; None: as few
    as possible."""
    variable_seq_lengths: bool = False
    """Whether micro-batches of equal shapes may still differ in the shapes between stages, or in
    whether these take a gradient: steps that trim a batch by its values, layers frozen within an
    epoch. Every message then carries its shapes."""
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
        found = [name for name, is_set in ways.items() if is_set]
        kinds = {name.split("_")[0] for name in found}  # pipeline, num or account
        if len(kinds) > 1:
            raise ConfigError(
                f"{' and '.join(found)} are set; each is a way of its own to partition the model. "
                "Set a layout, or the layers of the first and last stage, or count embedding and "
                "loss."
            )
