"""Bytes of weights, gradients and activations by the Trainer's ``precision``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lightning.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, by kind of tensor."""

    name: str
    weight_bytes: int
    """Of a weight, and of the weight's gradient for one micro-batch."""
    compute_bytes: int
    """Of an activation in GEMMs."""
    residual_bytes: int
    """Of the residual stream."""
    main_bytes: int
    """Of the optimizer's copy of a weight. 0: the optimizer steps the weight."""
    autocast: bool = False
    """Whether weights are cast for every micro-batch."""


_PRECISIONS: Mapping[str, Precision] = {
    "32-true": Precision("32-true", 4, 4, 4, 0),
    "bf16-true": Precision("bf16-true", 2, 2, 2, 4),
    "16-true": Precision("16-true", 2, 2, 2, 4),
    "bf16-mixed": Precision("bf16-mixed", 4, 2, 4, 0, autocast=True),
    "16-mixed": Precision("16-mixed", 4, 2, 4, 0, autocast=True),
}
_ALIASES: Mapping[str, str] = {
    "32": "32-true",
    "None": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
}


def precision_of(name: str | int | None) -> Precision:
    """Return the bytes of Lightning's ``Trainer(precision=name)``.

    Raises:
        ConfigError: If the precision has no formula.
    """
    text = _ALIASES.get(str(name), str(name))
    if text not in _PRECISIONS:
        raise ConfigError(
            f"precision is {name!r}, whose memory is not known. Set it to one of "
            f"{', '.join(_PRECISIONS)}."
        )
    return _PRECISIONS[text]
