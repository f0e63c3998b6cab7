"""Options of NCCL's communicators, from a YAML file in Megatron's format.

The file has a line for each group of ranks::

    dp_cp: {max_ctas: 8, is_high_priority_stream: true}
    tp: {cga_cluster_size: 2, net_name: IB}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import yaml

from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NcclOptions:
    """Options of a communicator. None: NCCL's own choice.

    Raises:
        ConfigError: If a value is out of range.
    """

    cga_cluster_size: int | None = None
    """Thread blocks of a cluster, 0 to 8 (Hopper and newer)."""
    min_ctas: int | None = None
    """Fewest thread blocks of a kernel, 1 to 64."""
    max_ctas: int | None = None
    """Most thread blocks of a kernel, 1 to 64. GEMMs cannot use the occupied multiprocessors."""
    net_name: str | None = None
    """Network, such as IB or Socket."""
    is_high_priority_stream: bool = False
    """Whether kernels take precedence over kernels of other streams."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ConfigError(f"{name} is {value!r}; it must be from {least} to {most}.")
        if type(self.is_high_priority_stream) is not bool:
            raise ConfigError(
                f"is_high_priority_stream is {self.is_high_priority_stream!r}; it must be true or "
                "false."
            )
        if not isinstance(self.net_name, str | None):
            raise ConfigError(f"net_name is {self.net_name!r}; it must be a name, such as IB.")
        if (self.min_ctas or 1) > (self.max_ctas or 64):
            raise ConfigError(
                f"min_ctas is {self.min_ctas} and max_ctas {self.max_ctas}. Set max_ctas to "
                f"{self.min_ctas} or more."
            )

    def for_torch(self) -> Any:
        """Return the options as torch's options class, which exists in builds with CUDA."""
        options = dist.ProcessGroupNCCL.Options(
            is_high_priority_stream=self.is_high_priority_stream
        )
        for name in (*_RANGES, "net_name"):
            value = getattr(self, name)
            if value is not None:
                setattr(options.config, name, value)
        return options


_RANGES: Mapping[str, tuple[int, int]] = {
    "cga_cluster_size": (0, 8),
    "min_ctas": (1, 64),
    "max_ctas": (1, 64),
}


def read_nccl_options(path: str | Path, groups: Collection[str]) -> dict[str, NcclOptions]:
    """Return the options of a file by the name of the group.

    Args:
        path: The file.
        groups: Names of the existing groups. The file may write ``_`` for ``-``.

    Raises:
        ConfigError: If the file cannot be read, or names an unknown group or option.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"nccl_communicator_config_path={path}: {error}") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(values, Mapping) for values in content.values()
    ):
        raise ConfigError(
            f"{path} has no options of groups. Write one line a group, such as tp: {{max_ctas: 8}}."
        )
    return {
        _group(name, groups, path): _options(name, values, path) for name, values in content.items()
    }


def _group(name: object, groups: Collection[str], path: str | Path) -> str:
    group = str(name).replace("_", "-")
    if group not in groups:
        raise ConfigError(
            f"{path} has options of {name!r}, and there is no such group. The groups are "
            f"{', '.join(groups)}."
        )
    return group


def _options(group: object, values: Mapping[str, Any], path: str | Path) -> NcclOptions:
    field_names = [field.name for field in fields(NcclOptions)]
    unknown = [str(name) for name in values if name not in field_names]
    if unknown:
        raise ConfigError(
            f"{path} sets {', '.join(unknown)} for {group}, which is unknown. The options are "
            f"{', '.join(field_names)}."
        )
    try:
        return NcclOptions(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}, {group}: {error}") from None


class CommunicatorKey(NamedTuple):
    """Key of a communicator: groups with equal keys share it."""

    ranks: tuple[int, ...]
    reduces_gradients: bool
    """Whether they are groups of data-parallel ranks."""


def communicator_key(name: str, ranks: tuple[int, ...]) -> CommunicatorKey:
    """Return the key of a group's communicator, which groups of the same ranks share.

    A bucket of gradients is reduced as soon as a rank has its gradients, or at the end of backward
    where the rank has not used a parameter (an expert without a token). Between the exchanges of
    layers, that is not the same order on all ranks, so that groups of data-parallel ranks (``dp``,
    ``dp-cp``, ``tp-dp-cp``, ``edp``, ``world``) share none with the groups of layers.
    """
    return CommunicatorKey(ranks, "dp" in name or name == "world")


def options_of_communicators(
    options: Mapping[str, NcclOptions], keys: Mapping[str, CommunicatorKey]
) -> dict[CommunicatorKey, NcclOptions]:
    """Return the options of a rank's communicators.

    Args:
        options: By the name of the group.
        keys: Name of a group -> key of its communicator.

    Raises:
        ConfigError: If two groups that share a communicator have different options.
    """
    chosen: dict[CommunicatorKey, tuple[str, NcclOptions]] = {}
    for name, group_options in options.items():
        first_name, first_options = chosen.setdefault(keys[name], (name, group_options))
        if first_options != group_options:
            ranks = keys[name].ranks
            raise ConfigError(
                f"the NCCL options of {first_name} and {name} differ, and both are the "
                f"{len(ranks)} ranks {ranks}, which share a communicator. Remove the options "
                "of one, or make both equal."
            )
    return {key: group_options for key, (_, group_options) in chosen.items()}
