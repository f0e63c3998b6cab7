"""Advice at the device's out-of-memory error, with current numbers."""

from __future__ import annotations

import os

import torch

from megatron_lightning.errors import add_note

_GIB = 2**30
_FRAGMENTED = 0.1
"""Share of the device's memory, reserved but not allocated, above which other allocator segments
help.
"""


def memory_advice(*, allocated: int, reserved: int, total: int, is_expandable: bool) -> str:
    """Return advice about a full device: the users of memory, and the setting to change.

    Args:
        allocated: Bytes of tensors.
        reserved: Bytes held by the allocator.
        total: Bytes of the device.
        is_expandable: Whether the allocator's segments can grow.
    """
    fact = (
        f"The device has {total / _GIB:.1f} GiB; tensors take {allocated / _GIB:.1f} GiB, and the "
        f"allocator holds {(reserved - allocated) / _GIB:.1f} GiB that no tensor uses."
    )
    if reserved - allocated > _FRAGMENTED * total and not is_expandable:
        return (
            f"{fact} That memory is in pieces. Set PYTORCH_ALLOC_CONF=expandable_segments:True in "
            "the environment."
        )
    return (
        f"{fact} Set a smaller micro_batch_size, recompute, data_parallel='fsdp' or more "
        "parallel ranks; `megatron-lightning plan` tells the bytes of each layout."
    )


def explain_out_of_memory(error: BaseException) -> None:
    """Add advice to an out-of-memory error of this rank's GPU. Other errors stay unchanged."""
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return
    settings = f"{os.getenv('PYTORCH_ALLOC_CONF', '')},{os.getenv('PYTORCH_CUDA_ALLOC_CONF', '')}"
    advice = memory_advice(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        total=torch.cuda.get_device_properties().total_memory,
        is_expandable="expandable_segments:True" in settings,
    )
    add_note(error, advice)
