"""Ways in which a module that mixes tokens shares rows, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_lightning.config import ContextMixers
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.exchange import ExchangedMixer
from megatron_lightning.layers.shared_rows.mixers import DividedRows, GatheredMixer, SharedMixer
from megatron_lightning.layers.shared_rows.ring import RingMixer
from megatron_lightning.parallel.shards.patterns import compile_pattern

KINDS: tuple[type[SharedMixer], ...] = (RingMixer, ExchangedMixer, DividedRows, GatheredMixer)
"""The cheapest first."""


def kinds_for(mixers: ContextMixers, path: str) -> Sequence[type[SharedMixer]]:
    """Return the ways to try for a module at ``path`` of a model."""
    if isinstance(mixers, dict):
        chosen = (k for pattern, k in mixers.items() if compile_pattern(pattern).fullmatch(path))
        own = next(chosen, None)
        return [kind for kind in KINDS if own in (None, kind.kind)]
    return [kind for kind in KINDS if mixers == "auto" or kind.divides]


def check_patterns(mixers: ContextMixers, found: Mapping[str, str]) -> None:
    """Check that every pattern of ``mixers`` names a module that mixes tokens.

    Raises:
        ConfigError: If a pattern names none.
    """
    for pattern in mixers if isinstance(mixers, dict) else ():
        if not any(compile_pattern(pattern).fullmatch(path) for path in found):
            listed = ", ".join(f"{path} ({kind})" for path, kind in list(found.items())[:4])
            raise ConfigError(
                f"ContextOptions(mixers=...) has the pattern {pattern!r}, and no module that mixes "
                f"tokens has such a path. There are {listed}. Correct the pattern."
            )
