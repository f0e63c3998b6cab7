"""Settings of the order of training samples. A checkpoint keeps the settings, and a resume
compares.

A resume skips a number of samples. In another order, the run would read a part of the samples twice
and never read others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_lightning.errors import CheckpointError

OnChangedData = Literal["refuse", "reorder", "continue", "restart"]
FIXED = ("sequence_length", "seed", "split")
"""Settings with an effect on the order of every data set."""


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return the differences between settings of the order, in words."""
    return [
        f"{name}: {value} here, {there[name]} there"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


def describe_changes(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    *,
    on_changed_data: OnChangedData,
    consumed_samples: int | None,
) -> str | None:
    """Return a warning about a changed order of the samples. None: the order is the checkpoint's.

    Args:
        here: Settings of the order in this run, by the name of the option.
        there: Settings of the order in the checkpoint's run. Names missing from ``there`` are not
            compared.
        on_changed_data: ``reorder`` accepts another order.
        consumed_samples: Samples read by the checkpoint's run, if known.

    Raises:
        CheckpointError: If the order has changed, and ``on_changed_data`` does not accept a change.
    """
    differing = differences(here, there)
    if not differing:
        return None
    what_was_read = "the samples" if consumed_samples is None else f"the {consumed_samples} samples"
    finding = (
        f"the checkpoint was written on training data in another order ({'; '.join(differing)})"
    )
    if on_changed_data != "reorder":
        raise CheckpointError(
            f"{finding}: at its position in this order, {what_was_read} that were read would come "
            "again in part, and others never. Set these options as they were, or on_changed_data "
            "to "
            '"reorder" to read on at this position of the new order all the same, or start a run '
            "from the weights alone (load_from_checkpoint). Other files, weights or "
            'num_train_samples of PretrainDataModule go on with "continue", each data set where it '
            'was left, or with "restart".'
        )
    return (
        f"{finding}. Training reads on at the same position of the new order: of {what_was_read} "
        "that were read, those that stand behind it come again, and as many others are never read."
    )
