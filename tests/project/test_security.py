"""The lowest versions in ``setup.cfg`` are those of the table in ``SECURITY.md``, or later."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TOOLS = {  # of tests and pages, which read nothing of others
    "hypothesis", "import-linter", "mike", "ml-dtypes", "mkdocs", "mkdocs-material", "mkdocstrings",
    "mypy", "peft", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "types-pyyaml",
}  # fmt: skip
OF_TESTS = ("interop", "interop-apart")
"""Extras of packages that tests compare with: nothing of ours needs them."""


def _clean_from() -> dict[str, Version | None]:
    """Return package -> first release without an advisory. None: no advisory is known."""
    rows = re.findall(
        r"^\| ([a-z][\w, -]*?) \| ?([\d.]*) ?\| (.+) \|$", (ROOT / "SECURITY.md").read_text(), re.M
    )
    clean: dict[str, Version | None] = {}
    for names, version, advisory in rows:
        if names == "package":
            continue
        assert bool(version) != (advisory == "none known"), names
        for name in names.split(", "):
            assert name not in clean
            clean[name] = Version(version) if version else None
    return clean


def _requirements() -> list[Requirement]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    texts = [text for extra, text in extras.items() if extra not in OF_TESTS]
    texts.append(parser["options"]["install_requires"])
    return [Requirement(line) for text in texts for line in text.splitlines() if line]


def test_the_lowest_version_of_every_dependency_is_free_of_advisories() -> None:
    clean, seen = _clean_from(), set()
    for requirement in _requirements():
        name = canonicalize_name(requirement.name)
        if name in TOOLS:
            continue
        seen.add(name)
        assert name in clean, f"{name} has no row in SECURITY.md"
        lowest = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
        first = clean[name]
        assert lowest, f"{requirement} has no lowest version"
        assert first is None or lowest[0] >= first, f"{requirement}, and {first} is clean"
    assert set(clean) == seen


def test_the_versions_of_the_tests_are_free_of_advisories() -> None:
    clean = _clean_from()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line:
            name, _, version = line.partition(";")[0].strip().partition("==")
            first = clean.get(canonicalize_name(name))
            assert first is None or Version(version) >= first, line


def test_lightning_is_the_release_that_calls_nothing_of_a_checkpoint() -> None:
    lightning = next(r for r in _requirements() if r.name == "lightning")
    assert not any(lightning.specifier.contains(f"2.6.{patch}") for patch in range(6))
    assert lightning.specifier.contains("2.6.6")
