"""Seeds of draws that must not repeat one another."""

from __future__ import annotations

import hashlib


def seed_of(*names: int | str) -> int:
    """Return a seed of 32 bits for what the names tell apart, such as a fit's seed, a place and a
    turn. A generator on the CPU reads no further bits, so that numbers are not put into higher
    ones.
    """
    digest = hashlib.sha256(repr(names).encode()).digest()
    return int.from_bytes(digest[:4], "little")
