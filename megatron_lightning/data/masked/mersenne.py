"""Numbers of C++'s ``std::mt19937`` and ``std::mt19937_64`` in blocks, by NumPy.

``mt19937`` is NumPy's own generator. ``mt19937_64`` follows Nishimura, "Tables of 64-bit Mersenne
Twisters" (2000): a state of 312 words, of which half is computed from the other half at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_WORDS, _HALF = 312, 156
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_BLOCK = 1 << 16


def mt19937(seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers of ``std::mt19937(seed)`` in blocks, without an end."""
    state = np.random.RandomState(seed)
    while True:
        yield state.randint(0, 2**32, size=_BLOCK, dtype=np.uint32).astype(np.int64)


def mt19937_64(seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the numbers of ``std::mt19937_64(seed)`` in blocks, without an end."""
    words = [seed]
    for place in range(1, _WORDS):
        last = words[-1]
        words.append((6364136223846793005 * (last ^ (last >> 62)) + place) % 2**64)
    state = np.array(words, np.uint64)
    while True:
        blocks = []
        for _ in range(_BLOCK // _WORDS):
            _twist(state)
            blocks.append(state.copy())
        yield _tempered(np.concatenate(blocks))


def _twist(state: npt.NDArray[np.uint64]) -> None:
    """Advance the state [312] in place. Each half needs the other half, and the next word."""
    for begin in (0, _HALF):
        end = begin + _HALF
        following = np.append(state[begin + 1 : end], state[end % _WORDS])
        mixed = (state[begin:end] & _UPPER) | (following & _LOWER)
        other_half = state[_HALF - begin : _WORDS - begin]
        state[begin:end] = other_half ^ (mixed >> np.uint64(1)) ^ ((mixed & np.uint64(1)) * _MATRIX)


def _tempered(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    words ^= words >> np.uint64(43)
    return words
