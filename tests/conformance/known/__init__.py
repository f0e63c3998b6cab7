"""What is known to fail in each mode, and why: ``<mode>.toml``, tables ``[[known]]`` of a class, a reason and tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class KnownFailures:
    """Tests that fail for a reason that has been looked at; a name without ``[…]`` stands for all of its parameters."""

    classes: Mapping[str, str]
    """test -> class of its reason."""

    @classmethod
    def of(cls, mode: str) -> KnownFailures:
        """Read what is known of ``mode``."""
        path = Path(__file__).with_name(f"{mode.partition('-')[0]}.toml")
        tables = tomllib.loads(path.read_text())["known"] if path.exists() else []
        return cls({test: table["class"] for table in tables for test in table["tests"]})

    def __contains__(self, test: str) -> bool:
        return test in self.classes or test.partition("[")[0] in self.classes

    def class_of(self, test: str) -> str:
        """Return the class of a known failure."""
        return self.classes.get(test) or self.classes[test.partition("[")[0]]
