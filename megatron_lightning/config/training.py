"""Options of a run: loss scale, checkpoints, recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from megatron_lightning.config.value_checks import check_choice, check_counts
from megatron_lightning.errors import ConfigError

NonFinite = Literal["ignore", "raise", "skip"]
StartMethod = Literal["popen", "spawn", "fork"]
SaveErrorAction = Literal["raise", "warn"]
FolderSaves = Literal["end", "every"]
CompileScope = Literal["block"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
GuardMode = Literal["refuse", "warn", "ignore"]
GUARDS = (
    "averages", "context_attention", "equal_draws", "fsdp_shards", "hook_draws", "left_gradients",
    "module_hooks", "part_saving", "rank_agreement", "same_batches", "same_steps",
    "sequence_positions", "shard_writes", "sharded_gradients", "sharding_plan", "step_hints",
    "trained_parameters", "unreduced_gradients", "world_collectives", "zero_grad",
)  # fmt: skip
"""Names of all guards: what looks for mistakes in a user's code while a run goes on."""


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Response to the findings of guards. The message of a guard ends in its name."""

    mode: GuardMode = "refuse"
    """"refuse" raises an error for a finding, "warn" warns once, "ignore" does not look. Guards
    against hangs and crashes refuse in every mode, unless ``ignore`` names them."""
    ignore: Sequence[str] = ()
    """Names of guards that do not look."""

    def __post_init__(self) -> None:
        check_choice("mode of guards", self.mode, get_args(GuardMode))
        if isinstance(self.ignore, str):
            raise ConfigError(
                f"ignore={self.ignore!r} of GuardOptions is no list. Put it into brackets."
            )
        for name in self.ignore:
            if name not in GUARDS:
                nearest = get_close_matches(str(name), GUARDS, n=1, cutoff=0.0)
                raise ConfigError(
                    f"ignore of GuardOptions names {name!r}, and there is no such guard. The "
                    f"nearest name is {nearest[0]!r}, and all names are {', '.join(GUARDS)}."
                )

    @classmethod
    def of(cls, value: GuardMode | GuardOptions) -> GuardOptions:
        """Return the options for a mode, or the options themselves."""
        return value if isinstance(value, GuardOptions) else cls(mode=value)


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """Dynamic loss scaling of ``16-mixed``, with Megatron's rule and defaults."""

    initial_scale: float = 2.0**32
    """Scale of the first step. Overflows of the first steps lower the scale to a fitting value."""
    growth_interval: int = 1000
    """Steps without overflow before the scale is raised."""
    growth_factor: float = 2.0
    """Factor of a raise."""
    backoff_factor: float = 0.5
    """Factor of the scale after an overflow."""
    hysteresis: int = 2
    """Overflows before the scale is lowered. The count restarts when the scale is raised."""
    min_scale: float = 1.0
    """The scale is never lowered below this."""

    def __post_init__(self) -> None:
        if not 0.0 < self.min_scale <= self.initial_scale:
            raise ConfigError(
                f"loss scale: initial_scale is {self.initial_scale} and min_scale "
                f"{self.min_scale}; the scale starts at the first and never falls below the "
                "second. Set 0 < min_scale <= initial_scale."
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(
                f"loss scale: growth_interval is {self.growth_interval} and hysteresis "
                f"{self.hysteresis}; both must be positive integers."
            )
        if self.growth_factor <= 1.0 or not 0.0 < self.backoff_factor < 1.0:
            raise ConfigError(
                f"loss scale: growth_factor is {self.growth_factor} and backoff_factor "
                f"{self.backoff_factor}; the first raises the scale, the second lowers it. Set "
                "growth_factor above 1, and backoff_factor between 0 and 1."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of saving and loading checkpoints."""

    async_save: bool = False
    """Copy the state to host memory and write the copy in the background during training. The copy
    takes as much memory as the rank writes. The next save, and the end of training, wait for the
    commit."""
    on_save_error: SaveErrorAction = "raise"
    """"raise" ends training when a checkpoint cannot be saved. "warn" continues, and keeps older
    checkpoints until a save succeeds."""
    resize_vocabulary: bool = False
    """Load checkpoints with a vocabulary padded to another size than the model's, with a warning.
    In embedding and output layer (``VocabParallel`` in the sharding plan) and in the optimizer
    states of both, rows beyond the model's are left out, and missing rows are zeros. False: another
    size is an error."""

    also_save_hf: FolderSaves | None = None
    """Write the weights as a Hugging Face folder, too, into the directory ``hugging_face`` of the
    checkpoint: into every checkpoint ("every"), or into the last checkpoint of a fit and all later
    checkpoints ("end"). Needs a model from a folder. The folder is written from the checkpoint's
    files after the commit, with ``async_save`` in the background."""

    adapters_only: bool = False
    """Save adapters (and ``modules_to_save``) with the optimizer states of both, and not the frozen
    weights of the models with LoRA. The checkpoint records the omitted weights and the base. Any
    layout loads the checkpoint beside the same base."""

    trainable_only: bool = False
    """Save no frozen parameter of the module that still has its first value, as ``adapters_only``
    does for models with LoRA. The module must make these values itself before a checkpoint is
    loaded: in the constructor or in ``configure_model``, from a folder or a file. The checkpoint
    records the omitted weights with a digest each, and any layout loads the checkpoint."""

    def __post_init__(self) -> None:
        name = "adapters_only" if self.adapters_only else "trainable_only"
        if self.adapters_only and self.trainable_only:
            raise ConfigError(
                "adapters_only and trainable_only are both set, and the second leaves out all that "
                "the first does. Leave one of them out."
            )
        if (self.adapters_only or self.trainable_only) and self.also_save_hf is not None:
            later = (
                "megatron-lightning adapters merge writes the folder later"
                if self.adapters_only
                else "save_hf_pretrained of a module from load_from_checkpoint writes the folder "
                "later"
            )
            raise ConfigError(
                f"{name} is set with also_save_hf={self.also_save_hf!r}, which writes the weights "
                f"that such checkpoints leave out. Leave one of them out; {later}."
            )
        if self.also_save_hf is not None:
            check_choice("also_save_hf", self.also_save_hf, get_args(FolderSaves))
        check_choice("on_save_error", self.on_save_error, get_args(SaveErrorAction))


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How blocks are compiled, with the names of ``torch.compile``."""

    backend: str = "inductor"
    """Compiler of the traced graphs."""
    mode: CompileMode = "default"
    """"max-autotune-no-cudagraphs" times several kernels for each product."""
    dynamic: bool | None = None
    """Whether sizes are symbols from the first graph on. False: a graph for each shape. None: from
    the second shape on."""
    fullgraph: bool = False
    """Whether a block not traceable as a single graph is an error."""

    def __post_init__(self) -> None:
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise ConfigError(
                f"mode of compile_options is {self.mode!r}, which replays CUDA graphs in memory of "
                "their own, and activations of other micro-batches and layers would be "
                'overwritten there. Set "default" or "max-autotune-no-cudagraphs".'
            )
        check_choice("mode of compile_options", self.mode, get_args(CompileMode))
        if self.mode != "default" and self.backend != "inductor":
            raise ConfigError(
                f"mode={self.mode!r} of compile_options is a mode of inductor, and backend is "
                f"{self.backend!r}. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations to recompute in the backward pass or to offload to the host, with Megatron's
    names.
    """

    recompute_granularity: Literal["selective", "full"] | None = None
    """Recompute parts of each layer (selective), full layers (full), or nothing."""
    recompute_modules: Sequence[str] = ("core_attn",)
    """Selective: names of modules inside a layer (core_attn, mlp, layernorm, …), or dotted patterns
    of module paths. Of norms and activation functions the output is dropped, of other modules all
    saved tensors but their inputs."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Full: keep the input of every n layers (uniform), or recompute n layers of each stage layer
    by layer (block)."""
    recompute_num_layers: int | None = None
    """Full: the number n of layers."""
    recompute_layers: Sequence[str] = ("**.layers.*", "layers.*")
    """Patterns of the paths of the layers."""
    offload_modules: Sequence[str] = ()
    """Names or patterns, as above, of modules with saved tensors in host memory."""
    offload_min_bytes: int = 1 << 20
    """Smaller tensors stay on the device."""

    def __post_init__(self) -> None:
        granularity = self.recompute_granularity
        method = self.recompute_method
        count = self.recompute_num_layers
        if granularity not in (None, "selective", "full"):
            raise ConfigError(
                f"recompute_granularity is {granularity!r}, which is unknown. Set selective, full, "
                "or nothing."
            )
        if method not in (None, "uniform", "block"):
            raise ConfigError(
                f"recompute_method is {method!r}, which is unknown. Set uniform or block."
            )
        if granularity == "full" and (method is None or count is None):
            raise ConfigError(
                f"recompute_granularity=full with recompute_method={method} and "
                f"recompute_num_layers={count}: which layers? Set both, such as uniform and 1."
            )
        if granularity != "full" and (method is not None or count is not None):
            raise ConfigError(
                f"recompute_method={method} and recompute_num_layers={count} choose full layers, "
                f"and recompute_granularity is {granularity}. Set it to full, or leave both out."
            )
        check_counts(self, "recompute_num_layers")
        if granularity == "selective" and not self.recompute_modules:
            raise ConfigError(
                "recompute_modules is empty, and recompute_granularity is selective. Name a module."
            )
        for name in ("recompute_modules", "recompute_layers", "offload_modules"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is no list. Put it into brackets."
                )
