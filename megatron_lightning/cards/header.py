"""The header of every kept record: cards, pages of benchmarks, records of GPUs. And the reader.

A header is a mapping of plain values: schema, date, commit, machine, versions and command. A card
names model, revision and reductions, too. YAML and JSON hold the header under ``header``, a page
between two lines of dashes at the top.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

import megatron_lightning
from megatron_lightning.errors import DataError

SCHEMA = 1
"""Version of the schema of headers and cards."""
FIELDS = (
    "schema", "date", "commit", "machine", "cores", "memory_gib", "load_average", "gpu", "versions",
    "command",
)  # fmt: skip
"""Fields of every header."""
_PACKAGES = ("torch", "lightning", "transformers", "numpy")
_ROOT = Path(__file__).parents[2]
_FENCE = "---\n"


def describe(command: str | None = None) -> dict[str, Any]:
    """Return the header of a record beginning now.

    Args:
        command: The command line. None: this process's.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit("megatron_lightning", "strategies", "callbacks"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            "megatron_lightning": megatron_lightning.__version__,
            **{name: number for name in _PACKAGES if (number := _version(name))},
        },
        "command": command or shlex.join(["python", *sys.orig_argv[1:]]),
    }


def headline(header: Mapping[str, Any]) -> str:
    """Return machine, versions, commit and load in words."""
    versions = ", ".join(f"{name} {number}" for name, number in header["versions"].items())
    gpu = f", {header['gpu']}" if header.get("gpu") else ""
    at_end = header.get("load_average_at_end")
    return (
        f"{header['machine']}, {header['cores']} cores, {header['memory_gib']} GiB{gpu}; "
        f"{versions}; commit {header['commit']}; load average {header['load_average']} at the start"
        + (f", {at_end} at the end" if at_end else "")
    )


def commit(*folders: str) -> str | None:
    """Return the checkout's commit, marked if a file of ``folders`` differs. None: this package is
    not part of a checkout.
    """
    try:
        # A virtual environment may lie in another project's checkout.
        _git("ls-files", "--error-unmatch", "--", "megatron_lightning/__init__.py")
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *folders)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}-modified" if changed else found


def with_header(page: str, header: Mapping[str, Any]) -> str:
    """Return a page in Markdown, with the header first."""
    return f"{_FENCE}{dump(header)}{_FENCE}\n{page}"


def dump(values: Mapping[str, Any]) -> str:
    """Return YAML of plain values, in their order."""
    text: str = yaml.safe_dump(
        dict(values), sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )
    return text


def read_record(path: str | Path) -> dict[str, Any]:
    """Return a kept record, with the ``header``: a card, a page, or the numbers of a benchmark.

    Raises:
        DataError: If the file cannot be read, or has no header of a known schema.
    """
    try:
        text = Path(path).read_text()
        record = _parsed(Path(path).suffix, text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as a record: {error}.") from error
    header = record.get("header") if isinstance(record, dict) else None
    if not isinstance(header, dict):
        raise DataError(
            f"{path} has no header, with {', '.join(FIELDS)}: it is no record, or older than "
            "headers. Make it again with its command."
        )
    if header.get("schema") != SCHEMA:
        raise DataError(
            f"{path} has a header of schema {header.get('schema')}, and this version reads schema "
            f"{SCHEMA}. Make the record again, or read it with the version that wrote it."
        )
    missing = [name for name in FIELDS if name not in header]
    if missing:
        raise DataError(f"the header of {path} lacks {', '.join(missing)}. Make the record again.")
    found: dict[str, Any] = record
    return found


def _parsed(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix != ".md":
        return yaml.safe_load(text)
    if not text.startswith(_FENCE):
        return {}
    header, _, page = text.removeprefix(_FENCE).partition(f"\n{_FENCE}")
    return {"header": yaml.safe_load(header), "page": page.lstrip("\n")}


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
        ["git", *command], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
