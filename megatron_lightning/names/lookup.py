"""Translate names of Megatron-LM, Megatron Bridge and NeMo, as data and as answers to users.

The tables are parsed at the first question, so that nobody else waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

ALWAYS = "always"
"""A name without an option here, because its effect is always there, or has no meaning."""
CALLBACK = "callback "
"""Before the name of a callback."""
_NOWHERE = "-"
_OPTION = re.compile(r"((trainer|model|data|restarts)\.[\w.]+|seed_everything|ckpt_path|config)$")


class Name(NamedTuple):
    """A name of another library."""

    old: str
    """The name there, without dashes in front."""
    here: str
    """Option, callback, command, class or words. :data:`ALWAYS`. "": not available."""
    value: str = ""
    """Value of the option here. "": the value of the old option."""
    note: str = ""
    """More to know, or why there is no such thing."""
    theme: str = ""
    """Heading of the group of rows."""

    @property
    def is_option(self) -> bool:
        """Whether ``here`` is an option of ``fit``."""
        return _OPTION.match(self.here) is not None

    def answer(self, shown: str) -> str:
        """Return a sentence about the name, written as ``shown``."""
        if not self.here:
            return f"{shown} is not available: {self.note}"
        if self.here == ALWAYS:
            return f"{shown} is not needed{self.note and f': {self.note}'}"
        here = f"the {self.here}" if self.here.startswith(CALLBACK) else self.here
        prefix = "--" if self.is_option else ""
        value = f"={self.value}" if self.value else ""
        return f"{shown} is {prefix}{here}{value} here{self.note and f' ({self.note})'}"

    def cells(self) -> str:
        """Return the name's row in Markdown, without the old name."""
        if not self.here:
            return f"not available: {self.note}"
        if self.here == ALWAYS:
            return self.note or "not needed"
        value = f"={self.value}" if self.value else ""
        note = self.note and f". {self.note[0].upper()}{self.note[1:]}"
        return f"`{self.here.removeprefix(CALLBACK)}{value}`{note}"


def parsed(table: str) -> Iterator[Name]:
    """Yield the rows of a table of ``options`` or ``others``."""
    theme = ""
    for line in table.strip().splitlines():
        if line.startswith("#"):
            theme = line.removeprefix("#").strip()
        elif line:
            old, here, note = [*(cell.strip() for cell in line.split(" | ")), ""][:3]
            path, _, value = here.partition(" = ")
            yield Name(old, "" if path == _NOWHERE else path, value, note, theme)


@cache
def options() -> Mapping[str, Name]:
    """Return the options of ``pretrain_gpt.py`` by name with underscores."""
    from megatron_lightning.names.options import OPTIONS

    return _by_name(OPTIONS)


@cache
def tokenizer_types() -> Mapping[str, Name]:
    """Return Megatron's types of tokenizers."""
    from megatron_lightning.names.others import TOKENIZER_TYPES

    return _by_name(TOKENIZER_TYPES)


def _by_name(table: str) -> Mapping[str, Name]:
    return MappingProxyType({_key(name.old): name for name in parsed(table)})


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def option_named(word: str) -> Name | None:
    """Return the row of an option as typed: ``--lr``, ``--lr=1e-4``, ``optimizer.lr=1e-4``."""
    name = _key(word.partition("=")[0])
    return options().get(name) or options().get(name.rpartition(".")[2])


def answers(words: Sequence[str]) -> str:
    """Return sentences about options of Megatron among the words. "": there are none. Options
    completed by argparse (``--seed``) are left out.
    """
    found = {word.partition("=")[0]: option_named(word) for word in words}
    return "; ".join(
        name.answer(word)
        for word, name in found.items()
        if name is not None and not name.here.startswith(word.removeprefix("--"))
    )


def answer_for_command(command: str) -> str:
    """Translate a command of Megatron, Bridge or NeMo. "": there is none."""
    from megatron_lightning.names.others import COMMANDS

    found = _by_name(COMMANDS).get(_key(command))
    return "" if found is None else found.answer(command)


def answer_for_attribute(name: str) -> str:
    """Translate a class or function of Megatron, Bridge or NeMo. "": there is none."""
    from megatron_lightning.names.others import ATTRIBUTES

    found = _by_name(ATTRIBUTES).get(name)
    return "" if found is None else found.answer(name)


def answer_for_argument(name: str) -> str:
    """Translate an argument of Megatron's configurations or of NeMo's ``MegatronStrategy``. "":
    there is none.
    """
    from megatron_lightning.names.others import ARGUMENTS

    found = _by_name(ARGUMENTS).get(name) or options().get(name)
    return "" if found is None else found.answer(name)


def describe() -> str:
    """Return the tables of ``docs/from_megatron.md``."""
    from megatron_lightning.names.others import ARGUMENTS, ATTRIBUTES, COMMANDS, TOKENIZER_TYPES

    lines = []
    theme = None
    for name in options().values():
        if name.theme != theme:
            theme = name.theme
            lines += ["", f"### {theme}", "", "| there | here |", "|---|---|"]
        lines.append(f"| `--{name.old}` | {name.cells()} |")
    for title, table in (
        ("Commands", COMMANDS),
        ("Types of tokenizers", TOKENIZER_TYPES),
        ("Classes and functions", ATTRIBUTES),
        ("Arguments of NeMo's MegatronStrategy", ARGUMENTS),
    ):
        lines += ["", f"### {title}", "", "| there | here |", "|---|---|"]
        lines += [f"| `{name.old}` | {name.cells()} |" for name in parsed(table)]
    return "\n".join(lines).strip()
