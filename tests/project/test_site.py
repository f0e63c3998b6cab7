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
import transformers
import yaml

from megatron_lightning.cli import main
from megatron_lightning.config import (
    CheckpointOptions,
    DataParallelOptions,
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.modules import (
    FinetuneDataModule,
    HuggingFaceModule,
)
from megatron_lightning.modules.language_model import LanguageModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.chats import make_tokenizer, turn, write_rows
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


def test_no_link_leaves_the_site() -> None:
    """``mkdocs build`` stops at a link to a file outside of ``docs``."""
    for page in PAGES:
        for link in re.findall(r"\]\((\.\.?/[^)#]*)", page.read_text()):
            assert (page.parent / link).resolve().is_relative_to(DOCS.resolve()), (page.name, link)


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
    """The README's commands are tried by the programs that would run them, and scripts for
    clusters by ``test_cluster_examples``.
    """
    elsewhere = ("--index-url", "bash examples/cluster/")
    for page in (DOCS / "tutorial").glob("*.md"):
        for command in commands_of(page.read_text()):
            is_tried = command in COMMANDS or any(words in command for words in elsewhere)
            assert is_tried, f"{page.name}: {command}"


@pytest.mark.parametrize(
    ("page", "module", "data"),
    [
        ("from_trl.md", HuggingFaceModule, FinetuneDataModule),
        ("from_axolotl.md", HuggingFaceModule, FinetuneDataModule),
    ],
)
def test_options_for_users_of_others_exist(page: str, module: type, data: type) -> None:
    """The right column names options of the classes, and the commands are parsed."""
    kinds: dict[str, tuple[type, ...]] = {
        "trainer.strategy": (MegatronStrategy,),
        "trainer": (pl.Trainer,),
        "model.config": (TransformerConfig,),
        "model": (LanguageModule, module),
        "data": (data,),
    }
    text = re.split(r"## (?:Options|Keys)", (DOCS / page).read_text())[1]
    options = re.findall(r"`((?:trainer|model|data)\.[\w.]+)`", text)
    assert len(options) >= 40
    for option in options:
        group, _, name = option.rpartition(".")
        assert any(name in inspect.signature(kind).parameters for kind in kinds[group]), option


def test_arguments_for_users_of_nemo_exist() -> None:
    page = (DOCS / "from_nemo.md").read_text()
    table = page.partition("## Strategy")[2].partition("## Classes")[0]
    names = {
        name
        for kind in (MegatronStrategy, PipelineOptions, DataParallelOptions, CheckpointOptions)
        for name in inspect.signature(kind).parameters
    }
    names |= {"global_batch_size", "batch_size_schedule"}  # of the data module
    names |= {"strict_loading", "init_from_hf", "precision", "plugins", "fsdp", "zero1", "ddp"}
    for row in re.findall(r"^\| `.*\|$", table, re.MULTILINE):
        theirs, ours = row.strip("| ").split(" | ")
        equal = "the same" in ours and "the same in `" not in ours
        for name in re.findall(r"`([a-z_]+)`", theirs if equal else ours):
            assert name in names or name in ("raise", "skip"), name


def test_the_file_for_users_of_axolotl_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = blocks((DOCS / "from_axolotl.md").read_text(), "yaml")
    (tmp_path / "train.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(tmp_path / "train.yaml"), "--print_config"])
    assert not exit_.value.code, capsys.readouterr().err


@pytest.mark.slow
def test_the_file_for_users_of_axolotl_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = blocks((DOCS / "from_axolotl.md").read_text(), "yaml")
    row = {"messages": [turn("user", "what is blue"), turn("assistant", "the sky")]}
    (tmp_path / "demo").mkdir()
    write_rows(tmp_path / "demo" / "chats.jsonl", [row] * 200)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path / "demo" / "chat_model")
    make_tokenizer().save_pretrained(tmp_path / "demo" / "chat_model")
    (tmp_path / "train.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    small = ["--trainer.devices=1", "--trainer.strategy.tensor_model_parallel_size=1"]
    small += ["--trainer.max_epochs=1", "--trainer.logger=false", "--data.cache_dir=cache"]
    main(["fit", "--config", "train.yaml", *small])
    assert (tmp_path / "demo" / "axolotl" / "last.ckpt" / "manifest.json").exists()


@pytest.mark.parametrize("index", [0, 4])
def test_fits_for_users_of_megatron_are_parsed(
    index: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = commands_of((DOCS / "from_megatron.md").read_text())
    tools = ["fit", "recipe", "plan", "convert", "fit"]
    assert [command.split()[1] for command in commands] == tools
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
    rows = re.findall(r"^\| `([\w-]+)` \| .{9,}\|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(setup["options.extras_require"])
