"""Lightning's model summary for the full module. At Lightning's hook, this rank holds only a
part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary

from megatron_lightning.lightning_internals.logs import FullSummary, replace_summary
from megatron_lightning.optional import require

_FLOPS = "total flops"  # 0, since no example input is run


def summarize_full(module: pl.LightningModule, undo: ExitStack) -> None:
    """Fix the content of the summary callbacks to ``module`` in its present form, until ``undo`` is
    closed.

    Only rank 0 prints the summary. An example input is not run, since the module may be on
    ``meta``.
    """
    trainer = module.trainer
    if not trainer.is_global_zero:
        return
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            with hidden_example(module):
                summary = FullSummary(callback, trainer, module)
            undo.callback(replace_summary(callback, summary, _without_flops(callback)))


@contextmanager
def hidden_example(module: pl.LightningModule) -> Iterator[None]:
    """Keep summaries and graphs from running this rank's part as a full module, or without other
    ranks.
    """
    kind, example = type(module), module.example_input_array
    if example is None:
        yield
        return
    # A class may have a property without a setter in this place.
    fixed = isinstance(found := kind.example_input_array, property) and not found.fset
    if fixed:
        module.__class__ = type(
            kind.__name__,
            (kind,),
            {
                "example_input_array": None,
                "__module__": kind.__module__,
                "__doc__": kind.__doc__,
            },
        )
    else:
        module.example_input_array = None
    try:
        yield
    finally:
        if fixed:
            module.__class__ = kind
        else:
            module.example_input_array = example


def _without_flops(callback: ModelSummary) -> Callable[..., None]:
    """Return the callback's ``summarize`` without the empty line of FLOPs."""
    original: Callable[..., None] = type(callback).summarize

    def summarize(*columns: Any, **options: Any) -> None:
        if isinstance(callback, RichModelSummary):
            require("rich", "a summary in colors")
            from rich import get_console

            console = get_console()
            with console.capture() as captured:
                original(*columns, **options)
            console.file.write(_without_line(captured.get()))
            return
        log = logging.getLogger(original.__module__)
        log.addFilter(_drop_line)
        try:
            original(*columns, **options)
        finally:
            log.removeFilter(_drop_line)

    return summarize


def _drop_line(record: logging.LogRecord) -> bool:
    record.msg = _without_line(str(record.msg))
    return True


def _without_line(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if _FLOPS not in line.lower())
