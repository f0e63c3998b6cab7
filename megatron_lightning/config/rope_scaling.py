"""Rotary frequencies for sequences longer than in the pretraining, by Llama 3's rule
(https://arxiv.org/abs/2407.21783), by YaRN (https://arxiv.org/abs/2309.00071), all divided by a
factor (https://arxiv.org/abs/2306.15595), or by LongRoPE (https://arxiv.org/abs/2402.13753), which
divides every channel's frequency by a factor of its own.

Llama 3's rule and YaRN look at the turns of a channel over the original length: below a lower bound
the channel's frequency is divided by ``factor``, above an upper bound kept, and in between
interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megatron_lightning.config.value_checks import check_choice, check_counts
from megatron_lightning.errors import ConfigError

RopeType = Literal["llama3", "yarn", "linear", "longrope"]

# Fields of this type alone. llama3 and yarn: the two bounds first, the lower one before the upper.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": (
        "beta_slow", "beta_fast", "mscale", "mscale_all_dim", "correction_range_round_to_int",
    ),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies for longer sequences, by Llama 3's rule, by YaRN, by LongRoPE, or all
    divided.
    """

    rope_type: RopeType
    """Rule: llama3 interpolates over the turns, yarn over the channels. linear divides all
    frequencies (Megatron's seq_len_interpolation_factor). longrope divides each frequency by an
    entry of short_factor or long_factor (Phi-3 and Phi-4 with 128k tokens)."""
    factor: float
    """Divisor of the low frequencies, for linear of all frequencies, 1 or more. Megatron's default
    for llama3 is 8. longrope: the longest sequence divided by
    original_max_position_embeddings."""
    original_max_position_embeddings: int | None = None
    """llama3, yarn and longrope: longest sequence of the pretraining in tokens. Megatron's default
    is 8192 for llama3 and 4096 for yarn."""
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
    short_factor: Sequence[float] | None = None
    """longrope: divisors of the frequencies [rotated channels of a head / 2], in documents of at
    most original_max_position_embeddings tokens."""
    long_factor: Sequence[float] | None = None
    """longrope: divisors of the frequencies in longer documents."""
    attention_factor: float | None = None
    """longrope: factor of cosines and sines. None: sqrt(1 + ln(factor) / ln(
    original_max_position_embeddings))."""

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
        if self.rope_type == "longrope":
            self._check_long()
        if self.rope_type in ("linear", "longrope"):
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

    @property
    def sharpness(self) -> float:
        """Factor of cosines and sines that sharpens attention: of LongRoPE (equation 1.4), or of
        YaRN (section 3.4).
        """
        log = math.log(self.factor)
        if self.rope_type == "yarn":
            return (0.1 * self.mscale * log + 1.0) / (0.1 * self.mscale_all_dim * log + 1.0)
        if self.rope_type != "longrope":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + log / math.log(self.original_length))

    def _check_long(self) -> None:
        """Check LongRoPE's divisors, and keep them as tuples."""
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if not divisors or not all(0.0 < value < float("inf") for value in divisors):
                raise ConfigError(
                    f"rope_scaling.{name} is {divisors}, and longrope divides each frequency by an "
                    "entry. Set it to numbers above 0, one for every two rotated channels."
                )
            object.__setattr__(self, name, tuple(map(float, divisors)))
        if self.original_length < 2:
            raise ConfigError(
                f"rope_scaling.original_max_position_embeddings is {self.original_length}, and "
                "longrope divides by its logarithm. Set it to 2 or more."
            )
        if self.attention_factor is not None and not 0.0 < self.attention_factor < float("inf"):
            raise ConfigError(
                f"rope_scaling.attention_factor is {self.attention_factor}; it multiplies cosines "
                "and sines. Set it above 0, or leave it out."
            )

    def _check_length(self) -> None:
        length = self.original_max_position_embeddings
        if self.rope_type != "linear" and length is None:
            raise ConfigError(
                f"rope_scaling.rope_type is {self.rope_type}, and original_max_position_embeddings "
                "is not set, the length from which frequencies are scaled. Set it to the longest "
                "sequence of the pretraining."
            )
        if self.rope_type == "linear" and length is not None:
            raise ConfigError(
                f"rope_scaling.original_max_position_embeddings={length} with rope_type=linear: "
                "all frequencies are divided by the factor. Leave it out."
            )
        check_counts(self, "original_max_position_embeddings")
