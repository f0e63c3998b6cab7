"""Number of items in a loss's mean, if the module counts items: returned with the loss, or from a
method ``num_items(batch)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megatron_lightning.parallel.numbers import number_on


def counts_items(module: pl.LightningModule, output: Any) -> bool:
    """Return whether a step's loss has a number of items."""
    returned = isinstance(output, Mapping) and "num_items" in output
    return returned or has_count(module)


def has_count(module: pl.LightningModule) -> bool:
    """Return whether the module counts items by a method, before a step."""
    return callable(getattr(module, "num_items", None))


def count_items(module: pl.LightningModule, batch: Any) -> Tensor | None:
    """Return the count by the module's method, in fp32. None: no such method."""
    count: Callable[[Any], Any] | None = getattr(module, "num_items", None)
    return _number(module, count(batch)) if callable(count) else None


def num_items_of(module: pl.LightningModule, batch: Any, output: Any) -> Tensor | None:
    """Return the number of items of a step's loss, in fp32. None: the module does not count.

    Args:
        module: The module.
        batch: The micro-batch.
        output: Output of the step.
    """
    if isinstance(output, Mapping) and "num_items" in output:
        return _number(module, output["num_items"])
    return count_items(module, batch)


def _number(module: pl.LightningModule, found: Any) -> Tensor:
    return number_on(module.device, found).detach()
