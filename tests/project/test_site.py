"""The documentation site: every page is in the navigation, every anchor exists, and the reference
lists what the packages export. ``make docs`` builds it, and stops at warnings."""

from __future__ import annotations

import configparser
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from megatron_lightning.cli import main
from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import PretrainDataModule
from megatron_lightning.modules.language_model import LanguageModule
from megatron_lightning.strategies import MegatronStrategy
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


def test_options_for_users_of_megatron_exist() -> None:
    """The right column names options of the classes, and the commands are parsed."""
    page = (DOCS / "from_megatron.md").read_text()
    kinds: dict[str, Any] = {
        "trainer.strategy": MegatronStrategy,
        "trainer": pl.Trainer,
        "model.config": TransformerConfig,
        "model": LanguageModule,
        "data": PretrainDataModule,
    }
    options = re.findall(r"`((?:trainer|model|data)\.[\w.]+)`", page.partition("## Options")[2])
    assert len(options) >= 45
    for option in options:
        group, _, name = option.rpartition(".")
        assert name in inspect.signature(kinds[group]).parameters, option


@pytest.mark.parametrize("index", [0, 2])
def test_fits_for_users_of_megatron_are_parsed(
    index: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = commands_of((DOCS / "from_megatron.md").read_text())
    assert [command.split()[1] for command in commands] == ["fit", "convert", "fit"]
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    with pytest.raises(SystemExit) as exit_:
        main([*shlex.split(commands[index])[1:], "--print_config"])
    assert not exit_.value.code, capsys.readouterr().err


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


def test_extras_are_listed_with_what_each_is_for() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    table = (DOCS / "public_names.md").read_text().partition("## Extras")[2]
    rows = re.findall(r"^\| `(\w+)` \| .{9,}\|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(setup["options.extras_require"])
