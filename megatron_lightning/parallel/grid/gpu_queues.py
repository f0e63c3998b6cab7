"""Checks of the ways between a host and a GPU, and between GPUs:
``CUDA_DEVICE_MAX_CONNECTIONS``, the number of queues from the host to a GPU, and the backend of
process groups.

With one queue, kernels start in launch order. Tensor and context parallel layers need launch order
to overlap: a collective launched before a GEMM also gets its thread blocks before the GEMM.
Blackwell starts kernels in launch order by itself. With fsdp, collectives run beside the GEMMs of
other units, and a single queue would serialize both.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.layout import ParallelLayout

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL = (10, 0)


def check_connections(
    layout: ParallelLayout, data_parallel: str, capability: tuple[int, int] | None
) -> None:
    """Check the variable before process groups exist. Warn of slow values.

    Args:
        layout: Sizes of the axes.
        data_parallel: Mode of data parallelism.
        capability: Compute capability of the GPU. None: no GPU.

    Raises:
        ConfigError: If fsdp has one queue.
    """
    if capability is None:
        return
    value = os.environ.get(VARIABLE)
    # A single queue keeps the order of launches, as overlap of tensor parallelism needs. fsdp
    # launches gathers ahead of time, and needs several queues.
    if data_parallel == "fsdp":
        if value == "1":
            raise ConfigError(
                f'{VARIABLE} is 1 and data_parallel is "fsdp", whose gathers would wait in line '
                f"with the GEMMs that they overlap. Unset {VARIABLE}, or set data_parallel to "
                '"zero1".'
            )
        return
    if capability < _BLACKWELL and layout.tp * layout.cp > 1 and value != "1":
        rank_zero_warn(
            f"{VARIABLE} is {value or 'not set'}, with tensor parallel {layout.tp} x context "
            f"parallel {layout.cp} on a GPU of compute capability {capability[0]}.{capability[1]}. "
            "Below 10.0 collectives overlap with GEMMs only if kernels start in the order of "
            f"their launch. Set {VARIABLE}=1 before Python starts."
        )


def check_exchange(layout: ParallelLayout, device: torch.device) -> None:
    """Check that process groups can exchange activations on GPUs.

    Raises:
        ConfigError: If gloo is to send activations between GPUs. In collectives alone, gloo copies
            tensors of a GPU to the host. A message from the memory of a GPU would end the process.
    """
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp, "expert": layout.ep}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if device.type != "cuda" or not split or not dist.is_initialized():
        return
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if backends.get("cuda") == "gloo":
        raise ConfigError(
            f"the process group is of gloo, and ranks share a model on GPUs ({split}): gloo sends "
            "nothing from the memory of a GPU. Leave process_group_backend unset, which is NCCL on "
            "GPUs. For several ranks on one GPU, NCCL needs version 2.30 or above, and "
            "NCCL_MULTI_RANK_GPU_ENABLE=1."
        )


def gpu_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a device. None: no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
