"""Versions of peers whose own results are compared with ours."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest


def since(package: str, first: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test with an earlier version of ``package``, such as on the oldest Python."""
    return pytest.mark.skipif(_numbers(version(package)) < _numbers(first), reason=reason)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]
