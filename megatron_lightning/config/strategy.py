"""Settings of the strategy: names, types, defaults and checks. No torch here.

``MegatronStrategy`` has a parameter for every field, and describes it (a test compares). The
strategy, and a plan of a configuration file, read the settings from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.parallel import (
    ContextOptions,
    DataParallel,
    DataParallelOptions,
    PipelineOptions,
)
from megatron_lightning.config.training import (
    CheckpointOptions,
    CompileOptions,
    CompileScope,
    GuardMode,
    GuardOptions,
    NonFinite,
    RecomputeOptions,
    StartMethod,
)
from megatron_lightning.config.value_checks import check_choice, check_kind
from megatron_lightning.errors import ConfigError

_GROUPS = {
    "pipeline_options": PipelineOptions,
    "context_options": ContextOptions,
    "data_parallel_options": DataParallelOptions,
    "recompute": RecomputeOptions,
    "compile_options": CompileOptions,
    "checkpoint_options": CheckpointOptions,
}.items()


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Arguments of ``MegatronStrategy``, as given, in the order of its parameters.

    Raises:
        ConfigError: If a value by itself cannot work. Sizes are checked together as a
            ``ParallelLayout``.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool | Literal["auto"] = "auto"
    micro_batch_size: int | None = None
    pipeline_schedule: str | list[str] = "auto"
    pipeline_options: PipelineOptions | None = None
    context_options: ContextOptions | None = None
    data_parallel: DataParallel = "zero1"
    data_parallel_options: DataParallelOptions | None = None
    recompute: RecomputeOptions | None = None
    compile: CompileScope | None = None
    compile_options: CompileOptions | None = None
    fused_loss: bool = True
    non_finite: NonFinite = "ignore"
    guards: GuardMode | GuardOptions = "refuse"
    start_method: StartMethod = "popen"
    sharding_plan: object = None
    """A ``ShardingPlan``, which needs torch, or "auto". ``StrategyOptions`` checks the value."""
    checkpoint_options: CheckpointOptions | None = None
    process_group_backend: str | None = None
    nccl_communicator_config_path: str | None = None
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"micro_batch_size is {size!r}; it must be a positive integer, or unset for full "
                "batches."
            )
        check_choice("data_parallel", self.data_parallel, get_args(DataParallel))
        check_choice("non_finite", self.non_finite, get_args(NonFinite))
        check_choice("start_method", self.start_method, get_args(StartMethod))
        GuardOptions.of(self.guards)
        for name, kind in _GROUPS:
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), kind)
        self._check_compile()
        self._check_process_groups()

    def _check_compile(self) -> None:
        if self.compile is not None and self.compile not in get_args(CompileScope):
            raise ConfigError(
                f'compile is {self.compile!r}, which is unknown. Set it to "block", which compiles '
                "each of the repeated blocks of a model, or leave it out."
            )
        if self.compile is None and self.compile_options is not None:
            raise ConfigError(
                "compile_options are given, and compile is not set, so that nothing is compiled. "
                'Set compile to "block", or leave compile_options out.'
            )

    def _check_process_groups(self) -> None:
        """Check the timeout, and the backend for CPU tensors. Ranks compare weights and plans on
        CPU tensors.
        """
        timeout_s, backend = self.timeout_s, self.process_group_backend
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
            raise ConfigError(
                f"timeout_s is {timeout_s!r}; ranks wait that many seconds for each other. Set it "
                "above 0."
            )
        if backend is not None and "cpu:" not in backend and backend not in ("gloo", "mpi", "ucc"):
            raise ConfigError(
                f"process_group_backend={backend!r} has no backend for CPU tensors, on which the "
                "ranks compare their weights and agree on checkpoints. Leave it unset, or set it "
                f'to "cpu:gloo,cuda:{backend.rpartition(":")[2]}".'
            )
