"""Checks of what ``configure_optimizers`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import LBFGS, Optimizer

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.buckets import main_dtype
from megatron_lightning.parallel.layout import ParallelLayout


@contextmanager
def explained_empty_optimizers(layout: ParallelLayout, pp_rank: int) -> Iterator[None]:
    """Explain torch's error about an optimizer without parameters on a pipeline rank.

    Raises:
        ConfigError: If ``configure_optimizers`` finds no parameters on this pipeline rank.
    """
    try:
        yield
    except ValueError as error:
        if layout.pp == 1 or "empty parameter list" not in str(error):
            raise
        raise ConfigError(
            f"configure_optimizers found no parameters for an optimizer on pipeline rank {pp_rank} "
            f"of {layout.pp}: the units there have none, or none that it selects. Lower "
            "pipeline_model_parallel_size, put units with trained parameters on every rank, or "
            "give the optimizer a list of groups, which may be empty: "
            'AdamW([{"params": parameters}]).'
        ) from error


def check_optimizers(
    optimizers: Sequence[object],
    micro_batch_size: int | None,
    world_size: int,
    options: DataParallelOptions,
    *,
    sharded: bool,
) -> None:
    """Check what ``configure_optimizers`` returned.

    Args:
        optimizers: All that it returned.
        micro_batch_size: Samples of a micro-batch; None: the whole batch.
        world_size: Ranks of the job.
        options: How the data-parallel ranks step.
        sharded: Whether they step shards of the parameters.

    Raises:
        ConfigError: For an object that is no torch optimizer, where ranks step shards; for an
            optimizer that shards its own state; for one that evaluates the step several times,
            where a rank sees a part of it or steps copies of the weights.
    """
    foreign = next(
        (optimizer for optimizer in optimizers if not isinstance(optimizer, Optimizer)), None
    )
    if sharded and foreign is not None:
        raise ConfigError(
            f"configure_optimizers returned a {type(foreign).__name__}, which is no "
            "torch.optim.Optimizer, and data_parallel "
            'is "zero1" or "fsdp", which put shards into the param_groups of one. Derive it from '
            'torch.optim.Optimizer, or set data_parallel="ddp".'
        )
    own = next(
        (optimizer for optimizer in optimizers if hasattr(optimizer, "consolidate_state_dict")),
        None,
    )
    if own is not None:  # torch's name for it, and that of optimizers after its model
        raise ConfigError(
            f"configure_optimizers returned a {type(own).__name__}, which shards its state over "
            "the ranks, where checkpoints do not find it. Return the optimizer that it is made "
            "of: the strategy shards its state with "
            'data_parallel="zero1".'
        )
    search = next((optimizer for optimizer in optimizers if isinstance(optimizer, LBFGS)), None)
    if search is None:
        return
    dtypes = {parameter.dtype for group in search.param_groups for parameter in group["params"]}
    copies = options.optimizer_cpu_offload or any(main_dtype(dtype) != dtype for dtype in dtypes)
    if world_size > 1 or micro_batch_size is not None or copies:
        raise ConfigError(
            f"configure_optimizers returned {type(search).__name__}, which runs the step several "
            "times and tries weights in between: one rank must run the whole step, with the "
            "weights that the optimizer holds. Use a first-order optimizer such as AdamW, or one "
            "device, micro_batch_size=None, optimizer_cpu_offload=False and "
            'precision="32-true" or "bf16-mixed".'
        )
