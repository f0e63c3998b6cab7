"""The report of ``megatron-lightning doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from megatron_lightning.doctor import versions
from megatron_lightning.doctor.folder import checkpoint_bytes, look_at
from megatron_lightning.doctor.links import measure_links
from megatron_lightning.doctor.machine import UNITS, measure_machine, variables
from megatron_lightning.errors import ConfigError
from megatron_lightning.mistakes import Errors
from megatron_lightning.planning.planned_run import MeasuredRecipe, PlannedRun, Recipe
from megatron_lightning.printed_json import json_text
from megatron_lightning.recipe_reading.recipe_reader import read_recipe
from megatron_lightning.resilience.launcher import find, run_on_ranks

_GIB = 2**30
_MEETING = timedelta(seconds=60)
_KEPT = 2  # the best and the last


def doctor(
    *,
    config: str | Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    seconds: float = 5.0,
    dirpath: str = ".",
    kept_copies: int = _KEPT,
    json: bool = False,
) -> tuple[str, bool]:
    """Show versions, devices, backends and variables, measure every device, test the collectives,
    and look at the checkpoint folder.

    Under torchrun or srun all ranks take part. Without a launcher, processes are started.

    Args:
        config: Configuration file of `megatron-lightning fit` with the axes to test and the sizes
            of a checkpoint. With several files, later files win.
        overrides: Options of `megatron-lightning fit`. Options win over files.
        devices: Ranks to start without a launcher. Default: the GPUs of this machine, or 2
            processes on a CPU.
        seconds: Time of the tests of devices and collectives.
        dirpath: Folder of the checkpoints.
        kept_copies: Checkpoints kept at once (save_top_k and save_last of ModelCheckpoint). One
            more is counted for the checkpoint in writing.
        json: Print JSON.

    Returns:
        The text, empty on all ranks but rank 0, and whether every check has passed.

    Raises:
        ConfigError: For an unreadable configuration, and for options out of range.
    """
    if not 0 < seconds < float("inf") or kept_copies < 1 or (devices is not None and devices < 1):
        raise ConfigError(
            f"seconds is {seconds}, kept_copies {kept_copies} and devices {devices}; each must be "
            "positive."
        )
    launcher = find()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_devices = devices if devices is not None else gpus or 2
    world_size = num_devices if launcher is None else launcher.world_size
    recipe = None if config is None else _recipe(config, overrides, world_size)
    sizes = {} if recipe is None else _sizes(recipe)
    machine, links = run_on_ranks(
        _measure, (sizes, seconds), num_devices, "cuda" if gpus else "cpu", _MEETING
    ) or ([], [])
    if launcher is not None and launcher.rank > 0:
        return "", True
    report: dict[str, Any] = {
        "versions": versions.installed(),
        "system": versions.system(),
        "devices": versions.devices(),
        "backends": versions.backends(),
        "launcher": "none, processes were started" if launcher is None else launcher.name,
        "world_size": world_size,
        "machine": machine,
        "variables": variables(),
        "links": links,
        "folder": look_at(
            dirpath, None if recipe is None else checkpoint_bytes(recipe), kept_copies + 1
        ),
    }
    is_well = report["folder"]["fits"] and all(row["is_right"] for row in links)
    is_well = is_well and report["folder"]["write_speed"] is not None
    if json:
        return json_text(report), is_well
    return "\n".join(_text(report)), is_well


def _measure(device: torch.device, sizes: dict[str, Any], seconds: float) -> Any:
    """Return the rows of the devices and of the collectives. A collective of all ranks."""
    rows = measure_machine(device, seconds / 4)
    return rows, measure_links(device, sizes, 3 * seconds / 4)


def _recipe(
    config: str | Sequence[str], overrides: Sequence[str], world_size: int
) -> Recipe | MeasuredRecipe:
    errors = Errors()
    paths = [config] if isinstance(config, str) else config
    recipe = read_recipe(paths, overrides, world_size, errors)
    if recipe is None:
        raise ConfigError(" ".join(errors.found))
    recipe.layout.data_parallel_size(world_size)
    return recipe


def _sizes(recipe: PlannedRun) -> dict[str, Any]:
    """Return the sizes of the axes."""
    layout = recipe.layout
    return {
        name: getattr(layout, name)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "order",
        )
    }  # fmt: skip


def _text(report: Mapping[str, Any]) -> Iterator[str]:
    yield "versions"
    yield from (
        f"  {name} {value or 'not installed'}" for name, value in report["versions"].items()
    )
    yield from (f"  {name} {value}" for name, value in report["system"].items() if value)
    yield "devices"
    yield from (f"  {line}" for line in report["devices"])
    yield "backends"
    yield from (f"  {name}: {value}" for name, value in report["backends"].items())
    yield "variables"
    yield from map(_variable_text, report["variables"].items())
    yield f"devices of {report['world_size']} ranks"
    yield from map(_machine_text, report["machine"])
    yield f"collectives of {report['world_size']} ranks (launcher: {report['launcher']})"
    yield from map(_link_text, report["links"])
    if not report["links"]:
        yield "  one rank: nothing to test"
    yield "checkpoint folder"
    yield from _folder_text(report["folder"])


def _variable_text(item: tuple[str, Mapping[str, str | None]]) -> str:
    name, row = item
    value = "is not set" if row["value"] is None else f"is {row['value']}"
    return f"  {name} {value} (expected: {row['expected']})"


def _machine_text(row: Mapping[str, Any]) -> str:
    unit = UNITS[row["test"]]
    slow = ", SLOW" if row["is_slow"] else ""
    peak = ""
    if row["peak"] is not None:
        share = row["slowest"] / row["peak"]
        peak = f", {share:.0%} of the peak of {row['peak']:.0f}"
    return (
        f"  {row['test'].replace('_', ' ')}: slowest rank {row['rank']} (on {row['host']}) "
        f"{row['slowest']:.3g} {unit}, median {row['median']:.3g}{peak}{slow}"
    )


def _link_text(row: Mapping[str, Any]) -> str:
    first, second = row["ranks"]
    hosts = row["hosts"]
    where = f"on {hosts[0]}" if hosts[0] == hosts[1] else f"{hosts[0]} to {hosts[1]}"
    slow = ""
    if row["is_slow"]:
        slow = f", SLOW: the median pair has {row['median_pair']:.2f}"
    sums = "" if row["is_right"] else ", WRONG SUMS"
    return (
        f"  {row['axis']:<5} of {row['size']}: all-reduce {row['all_reduce']:.2f} GB/s, slowest "
        f"pair ranks {first} and {second} ({where}) {row['slowest_pair']:.2f} GB/s{slow}{sums}"
    )


def _folder_text(folder: Mapping[str, Any]) -> Iterator[str]:
    speed = folder["write_speed"]
    writing = "NOT WRITABLE" if speed is None else f"writes {speed / _GIB:.2f} GiB/s"
    yield (
        f"  {folder['folder']}: {folder['type'] or 'unknown type'}, {folder['free'] / _GIB:.1f} of "
        f"{folder['total'] / _GIB:.1f} GiB free, {writing}"
    )
    if folder["findings"]:
        counts = ", ".join(f"{name} ({n})" for name, n in sorted(folder["findings"].items()))
        yield f"  guards fired before the newest checkpoint: {counts} (docs/differences.md)"
    if folder["checkpoint"] is not None:
        enough = "fit" if folder["fits"] else "DO NOT FIT: keep fewer, or use another folder"
        yield (
            f"  a checkpoint takes {folder['checkpoint'] / _GIB:.2f} GiB; {folder['copies']} "
            f"(one of them being written) take {folder['wanted'] / _GIB:.2f} GiB and {enough}"
        )
