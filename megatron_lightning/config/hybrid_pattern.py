"""Patterns of hybrid models, the strings of Megatron-Core's ``hybrid_layer_pattern``. No torch
here.

A letter is a residual layer with a single mixer: a norm, the mixer, and the addition to the stream.
Attention has no feed-forward behind it.

    M  Mamba-2            *  attention           -  feed-forward
    G  gated delta net    +  latent attention    E  experts
    |  ends a pipeline stage. Stages may be empty.
    /  begins the layers of a depth of multi-token prediction. All depths are equal.

``M-M*-|M-M-/M*/M*`` has nine layers on two stages and two depths with two layers each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "M": "mamba", "G": "delta_net", "*": "attention", "+": "attention", "-": "mlp", "E": "moe",
    }
)  # fmt: skip
"""Letter -> kind of layer (``config/layer_kinds.py``). ``TransformerConfig.mla`` makes attention
latent."""

STAGE_END, DEPTH = "|", "/"
_SPARSE = "D"  # Megatron's letter for latent attention with sparse keys
_LETTERS = ("*", _SPARSE, "G", "M", "+", "-", "E")


@dataclass(frozen=True)
class HybridPattern:
    """A parsed pattern."""

    main: str
    """Letters of the layers, with the ends of stages."""
    mtp: str | None = None
    """Letters of one depth of multi-token prediction. None: no multi-token prediction."""
    depths: int = 0
    """Depths of multi-token prediction."""

    @property
    def letters(self) -> str:
        """Letters of the layers."""
        return self.main.replace(STAGE_END, "")

    @property
    def segments(self) -> tuple[str, ...]:
        """Letters of each stage. Without stages in the pattern, one segment."""
        return tuple(self.main.split(STAGE_END))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer."""
        return tuple(KINDS[letter] for letter in self.letters)

    @property
    def depth_kinds(self) -> tuple[str, ...]:
        """Kind of every layer in a depth of multi-token prediction."""
        return tuple(KINDS[letter] for letter in self.mtp or "")

    def counts(self) -> dict[str, int]:
        """Return the number of layers of each letter, layers of all depths included."""
        all_letters = self.letters + (self.mtp or "") * self.depths
        return {letter: all_letters.count(letter) for letter in _LETTERS}


@lru_cache(maxsize=64)  # the kinds of a config's layers are asked for again and again
def parse_hybrid_pattern(pattern: str) -> HybridPattern:
    """Parse a pattern by Megatron-Core's rules.

    Raises:
        ConfigError: If a letter is unknown, the depths differ, or the model would have attention of
            two kinds.
    """
    main, *depths = pattern.split(DEPTH)
    _check_letters(pattern, main, "", may_end_stages=True)
    if not any(depths):
        return HybridPattern(main)
    for number, depth in enumerate(depths[1:], 2):
        if depth != depths[0]:
            raise ConfigError(
                f"layer_pattern {pattern!r} has {depths[0]!r} as depth 1 of multi-token prediction "
                f"and {depth!r} as depth {number}; all depths have equal layers. Write the same "
                "letters behind every /."
            )
    _check_letters(pattern, depths[0], " behind /", may_end_stages=False)
    _check_attention(pattern, main + depths[0])
    return HybridPattern(main, depths[0], len(depths))


def hybrid_pattern(config: TransformerConfig, pattern: str) -> HybridPattern:
    """Return the parsed ``layer_pattern`` of a config whose other options fit.

    Raises:
        ConfigError: If the pattern is wrong, has a layer that this package does not have, or
            contradicts another option.
    """
    parsed = parse_hybrid_pattern(pattern)
    if _SPARSE in pattern:
        raise ConfigError(
            f"layer_pattern {pattern!r} has {_SPARSE}, latent attention with selected keys (sparse "
            "MLA), which this package does not have. Write + for latent attention with all keys."
        )
    if not parsed.letters:
        raise ConfigError(f"layer_pattern {pattern!r} has no layer. Write one letter a layer.")
    number, depths = len(parsed.letters), config.mtp_num_layers
    if config.num_layers not in (0, number):
        raise ConfigError(
            f"layer_pattern {pattern!r} has {number} layers, and num_layers is "
            f"{config.num_layers}. Set num_layers to {number}, or leave it out."
        )
    if depths not in (None, parsed.depths):
        raise ConfigError(
            f"layer_pattern {pattern!r} has {parsed.depths} depths of multi-token prediction, and "
            f"mtp_num_layers is {depths}. Write the letters of each depth behind a /, and leave "
            "mtp_num_layers out."
        )
    if config.norm_placement != "pre":
        raise ConfigError(
            f"layer_pattern {pattern!r} with norm_placement={config.norm_placement}: layers with a "
            "single mixer norm its input. Set norm_placement to pre."
        )
    has_latent = "+" in pattern
    if has_latent is (config.mla is None) and (has_latent or "*" in pattern):
        letter, other = ("+", "*") if has_latent else ("*", "+")
        raise ConfigError(
            f"layer_pattern {pattern!r} has {letter}, and mla is "
            f"{'not set' if config.mla is None else 'set'}. Write {other}, or "
            f"{'set mla' if config.mla is None else 'leave mla out'}."
        )
    return parsed


def refuse_ratios(
    config: TransformerConfig, attention_ratio: float | None, mlp_ratio: float | None
) -> None:
    """Refuse Megatron-Core's deprecated ratios, naming the pattern that they mean.

    Raises:
        ConfigError: If a ratio is set.
    """
    if attention_ratio is None and mlp_ratio is None:
        return
    ratios = (attention_ratio or 0.0, mlp_ratio or 0.0)
    shares = f"hybrid_attention_ratio={ratios[0]} and hybrid_mlp_ratio={ratios[1]}"
    if not config.num_layers:
        raise ConfigError(
            f"{shares} are shares of num_layers, which is not set. Set layer_pattern instead, such "
            "as M-M*-."
        )
    pattern = pattern_from_ratios(config.num_layers, *ratios)
    raise ConfigError(
        f"{shares} are deprecated by Megatron. With {config.num_layers} layers they mean "
        f'layer_pattern: "{pattern}". Set that, and leave both out.'
    )


def _check_letters(pattern: str, letters: str, where: str, *, may_end_stages: bool) -> None:
    for letter in letters:
        if letter not in _LETTERS and not (may_end_stages and letter == STAGE_END):
            reason = "ends a stage" if letter == STAGE_END else "is no layer"
            ends = f", and {STAGE_END} at the ends of stages" if may_end_stages else ""
            raise ConfigError(
                f"layer_pattern {pattern!r} has {letter!r}{where}, which {reason}. Write the "
                f"letters {' '.join(KINDS)}{ends}."
            )
    _check_attention(pattern, letters)


def _check_attention(pattern: str, letters: str) -> None:
    latent = next((letter for letter in ("+", _SPARSE) if letter in letters), None)
    if latent is not None and "*" in letters:
        raise ConfigError(
            f"layer_pattern {pattern!r} has * and {latent}, attention with heads of kv_channels "
            "and latent attention. A model has one of the two. Write one letter for all attention."
        )


def pattern_from_ratios(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the pattern of Megatron-Core's deprecated options ``hybrid_attention_ratio`` and
    ``hybrid_mlp_ratio``.

    Attention layers are spread over the layers, with Mamba-2 at both ends. Feed-forward layers are
    spread over the remaining Mamba-2 layers.

    Raises:
        ConfigError: If a ratio is no share of the layers, or the shares exceed 1.
    """
    ratios = (attention_ratio, mlp_ratio)
    if not all(0.0 <= ratio <= 1.0 for ratio in ratios) or sum(ratios) > 1.0:
        raise ConfigError(
            f"hybrid_attention_ratio={attention_ratio} and hybrid_mlp_ratio={mlp_ratio} are shares "
            "of the layers. Set layer_pattern instead, such as M-M*-."
        )
    num_attention = round(num_layers * attention_ratio)
    gap = (num_layers - num_attention) / (num_attention + 1)
    pattern = _spread("M" * num_layers, "*", gap)
    num_mlp = round(num_layers * mlp_ratio)
    if num_mlp:
        pattern = _spread(pattern, "-", (num_layers - num_attention - num_mlp) / num_mlp)
    return pattern


def _spread(pattern: str, letter: str, gap: float) -> str:
    """Replace an M by ``letter`` after every ``gap`` letters M."""
    letters, num_left = list(pattern), gap
    for index, letter_before in enumerate(letters):
        if letter_before != "M":
            continue
        if num_left < 0.5:
            letters[index] = letter
            num_left += gap
        else:
            num_left -= 1
    return "".join(letters)
