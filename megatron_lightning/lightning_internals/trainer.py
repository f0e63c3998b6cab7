"""The Trainer, its hooks and errors."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Functions of Lightning that raise ValueError and TypeError for settings. Elsewhere both may be
# bugs and need a traceback.
_READS_SETTINGS = re.compile(
    r"lightning\.pytorch\.(trainer\.trainer|callbacks\..*|loggers\..*)\.__init__"
    r"|lightning\.pytorch\.trainer\.connectors\.(accelerator_connector\..*|checkpoint_connector\._parse_ckpt_path)"
    r"|lightning\.pytorch\.loops\.fit_loop\.setup_data"
    r"|lightning\.pytorch\.callbacks\.gradient_accumulation_scheduler\.on_train_start"
    r"|lightning\.fabric\.(accelerators|utilities\.device_parser|utilities\.seed)\..*"
)


def refuses_settings(error: BaseException) -> bool:
    """Whether ``error`` is Lightning's report of unusable settings. The error's text is then all
    a user needs.
    """
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the last frame has raised the error
        where = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    if isinstance(error, ValueError | TypeError):
        return _READS_SETTINGS.fullmatch(where) is not None
    return where.startswith("lightning.") and isinstance(
        error, MisconfigurationException | ModuleNotFoundError
    )


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the module's Trainer, or None. The public property raises without a Trainer."""
    return module._trainer


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh``. Lightning does so only for ModelParallelStrategy."""
    module._device_mesh = mesh


def connector_of(trainer: pl.Trainer) -> Any:
    """Return the Trainer's connector, holder of the cluster environment and
    ``use_distributed_sampler``.
    """
    return trainer._accelerator_connector


def trainer_sizes() -> tuple[Any, int] | None:
    """Return ``devices`` and ``num_nodes`` as the user passed them to the calling Trainer's
    constructor. None: no Trainer constructor is on the stack.

    The Trainer resolves "auto" before it tells the strategy, and keeps no record of the original.
    """
    code = inspect.unwrap(pl.Trainer.__init__).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else (frame.f_locals["devices"], frame.f_locals["num_nodes"])


def put_around_hooks(
    plugin: Precision, around: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Call the hooks before an optimizer step, clipping among them, inside of ``around()``. Return
    the undo.
    """
    original = type(plugin)._after_closure

    def after_closure(model: pl.LightningModule, optimizer: Any) -> None:
        with around():
            original(plugin, model, optimizer)

    vars(plugin)["_after_closure"] = after_closure
    return lambda: vars(plugin).pop("_after_closure", None)


def known_metrics(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the metrics that callbacks have seen last. The public property computes metrics of the
    running epoch, which may wait for other ranks.
    """
    return dict(trainer._logger_connector._callback_metrics)
