"""Rotary frequencies for sequences longer than in the pretraining, by Llama 3's rule
(https://arxiv.org/abs/2407.21783), by YaRN (https://arxiv.org/abs/2309.00071), or all divided by a
factor (https://arxiv.org/abs/2306.15595).

Llama 3's rule and YaRN look at the turns of a channel over the original length: below a lower bound
the channel's frequency is divided by ``factor``, above an upper bound kept, and in between
interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megatron_lightning.config.value_checks import check_choice, check_counts
from megatron_lightning.errors import ConfigError

RopeType = Literal["llama3", "yarn", "linear"]

# The two bounds, lower first, and all other fields of this type alone.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": (
        "beta_slow", "beta_fast", "mscale", "mscale_all_dim", "correction_range_round_to_int",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies for longer sequences, by Llama 3's rule, by YaRN, or all divided."""

    rope_type: RopeType
    """Rule: llama3 interpolates over the turns, yarn over the channels. linear divides all
    frequencies (Megatron's seq_len_interpolation_factor)."""
    factor: float
    """Divisor of the low frequencies, for linear of all frequencies, 1 or more. Megatron's default
    for llama3 is 8."""
    original_max_position_embeddings: int | None = None
    """llama3 and yarn: longest sequence of the pretraining in tokens. Megatron's default is 8192
    for llama3 and 4096 for yarn."""
    low_freq_factor: float = 1.0
    """llama3: lower bound, in turns."""
    high_freq_factor: float = 4.0
    """llama3: upper bound, in turns."""
    beta_fast: float = 32.0
    """yarn: upper bound, in turns."""
    beta_slow: float = 1.0
    """yarn: lower bound, in turns."""
    mscale: float = 1.0
    """yarn: cosines and sines are multiplied by (0.1 x mscale x ln(factor) + 1) / (0.1 x
    mscale_all_dim x ln(factor) + 1)."""
    mscale_all_dim: float = 0.0
    """yarn: see mscale. With latent attention, scores are multiplied by (0.1 x mscale_all_dim x
    ln(factor) + 1)^2 as well."""
    correction_range_round_to_int: bool = True
    """yarn: widen the interpolated range to whole channels."""

    def __post_init__(self) -> None:
        check_choice("rope_scaling.rope_type", self.rope_type, get_args(RopeType))
        self._check_length()
        if not 1.0 <= self.factor < float("inf"):
            raise ConfigError(
                f"rope_scaling.factor is {self.factor}; low frequencies are divided by it, so that "
                "longer sequences fit. Set it to 1 or more."
            )
        defaults = {field.name: field.default for field in fields(self)}
        for other_type in _FIELDS.keys() - {self.rope_type}:
            for name in _FIELDS[other_type]:
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"rope_scaling.{name}={getattr(self, name)} is an option of {other_type}, "
                        f"and rope_type is {self.rope_type}. Leave it out, or set rope_type to "
                        f"{other_type}."
                    )
        if self.rope_type == "linear":
            return
        lower, upper = _FIELDS[self.rope_type][:2]
        if not 0.0 < getattr(self, lower) < getattr(self, upper) < float("inf"):
            raise ConfigError(
                f"rope_scaling: {lower} is {getattr(self, lower)} and {upper} "
                f"{getattr(self, upper)}; frequencies between the two are interpolated. Set 0 < "
                f"{lower} < {upper}."
            )
        for name in ("mscale", "mscale_all_dim"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"rope_scaling.{name} is {getattr(self, name)}; attention would become flatter "
                    "with longer sequences. Set it to 0 or more."
                )

    @property
    def original_length(self) -> int:
        """Longest sequence of the pretraining, for rules that look at turns."""
        return self.original_max_position_embeddings or 0

    def _check_length(self) -> None:
        length = self.original_max_position_embeddings
        if self.rope_type != "linear" and length is None:
            raise ConfigError(
                f"rope_scaling.rope_type is {self.rope_type}, and original_max_position_embeddings "
                "is not set; turns are counted over it. Set it to the longest sequence of the "
                "pretraining."
            )
        if self.rope_type == "linear" and length is not None:
            raise ConfigError(
                f"rope_scaling.original_max_position_embeddings={length} with rope_type=linear: "
                "all frequencies are divided by the factor. Leave it out."
            )
        check_counts(self, "original_max_position_embeddings")
