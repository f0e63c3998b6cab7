"""The documentation site: every page is in the navigation, every anchor exists, and the reference
lists what the packages export. ``make docs`` builds it, and stops at warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.test_readme import COMMANDS, ROOT, blocks, commands_of

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
        return
    for child in node.values() if isinstance(node, dict) else node:
        yield from _leaves(child)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(_leaves(site["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_anchors_lead_to_headings() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            target = page.parent / link if link else page
            assert anchor in _anchors(target), f"{page.name}: {link}#{anchor}"


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda p: p.stem)
def test_the_reference_lists_what_a_package_exports(page: Path) -> None:
    names = re.findall(r"^::: (.*)$", page.read_text(), flags=re.MULTILINE)
    package = import_module(f"megatron_lightning.{page.stem}") if names else None
    if exported := getattr(package, "__all__", ()):
        assert sorted(names) == sorted(f"megatron_lightning.{page.stem}.{n}" for n in exported)


def test_commands_of_the_tutorial_are_those_of_the_readme() -> None:
    """The README's commands are tried by the programs that would run them."""
    for page in (DOCS / "tutorial").glob("*.md"):
        for command in commands_of(page.read_text()):
            assert command in COMMANDS or "--index-url" in command, f"{page.name}: {command}"


def test_the_first_module_is_described() -> None:
    module, training, describe = blocks(
        (DOCS / "tutorial" / "first_module.md").read_text(), "python"
    )
    names: dict[str, Any] = {"__name__": "copied"}
    exec(module, names)
    kept = [line for line in training.splitlines() if not line.startswith("trainer")]
    exec("\n".join(kept), names)
    described = eval(describe.strip().removeprefix("print(").removesuffix(")"), names)
    assert "net.0" in described
    assert names["data"].batch_size == 64
