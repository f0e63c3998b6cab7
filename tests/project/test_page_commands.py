"""Commands of the pages are parsed by the programs that would run them. A fit also makes Trainer,
strategy, module and data, and runs nothing."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_lightning import cli
from tests.project.test_readme import COMMANDS, ROOT, blocks, commands_of, fit_options

OTHERS = ("python", "pip", "bash", "sbatch", "export", "torchrun", "srun")
"""Programs of others. What they start of ours is parsed."""


_HUB_TOKENIZERS = ("bert", "t5")
"""Recipes with a tokenizer of the Hub, which the data module reads when it is made."""


class _ParsedError(Exception):
    """The options are those of the function."""


def _parsed(*_: object) -> NoReturn:
    raise _ParsedError


def _commands() -> list[str]:
    """Return every command of the pages that the README does not have, without its starter."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for command in commands_of(page.read_text()):
            own = re.search(r"megatron[-_]lightning (?=fit|predict|doctor|plan)", command)
            if command in COMMANDS or not command:
                continue
            if own:
                found.append(f"megatron-lightning {command[own.end() :]}")
            else:
                assert command.startswith(("megatron-lightning ", *OTHERS)), (page.name, command)
                if not command.startswith(OTHERS):
                    found.append(command)
    return list(dict.fromkeys(found))


def _words(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def _files(words: list[str]) -> list[str]:
    """Return the configuration files that a command names."""
    return [after for word, after in itertools.pairwise(words) if word == "--config"]


FITS = [
    command
    for command in _commands()
    if _words(command)[0] in ("fit", "predict", "validate")
    and all((ROOT / file).is_file() for file in _files(_words(command)))
]
TOOLS = [
    command for command in _commands() if _words(command)[0] not in ("fit", "predict", "validate")
]


def _lines(page: Path) -> list[str]:
    """Return the commands of a page's blocks for a shell, comments left out."""
    text = "\n".join(blocks(page.read_text(), "(?:bash|sh|shell)"))
    lines = re.sub(r" \\\n *", " ", text).splitlines()
    return [line for line in (line.partition(" #")[0].strip() for line in lines) if line]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "docs"]
)
def test_each_line_of_a_shell_block_is_one_command(page: str) -> None:
    """A block whose lines were joined would run its first command with the others as arguments."""
    pages = sorted((ROOT / page).rglob("*.md")) if page == "docs" else [ROOT / page]
    programs = {"make", "git", "pip", "python", "export", "torchrun", "srun", "openssl"}
    programs |= {"bash", "sbatch"}
    programs |= {"megatron-lightning", "mkdocs", "pre-commit", "docker", "sky", "ray", "curl", "cd"}
    for line in itertools.chain.from_iterable(map(_lines, pages)):
        if line.startswith("#"):
            continue
        words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_0-9]+=.*", word)]
        first, *others = words
        assert first in programs, line
        assert first != "make" or len([w for w in others if "=" not in w]) == 1, line
        assert "make" not in others, line


def test_all_pages_are_read() -> None:
    assert len(FITS) >= 14 and len(TOOLS) >= 30


@pytest.mark.parametrize("command", TOOLS)
def test_a_tool_takes_the_options(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "_arguments", _parsed)
    with pytest.raises(_ParsedError):
        cli.main(_words(command))


@pytest.mark.spread(1)
@pytest.mark.parametrize("command", FITS)
def test_a_fit_takes_the_options(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    with pytest.raises(SystemExit) as exit_:
        cli.main([*_words(command), "--print_config"])
    assert not exit_.value.code, capsys.readouterr().err
    if not any(f"configs/{name}.yaml" in command for name in _HUB_TOKENIZERS):
        cli.trainer_cli(_without_a_machine(_words(command)[1:]), run=False)


@pytest.mark.spread(4)
@pytest.mark.parametrize("options", fit_options(), ids=" ".join)
def test_a_fit_of_the_readme_makes_its_objects(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that contradict each other are found by the objects, not by the parser."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    if any(f"configs/{name}.yaml" in options for name in _HUB_TOKENIZERS):
        pytest.skip("needs the tokenizer of the Hub")
    cli.trainer_cli(_without_a_machine(options), run=False)


def _without_a_machine(options: list[str]) -> list[str]:
    """Return the options on CPUs, and without files of earlier commands and of the run."""
    run = [("--ckpt_path", after) for word, after in itertools.pairwise(options) if "ckpt" in word]
    left_out = {*itertools.chain(*run)}
    kept = [
        word.replace("devices=auto", "devices=16")
        for word in options
        if word not in left_out and not word.startswith(("--ckpt_path", "--print", "--return"))
    ]
    named = ("configs/tiny_cpu.yaml", "configs/tiny_moe_cpu.yaml", "configs/tiny_hybrid_cpu.yaml")
    tokenizer = ["--data.tokenizer_type=bytes"] if {*named} & {*options} else []
    return [*kept, *tokenizer, "--trainer.accelerator=cpu"]
