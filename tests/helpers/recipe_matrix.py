"""Parametrization of a test over recipes and layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

Pair = tuple[str, str]


def recipe_matrix(
    scalings: Iterable[str],
    cases: Collection[str],
    *,
    fast: Collection[Pair],
    without: Collection[Pair] = (),
) -> pytest.MarkDecorator:
    """Return the parameters ``scaling`` and ``case`` of all pairs; those that are not fast are
    marked slow.
    """
    pairs = [(scaling, case) for scaling in scalings for case in cases]
    return pytest.mark.parametrize(
        ("scaling", "case"),
        [
            pytest.param(*pair, marks=[] if pair in fast else [pytest.mark.slow])
            for pair in pairs
            if pair not in without
        ],
    )
