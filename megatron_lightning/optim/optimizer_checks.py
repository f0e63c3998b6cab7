"""Checks of the optimizers returned by ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import LBFGS, Optimizer

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.parameter_shard import main_dtype
from megatron_lightning.optim.stepping.chained import members
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import ShardSpec


def check_optimizers(
    optimizers: Sequence[object],
    micro_batch_size: int | None,
    world_size: int,
    options: DataParallelOptions,
    *,
    sharded: bool,
) -> None:
    """Check the optimizers returned by ``configure_optimizers``.

    Args:
        optimizers: All returned optimizers.
        micro_batch_size: Samples of a micro-batch. None: the whole batch.
        world_size: Ranks of the job.
        options: Options of the data-parallel step.
        sharded: Whether ranks step shards or a subset of the parameters.

    Raises:
        ConfigError: For an object other than a torch optimizer, if ``sharded``. For an optimizer
            with a sharded state of its own. For an optimizer with several evaluations per step, if
            a rank runs only a part of the step or steps copies of the weights.
    """
    foreign = next(
        (optimizer for optimizer in optimizers if not isinstance(optimizer, Optimizer)), None
    )
    if sharded and foreign is not None:
        raise ConfigError(
            f"configure_optimizers returned a {type(foreign).__name__}, which is no "
            "torch.optim.Optimizer, while each rank steps a part of the parameters "
            '(data_parallel="zero1" or "fsdp", tensor, expert or pipeline parallelism), which is '
            "tried with the param_groups of one. Derive it from torch.optim.Optimizer, or set "
            'data_parallel="ddp" and the other sizes to 1.'
        )
    zero = next(
        (optimizer for optimizer in optimizers if hasattr(optimizer, "consolidate_state_dict")),
        None,
    )
    if zero is not None:  # method name of torch's and similar sharded optimizers
        raise ConfigError(
            f"configure_optimizers returned a {type(zero).__name__}, which shards its state over "
            "the ranks, where checkpoints do not find it. Return the optimizer that it is made "
            "of: the strategy shards its state with "
            'data_parallel="zero1".'
        )
    # L-BFGS calls its closure for trial weights, as often as the values of one rank ask for.
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


def check_owner_options(
    classes: Sequence[str], options: DataParallelOptions, *, is_stored: bool
) -> None:
    """Check that owners can step full tensors under these options.

    Args:
        classes: Optimizers that read full tensors.
        options: Options of the data-parallel step.
        is_stored: Whether parameters are stored as quantized data.

    Raises:
        ConfigError: Naming the option.
    """
    refused = {
        "fp8_param_gather": is_stored,
        "optimizer_cpu_offload": options.optimizer_cpu_offload,
        'moments_dtype="bf16"': options.moments_dtype == "bf16",
        "overlap_param_gather": options.overlap_param_gather,
    }
    option = next((name for name, is_set in refused.items() if is_set), None)
    if option is not None:
        raise ConfigError(
            f"{', '.join(classes)} reads full tensors, which one rank each owns and steps, and "
            f"{option} is for optimizers whose ranks step the shards that they hold. Unset "
            f"{option}, or choose an element-wise optimizer such as AdamW."
        )


def check_stepped_tensors(optimizers: Sequence[object], module: nn.Module) -> None:
    """Check that the optimizers step only parameters of the module.

    Args:
        optimizers: All optimizers of ``configure_optimizers``.
        module: The LightningModule, sharded.

    Raises:
        ConfigError: If an optimizer steps another tensor with ``requires_grad``.
    """
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", ())
        foreign = [
            f"param_groups[{index}]['params'][{position}] {list(tensor.shape)}"
            for index, group in enumerate(groups)
            for position, tensor in enumerate(group["params"])
            if tensor.requires_grad and id(tensor) not in parameter_ids
        ]
        if foreign:
            listed = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise ConfigError(
                f"{type(optimizer).__name__} steps {len(foreign)} tensor(s) that are no parameters "
                f"of {type(module).__name__}: {listed}. Their gradients are not reduced over ranks "
                "and micro-batches, and checkpoints do not hold them. If they are a list that was "
                "made in __init__, build it in configure_optimizers from self.named_parameters(): "
                "pipeline ranks and fsdp keep other tensors than the model was built with. If they "
                "are tensors of their own, register them on the module as nn.Parameter."
            )


class _Holder(NamedTuple):
    """Optimizer and options of a tied parameter's copy on a pipeline rank."""

    name: str
    """Name of the parameter on the pipeline rank."""
    optimizer: str
    """Class of the optimizer."""
    options: dict[str, str]
    """Hyper-parameters of the parameter group."""

    def __str__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} by {self.optimizer}({values})"


def check_tied_copies(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ShardSpec],
    pp: AxisGroup,
) -> None:
    """Check that all pipeline ranks with a copy of a tied parameter step the copy alike. A
    collective.

    A copy and the owner have different names. Groups chosen by name may treat the copy and the
    owner differently.

    Args:
        optimizers: All optimizers of ``configure_optimizers``.
        parameters: Trainable parameters of this rank by name.
        specs: Specs of the parameters.
        pp: Pipeline ranks.

    Raises:
        ConfigError: On all ranks, if two copies are in differing groups.
    """
    if pp.size == 1:
        return
    owners = {name: specs[name].tied_to or name for name in parameters}
    copies = {owners[name] for name in parameters if specs[name].tied_to is not None}
    # Only holders of copies know that a parameter is tied. Owners learn it here.
    tied = set[str]().union(*pp.all_gather_object(copies))
    if not tied:
        return
    holders = {
        owners[name]: _holder(name, parameter, optimizers)
        for name, parameter in parameters.items()
        if owners[name] in tied
    }
    ranks = pp.all_gather_object(holders)
    for owner in sorted(tied):
        copies_by_rank = {
            rank: copies_of_rank[owner]
            for rank, copies_of_rank in enumerate(ranks)
            if owner in copies_of_rank
        }
        # Equal values stay equal only under equal options of the same optimizer.
        ways = {
            (copy.optimizer, frozenset(copy.options.items())) for copy in copies_by_rank.values()
        }
        if len(ways) > 1:
            listed = "; ".join(f"rank {rank}: {holder}" for rank, holder in copies_by_rank.items())
            raise ConfigError(
                f"{owner} is one parameter with copies on pipeline ranks, whose optimizers would "
                f"part them ({listed}). Choose parameter groups by the owner's name, as "
                "megatron_lightning.optim.make_param_groups does: "
                "megatron_lightning.parallel.shards.sharding.tied_names(self) maps each copy to it."
            )


def _holder(name: str, parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> _Holder:
    for optimizer in (member for handle in optimizers for member in members(handle)):
        for group in optimizer.param_groups:
            if any(parameter is member_parameter for member_parameter in group["params"]):
                options = {key: repr(value) for key, value in group.items() if key != "params"}
                return _Holder(name, type(optimizer).__name__, options)
    return _Holder(name, "no optimizer", {})
