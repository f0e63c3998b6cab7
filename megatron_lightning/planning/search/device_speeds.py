"""Speeds of planned devices and of the links between them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lightning.planning.search.peaks import PEAKS


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of a device in operations or bytes per second."""

    bf16: float
    fp8: float
    memory: float
    link: float
    """Between devices of a node, one way."""
    network: float
    """Between nodes, one way, for each device."""

    @classmethod
    def of_device(cls, name: str) -> Speeds:
        """Return the speeds of a planned device."""
        if name not in _LINKS:  # a CPU: only the proportions matter
            return cls(bf16=1e11, fp8=1e11, memory=1e10, link=2e9, network=1e9)
        peak, (memory, link, network) = PEAKS[name], _LINKS[name]
        tera = 1e12
        return cls(
            bf16=peak.bf16 * tera,
            fp8=(peak.fp8 or peak.bf16) * tera,
            memory=memory * tera,
            link=link * 1e9,
            network=network * 1e9,
        )


_LINKS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "a100": (2.0, 300.0, 25.0),
        "h100": (3.35, 450.0, 50.0),
        "h200": (4.8, 450.0, 50.0),
        "b200": (8.0, 900.0, 50.0),
    }
)
"""Memory in TB/s, NVLink and network in GB/s, one way: data sheets of the devices, and of DGX A100
(200 Gbit/s for each device) and DGX H100 and B200 (400 Gbit/s)."""


def link_speed(speeds: Speeds, reach: int, node_size: int) -> float:
    """Return the speed of the link between ``reach`` neighboring ranks."""
    return speeds.link if reach <= node_size else speeds.network
