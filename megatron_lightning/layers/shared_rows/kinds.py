"""Ways in which a module that mixes tokens shares rows, in the order in which they are tried."""

from __future__ import annotations

from megatron_lightning.layers.shared_rows.exchange import ExchangedMixer
from megatron_lightning.layers.shared_rows.mixers import DividedRows, GatheredMixer, SharedMixer
from megatron_lightning.layers.shared_rows.ring import RingMixer

KINDS: tuple[type[SharedMixer], ...] = (RingMixer, ExchangedMixer, DividedRows, GatheredMixer)
"""The cheapest first."""
