"""Tensors of a folder that do not fit a model, in words."""

from __future__ import annotations

from collections.abc import Sequence

_LISTED = 5  # names of a kind


def describe_mismatches(
    *, missing: Sequence[str], misshapen: Sequence[str], unexpected: Sequence[str]
) -> str:
    """Return the words for tensors that do not fit. "": all fit."""
    kinds = {"are missing": missing, "have other shapes": misshapen, "are unexpected": unexpected}
    return "; ".join(
        f"{len(names)} tensors {kind} ({', '.join(names[:_LISTED])})"
        for kind, names in kinds.items()
        if names
    )
