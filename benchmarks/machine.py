"""Description of the machine for a page of results, and the files that hold it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Return date, machine, load, versions and commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "lightning", "numpy")},
        },
        "commit": commit("megatron_lightning", "strategies"),
    }


def headline(facts: Mapping[str, Any]) -> str:
    """Return the opening sentence of a page of results: machine, versions and load."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['machine']}, {facts['cores']} cores, {facts['memory_gib']} GiB; {versions}; "
        f"commit {facts['commit']}; load average {facts['load_average']} at the start, "
        f"{facts['load_average_at_end']} at the end"
    )


def keep(
    folder: Path, name: str, facts: Mapping[str, Any], page: str, numbers: Mapping[str, Any]
) -> Path:
    """Write a page of results and its numbers into ``folder``; return the page's file, named by
    ``name`` and the date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}_{facts['date'].replace(':', '').replace('+0000', '')}"
    stem.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)
    return stem.with_suffix(".md")


def commit(*folders: str) -> str | None:
    """Return the commit, marked if a file of ``folders`` differs from it. None: no checkout."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *folders)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}-modified" if changed else found


def status_bytes(field: str) -> int:
    """Return a size of this process as Linux counts it, such as ``VmHWM``; 0 on other systems."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor() or 'unknown processor'} "
        f"({platform.machine()}, {platform.system()})"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
