"""Lightning's own tests against MegatronStrategy, by a plugin for its suite: ``-p
tests.conformance.plugin --megatron one``.

The suite stays as it is. A mode decides which Trainers get MegatronStrategy: see ``one.py``,
``two.py`` and ``pipeline.py``; ``plain`` changes nothing. Whatever else the plugin changes is
because a checkpoint of the strategy is a directory: what a user reads with ``read_full`` or
``plain_file``, the suite reads with ``torch.load``, ``load_from_checkpoint`` and
``TorchCheckpointIO``, where it looks for a file, a committed checkpoint will do, and its mocks of
``torch.save`` save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

MODES = ("one", "two", "pipeline", "plain")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron", "Lightning's tests against MegatronStrategy")
    group.addoption(
        "--megatron", choices=MODES, default="plain", help="which Trainers get MegatronStrategy"
    )


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("--megatron")
    if mode != "plain":
        read_directories()
        save_through_mocks()
        import_module(f"tests.conformance.{mode}").install(config)


def read_directories() -> None:
    """Make ``torch.load`` and ``load_from_checkpoint`` read checkpoint directories, which the tests
    take for files."""
    import torch
    from lightning.fabric.plugins.io import torch_io
    from lightning.fabric.utilities import cloud_io
    from lightning.pytorch.core import saving

    from megatron_lightning.checkpoint import is_committed, read_full

    def taught(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_any(path: Any, *args: Any, **options: Any) -> Any:
            is_directory = isinstance(path, str | os.PathLike) and os.path.isdir(path)
            return read_full(path) if is_directory else load(path, *args, **options)

        return load_any

    torch.load = taught(torch.load)
    cloud_io._load = saving.pl_load = torch_io.pl_load = taught(cloud_io._load)

    def or_checkpoint(is_file: Callable[..., bool]) -> Callable[..., bool]:
        def is_file_or_checkpoint(path: Any, **options: Any) -> bool:
            asked_by = sys._getframe(1).f_globals.get("__name__", "")
            return is_file(path, **options) or (
                asked_by.startswith("tests_pytorch.") and is_committed(path)
            )

        return is_file_or_checkpoint

    os.path.isfile = or_checkpoint(os.path.isfile)
    Path.is_file = or_checkpoint(Path.is_file)  # type: ignore[method-assign]


def save_through_mocks() -> None:
    """Make a mock of ``torch.save`` that counts calls save as well: what a checkpoint holds is read
    back before it is kept."""
    import torch

    patch = mock.patch

    def patch_through(target: str, *args: Any, **options: Any) -> Any:
        return patch(
            target,
            *args,
            **(options or {"wraps": torch.save} if target == "torch.save" else options),
        )

    vars(patch_through).update(vars(patch))
    mock.patch = patch_through  # type: ignore[assignment]
