"""The class of an optimizer beside its state in a checkpoint.

A class cannot resume from the state of another class: missing momenta would begin at zero, and
second moments would stay unused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from megatron_lightning.errors import CheckpointError

CLASSES = "classes"
"""Key of the names of the class and the base classes, beside ``param_groups``."""


def class_names(optimizer: Optimizer) -> list[str]:
    """Return the qualified names of the optimizer's class and base classes, without modules: a
    script and an import of the script name modules differently.
    """
    return [base.__qualname__ for base in type(optimizer).__mro__ if base not in Optimizer.__mro__]


def check_class(optimizer: Optimizer, saved: Sequence[str]) -> None:
    """Check that the optimizer has the class of the saved optimizer, or a base class or subclass.

    Args:
        optimizer: The resumed optimizer.
        saved: :func:`class_names` of the saved optimizer. Empty: an older checkpoint, or a plain
            file.

    Raises:
        CheckpointError: Naming both classes.
    """
    mine = class_names(optimizer)
    if saved and mine and mine[0] not in saved and saved[0] not in mine:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved[0]}, and configure_optimizers returns "
            f"{mine[0]}, which would begin without its own state and with options of {saved[0]}. "
            f"Resume with {saved[0]}, or load the weights alone."
        )
