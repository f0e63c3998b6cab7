"""Patterns of dotted paths: matching, and the probable meaning of a pattern without a match.

``*`` matches a path segment and ``**`` any number of segments. A part of a segment may be written
out: ``**norm`` matches ``norm`` and ``layers.0.input_norm``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_CUTOFF = 0.75  # of difflib: a wrong letter or a missing segment, not another module


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Turn a dotted pattern into a regular expression. ``**norm`` and ``**.norm`` match a top-level
    ``norm`` too.
    """
    escaped = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)?")
    return re.compile(
        re.sub(r"\\\*\\\*(?=.)", ".*", escaped).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
    )


def describe_unused(patterns: Sequence[str], paths: Collection[str]) -> list[str]:
    """Describe the patterns not used for any of ``paths``. The first matching pattern of a path is
    used.

    Returns:
        A text for each unused pattern: the pattern with the nearest path, or with an earlier
        pattern that matches the same paths.
    """
    compiled = {pattern: compile_pattern(pattern) for pattern in patterns}
    uses: dict[str, str] = {}
    for path in paths:
        matching = [pattern for pattern, regex in compiled.items() if regex.fullmatch(path)]
        for pattern in matching:
            # A pattern that is first for any path is used, even if another pattern precedes for
            # other paths.
            uses[pattern] = pattern if matching[0] == pattern else uses.get(pattern, matching[0])
    texts = []
    for pattern in patterns:
        first = uses.get(pattern)
        if first is None:
            nearest = nearest_pattern(pattern, paths)
            texts.append(repr(pattern) + (f" (did you mean {nearest!r}?)" if nearest else ""))
        elif first != pattern:
            texts.append(f"{pattern!r} ({first!r} precedes it and takes all that it matches)")
    return texts


def nearest_pattern(pattern: str, paths: Collection[str]) -> str | None:
    """Return the most likely meaning of ``pattern``, which matches none of ``paths``.

    The pattern lacks a prefix, or has a superfluous prefix, or a segment is misspelled. None: no
    near path.
    """
    segments = pattern.split(".")
    suffix = re.compile(rf"(?:(.+)\.)?{compile_pattern(pattern).pattern}")
    prefixes = [match[1] for path in paths if (match := suffix.fullmatch(path)) and match[1]]
    if prefixes:
        return f"{_generalized(min(prefixes, key=len))}.{pattern}"
    for start in range(1, len(segments)):
        shorter = ".".join(segments[start:])
        if any(compile_pattern(shorter).fullmatch(path) for path in paths):
            return shorter
    if pattern.startswith("**."):
        # The end of a path: as many segments as the pattern names.
        tail = segments[1:]
        ends = {".".join(_generalized(path).split(".")[-len(tail) :]) for path in paths}
        nearest = get_close_matches(".".join(tail), sorted(ends), n=1, cutoff=_CUTOFF)
        return f"**.{nearest[0]}" if nearest else None
    candidates = {_generalized(path): path for path in sorted(paths, reverse=True)}
    close = get_close_matches(_generalized(pattern), candidates, n=1, cutoff=_CUTOFF)
    if not close:
        return None
    return candidates[close[0]] if _NUMBER.search(pattern) else close[0]


def _generalized(path: str) -> str:
    """Replace the numbers of layers by ``*``."""
    return _NUMBER.sub("*", path)
