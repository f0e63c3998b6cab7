"""Memory of devices, and changes of a recipe for less memory. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.planning.planned_run import PlannedRun

GIB = 2**30
DEVICES: Mapping[str, float] = {"a100": 79.0, "h100": 79.0, "h200": 139.0, "b200": 178.0}
"""GiB reported by a driver for the largest version."""
RESERVED_GIB = 2.0
"""Of a GPU: the driver's context, NCCL's buffers and the libraries' workspaces (an estimate)."""


@dataclass(frozen=True)
class PlannedDevice:
    """Device of a plan."""

    name: str
    memory_bytes: float
    """Of the device."""
    usable_bytes: float
    """For tensors."""


def planned_device(text: str) -> PlannedDevice:
    """Return the device named by a user: "h100", or "cpu:64" for 64 GiB a rank.

    Raises:
        ConfigError: If the device is unknown.
    """
    name, _, size = text.lower().partition(":")
    if name == "cpu" and re.fullmatch(r"\d+(\.\d+)?", size) and float(size) > 0:
        return PlannedDevice(f"cpu with {size} GiB", float(size) * GIB, float(size) * GIB)
    if name in DEVICES and not size:
        total = DEVICES[name]
        return PlannedDevice(name, total * GIB, (total - RESERVED_GIB) * GIB)
    raise ConfigError(
        f"device is {text!r}; it must be one of {', '.join(DEVICES)}, or cpu:GIB with the memory "
        "of a rank, as cpu:16."
    )


def remedies(recipe: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    """Yield changes of a recipe for less memory, the cheapest first."""
    if recipe.micro_batch_size > 1:
        yield "micro_batch_size: 1", replace(recipe, micro_batch_size=1)
    if recipe.recompute == RecomputeOptions():
        full_recompute = RecomputeOptions(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        name = "recompute: {recompute_granularity: full, recompute_method: uniform}"
        yield name, replace(recipe, recompute=full_recompute)
        if recipe.micro_batch_size > 1:
            yield (
                f"{name} and micro_batch_size: 1",
                replace(recipe, recompute=full_recompute, micro_batch_size=1),
            )
    if recipe.data_parallel != "fsdp" and recipe.layout.pp == 1:
        yield "data_parallel: fsdp", replace(recipe, data_parallel="fsdp")
    if recipe.data_parallel == "fsdp" and not recipe.data.reduce_every_microbatch:
        sharded = replace(recipe.data, reshard_after_forward=True, reduce_every_microbatch=True)
        text = "{reshard_after_forward: true, reduce_every_microbatch: true}"
        yield f"data_parallel_options: {text}", replace(recipe, data=sharded)


def advice(
    recipe: PlannedRun, device: PlannedDevice, needed: Callable[[PlannedRun], float | None]
) -> list[str]:
    """Return the sufficient changes of a recipe, with the resulting bytes.

    Args:
        recipe: A recipe too large for the device.
        device: The device.
        needed: Returns the bytes of the fullest rank. None: the recipe cannot run.
    """
    lines = []
    for text, changed in remedies(recipe):
        size = needed(changed)
        if size is not None and size <= device.usable_bytes:
            lines.append(f"  {text}: {size / GIB:.1f} GiB")
    return lines or [
        "  no change of micro-batch and recomputation is enough: set a larger "
        "tensor_model_parallel_size or pipeline_model_parallel_size, or use more devices"
    ]
