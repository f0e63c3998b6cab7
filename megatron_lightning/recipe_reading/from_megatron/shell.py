"""The command that a shell script of Megatron-LM runs, found without running anything.

Understood are variables, arrays, ``+=``, ``${X:-default}``, ``$1``, ``$(( ))``, and ``if`` with
tests of text, numbers and files. What could change a variable otherwise is refused with its line. A
value that cannot be read, such as ``$(hostname)``, is refused where the command needs the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.from_megatron.expressions import evaluate
from megatron_lightning.recipe_reading.from_megatron.lexer import (
    ShellError,
    Statement,
    end_of,
    statements,
    words_of,
)

PROGRAM = "pretrain_gpt.py"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"\w+\[.*\]\+?=", re.DOTALL)
_FUNCTION = re.compile(r"[\w-]+ ?\(\)")
_PARAMETER = re.compile(r"(\w+|[@*#])(\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_DECLARES = ("export", "readonly", "local", "declare", "typeset")
_CHANGES = (
    "for", "while", "until", "case", "select", "function", "eval", "read", "mapfile", "readarray",
    "shift", "getopts", "let",
)  # fmt: skip
_LOOPS = ("for", "while", "until", "select")
_PRINTS = ("echo", "printf", "cp", "ls")
_CONNECTORS = ("&&", "||")
_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda left, right: not fnmatchcase(left, right),
    "-eq": lambda left, right: int(left) == int(right),
    "-ne": lambda left, right: int(left) != int(right),
    "-lt": lambda left, right: int(left) < int(right),
    "-le": lambda left, right: int(left) <= int(right),
    "-gt": lambda left, right: int(left) > int(right),
    "-ge": lambda left, right: int(left) >= int(right),
}
_TESTS: Mapping[str, Callable[[str], bool]] = {
    "-z": lambda text: not text,
    "-n": bool,
    "-f": lambda text: Path(text).is_file(),
    "-d": lambda text: Path(text).is_dir(),
    "-e": lambda text: Path(text).exists(),
}


class Command(NamedTuple):
    """How ``pretrain_gpt.py`` is started."""

    launcher: Sequence[str]
    """Words before the program: torchrun and its options."""
    options: Sequence[str]
    """Words behind the program."""


def read_command(script: str, arguments: Sequence[str] = ()) -> Command:
    """Return the command in a script or in a single line.

    Args:
        script: The text. Without the name of a program: options of ``pretrain_gpt.py``.
        arguments: The script's arguments, ``$1`` and so on.

    Raises:
        ShellError: If a line that matters is not understood, or nothing runs ``pretrain_gpt.py``.
    """
    used = re.findall(r"\$\{?(\d)", script)
    reader = _Reader(arguments, num_arguments=max(map(int, used), default=0))
    text = script if "pretrain" in script else f"{PROGRAM} {script}"
    for statement in statements(text):
        reader.take(statement)
    if reader.command is not None:
        return reader.command
    if reader.unread is not None:
        raise reader.unread
    raise ConfigError(f"nothing here runs {PROGRAM}. Give its options, or a script that runs it.")


class _Branch(NamedTuple):
    runs: bool
    done: bool
    """Whether a branch of this ``if`` has run, or none may."""


class _Reader:
    def __init__(self, arguments: Sequence[str], *, num_arguments: int) -> None:
        self._arguments = arguments
        self._num_arguments = num_arguments
        self._variables: dict[str, list[str] | ShellError] = {}
        self._branches = [_Branch(True, True)]
        self._sourced: int | None = None
        self.command: Command | None = None
        self.unread: ShellError | None = None
        """The first command that was not understood."""

    def take(self, statement: Statement) -> None:
        """Follow a statement."""
        line, (keyword, *rest) = statement
        if keyword in ("then", "do"):
            if rest:
                self.take(Statement(line, tuple(rest)))
        elif keyword in _LOOPS and not self._enters(line, keyword, rest):
            self._branches.append(_Branch(False, True))
        elif keyword == "done":
            self._end(line, keyword)
        elif keyword in ("else", "fi", "if", "elif"):
            self._branch(line, keyword, rest)
        elif self._branches[-1].runs and self.command is None:
            self._run(line, [keyword, *rest])

    def _branch(self, line: int, keyword: str, rest: list[str]) -> None:
        if keyword == "if":
            parent = self._branches[-1].runs
            runs = parent and self._holds(line, rest)
            self._branches.append(_Branch(runs, runs or not parent))
            return
        if keyword == "fi":
            self._end(line, keyword)
            return
        if len(self._branches) == 1:
            raise ShellError(line, f"{keyword} without if.")
        done = self._branches.pop().done
        runs = not done and (keyword == "else" or self._holds(line, rest))
        self._branches.append(_Branch(runs, done or runs))
        if keyword == "else" and rest:
            self.take(Statement(line, tuple(rest)))

    def _enters(self, line: int, keyword: str, rest: list[str]) -> bool:
        """Return whether a loop may run once: all but those whose test fails before the first time,
        such as a loop over the script's arguments where there are none.
        """
        runs = self._branches[-1].runs and self.command is None
        return runs and not (
            keyword == "while" and rest[:1] in (["["], ["[["]) and not self._holds(line, rest)
        )

    def _end(self, line: int, keyword: str) -> None:
        if len(self._branches) == 1:
            raise ShellError(line, f"{keyword} without its beginning.")
        self._branches.pop()

    def _run(self, line: int, words: list[str]) -> None:
        """Run commands joined by && and ||, of which only tests can fail."""
        holds, part, joined = True, list[str](), "&&"
        for word in (*words, "&&"):
            if word not in _CONNECTORS:
                part.append(word)
                continue
            if holds == (joined == "&&"):
                holds = self._run_simple(line, part)
            part, joined = [], word

    def _run_simple(self, line: int, words: list[str]) -> bool:
        """Follow a command. Return whether it succeeds."""
        name = words[0] if words else ""
        if name in ("[", "[["):
            return self._holds(line, words)
        if name in _CHANGES or _FUNCTION.match(" ".join(words[:2])):
            raise ShellError(
                line,
                f"{' '.join(words[:4])} … is not understood. Give the options of {PROGRAM} as a "
                "text, or take it out of a copy of the script.",
            )
        if name in ("source", "."):
            self._sourced = line
        elif name == "unset":
            for word in words[1:]:
                self._variables.pop(word, None)
        elif name in _DECLARES:
            for word in words[1:]:
                self._assign(line, word)
        elif name in _PRINTS:
            return True
        elif all(_ASSIGNMENT.fullmatch(word) or _ELEMENT.match(word) for word in words):
            for word in words:
                self._assign(line, word)
        else:
            self._look_for_program(line, words)
        return True

    def _look_for_program(self, line: int, words: list[str]) -> None:
        try:
            fields = [field for word in words for field in self._expand(word, line)]
        except ShellError as error:
            self.unread = self.unread or error
            return
        for index, field in enumerate(fields):
            if PROGRAM in field and len(field.split()) > 1:  # sh -c "torchrun … pretrain_gpt.py …"
                for statement in statements(field):
                    self._run(line, list(statement.words))
                return
            name = Path(field).name
            if name == PROGRAM:
                options = fields[index + 1 :]
                redirections = [i for i, word in enumerate(options) if re.match(r"\d?>", word)]
                end = redirections[0] if redirections else len(options)
                self.command = Command(fields[:index], options[:end])
                return
            if re.fullmatch(r"pretrain_\w+\.py", name):
                self.unread = ShellError(line, f"{name} is run, and {PROGRAM} is read alone.")

    # ------------------------------------------------------------------------------- variables

    def _assign(self, line: int, word: str) -> None:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            if _ELEMENT.match(word):
                raise ShellError(line, f"{word} sets one element, which is not understood.")
            return  # `export NAME`, an option of declare
        name, plus, text = match.groups()
        try:
            value = self._value(text, line)
            if plus:
                old = self._lookup(name, line)
                is_array = text.startswith("(") or len(old) > 1
                value = [*old, *value] if is_array else ["".join([*old, *value])]
        except ShellError as error:
            self._variables[name] = error
            return
        self._variables[name] = value

    def _value(self, text: str, line: int) -> list[str]:
        if text.startswith("("):
            words = words_of(text[1:-1], line)
            return [field for word in words for field in self._expand(word, line)]
        return [" ".join(self._expand(text, line))]

    def _lookup(self, name: str, line: int) -> list[str]:
        """Return the value of a variable or argument. []: it has none."""
        if name in ("@", "*"):
            return list(self._arguments)
        if name == "#":
            return [str(len(self._arguments))]
        if name.isdigit():
            return list(self._arguments[int(name) - 1 : int(name)])
        found = self._variables.get(name)
        if isinstance(found, ShellError):
            raise found
        if found is None and name in os.environ:
            return [os.environ[name]]
        return found or []

    def _required(self, name: str, line: int) -> list[str]:
        """Return a value that has no default in the script."""
        value = self._lookup(name, line)
        if value or name in ("@", "*") or name in self._variables:
            return value
        if name.isdigit():
            words = " ".join(f"ARG{i + 1}" for i in range(self._num_arguments))
            raise ShellError(
                line,
                f"${name} has no value. Write the script's arguments behind its name: recipe "
                f"from-megatron SCRIPT {words}.",
            )
        if self._sourced is not None:
            raise ShellError(
                line,
                f"{name} has no value; line {self._sourced} sources a file that is not read. Set "
                f"it in front of the command: {name}=… megatron-lightning recipe from-megatron.",
            )
        return []

    # ------------------------------------------------------------------------------- expansion

    def _expand(self, word: str, line: int, *, quoted: bool = False) -> list[str]:
        """Return the fields of a word."""
        fields = list[str]()
        open_field: str | None = "" if quoted else None
        position = 0
        while position < len(word):
            char = word[position]
            if char == "'" and not quoted:
                end = word.index("'", position + 1) + 1
                values = [word[position + 1 : end - 1]]
            elif char == '"' and not quoted:
                end = end_of(word, position + 1, '"', line=line)
                values = self._expand(word[position + 1 : end - 1], line, quoted=True)
            elif char == "\\":
                end = position + 2
                values = [word[position + 1 : end].replace("\n", "")]
            elif char == "$":
                values, end = self._parameter(word, position, line, quoted=quoted)
            elif char == "`":
                raise ShellError(line, f"{word} runs a command for its value.")
            else:
                end = position + 1
                values = [char]
            if values:
                *done, open_field = [(open_field or "") + values[0], *values[1:]]
                fields += done
            position = end
        return fields if open_field is None else [*fields, open_field]

    def _parameter(
        self, word: str, position: int, line: int, *, quoted: bool
    ) -> tuple[list[str], int]:
        """Return the values of what begins with $ at ``position``, and the position behind."""
        if word.startswith("$((", position):
            end = end_of(word, position + 2, ")", line=line)
            return [self._arithmetic(word[position + 3 : end - 2], line)], end
        if word.startswith("$(", position):
            raise ShellError(line, f"{word} runs a command for its value. Set the value instead.")
        if word.startswith("${", position):
            end = end_of(word, position + 2, "}", line=line)
            values = self._braced(word[position + 2 : end - 1], line)
        else:
            match = re.compile(r"\d|[@*#]|[A-Za-z_]\w*").match(word, position + 1)
            if match is None:
                return ["$"], position + 1
            end, values = match.end(), self._required(match.group(), line)
        if quoted:
            return values, end
        return [part for value in values for part in value.split()], end

    def _braced(self, text: str, line: int) -> list[str]:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            raise ShellError(line, f"${{{text}}} is not understood.")
        name, _, colon, sign, other = match.groups()
        if sign is None:
            return self._required(name, line)
        value = self._lookup(name, line)
        is_set = any(value) if colon else bool(value)
        if sign == "+":
            return self._expand(other, line) if is_set else []
        if is_set:
            return value
        if sign == "?":
            raise ShellError(line, f"{name} has no value: {other}.")
        return self._expand(other, line)

    def _arithmetic(self, text: str, line: int) -> str:
        plain = " ".join(self._expand(text, line, quoted=True))
        numbers = re.sub(
            r"[A-Za-z_]\w*", lambda name: " ".join(self._lookup(name[0], line)) or "0", plain
        )
        try:
            return str(evaluate(numbers))
        except ConfigError as error:
            raise ShellError(line, str(error)) from None

    # ----------------------------------------------------------------------------------- tests

    def _holds(self, line: int, words: list[str]) -> bool:
        """Return whether a condition of an ``if`` holds."""
        connectors = {word for word in words if word in _CONNECTORS}
        if len(connectors) > 1:
            raise ShellError(line, f"{' '.join(words)} has both && and ||.")
        tests = [list[str]()]
        for word in words:
            if word in _CONNECTORS:
                tests.append([])
            elif word not in ("[", "[[", "]", "]]"):
                tests[-1].append(word)
        if words[0] not in ("[", "[["):
            raise ShellError(line, f"{' '.join(words)} is no test of text, numbers or files.")
        holds = (self._test(line, test) for test in tests)
        return any(holds) if connectors == {"||"} else all(holds)

    def _test(self, line: int, words: list[str]) -> bool:
        if words[:1] == ["!"]:
            return not self._test(line, words[1:])
        values = [" ".join(self._expand(word, line)) for word in words]
        try:
            match values:
                case [name, text] if name in _TESTS:
                    return _TESTS[name](text)
                case [left, comparison, right] if comparison in _COMPARISONS:
                    return _COMPARISONS[comparison](left, right)
                case [text]:
                    return text in _TESTS or bool(text)
        except ValueError:
            pass
        raise ShellError(line, f"the test {' '.join(words)} is not understood.")
