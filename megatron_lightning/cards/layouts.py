"""Layouts in one word, such as ``tp2-pp2`` or ``fsdp``, as options of the strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lightning.config.parallel import DataParallel
from megatron_lightning.errors import ConfigError

_AXES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_MODES = ("zero1", "fsdp", "ddp")
_PART = re.compile(r"(tp|pp|vpp|cp|ep|etp|dp)(\d+)")


@dataclass(frozen=True)
class NamedLayout:
    """A layout with a name."""

    name: str
    ranks: int
    options: dict[str, Any]
    """Options of MegatronStrategy."""


def layout_of(name: str) -> NamedLayout:
    """Return a layout by name: axes with sizes, ``sp``, and one of ``zero1``, ``fsdp`` and ``ddp``,
    joined by dashes. ``one`` is a single rank. A mode of data parallelism without ``dp`` has two
    replicas.

    Raises:
        ConfigError: If the name is none.
    """
    sizes: dict[str, int] = {}
    mode: DataParallel | None = None
    has_sp = False
    for part in [] if name == "one" else name.split("-"):
        found = _PART.fullmatch(part)
        if found is not None and int(found[2]) > 0 and found[1] not in sizes:
            sizes[found[1]] = int(found[2])
        elif part in _MODES and mode is None:
            mode = part  # type: ignore[assignment]
        elif part == "sp":
            has_sp = True
        else:
            raise ConfigError(
                f"layouts has {name!r}, and {part!r} is no part of a layout. Join axes with their "
                f"sizes ({', '.join(_AXES)}, dp), sp and one of {', '.join(_MODES)} by dashes, as "
                "in tp2-pp2 or tp2-sp-fsdp; one is a single rank."
            )
    options: dict[str, Any] = {_AXES[axis]: size for axis, size in sizes.items() if axis != "dp"}
    if has_sp:
        options["sequence_parallel"] = True
    if mode is not None:
        options["data_parallel"] = mode
    if sizes.get("pp", 1) > 1:
        options["micro_batch_size"] = 1
    dense = sizes.get("tp", 1) * sizes.get("cp", 1)
    experts = sizes.get("ep", 1) * sizes.get("etp", sizes.get("tp", 1))
    replicas = sizes.get("dp", max(2 if mode else 1, -(-experts // dense)))
    return NamedLayout(name, dense * sizes.get("pp", 1) * replicas, options)
