"""The command line's parser: every error is a single line with the nearest valid option, or with
the setting to change.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from typing_extensions import override

from megatron_lightning.config.left_out import LEFT_OUT
from megatron_lightning.errors import ConfigError
from megatron_lightning.names.lookup import answer_for_argument, answers, tokenizer_types
from megatron_lightning.recipe_reading.recipe_files import with_recipes

TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_TYPES = ("<class '", "typing.")
COMMANDS = (
    *TRAINER_COMMANDS, "preprocess", "data", "generate", "evaluate", "serve", "checkpoint",
    "adapters", "convert", "verify-card", "schedule", "plan", "recipe", "doctor",
)  # fmt: skip
_OPTIONS_OF_A_CLASS = (
    ". Options go with the name of a class, as in --trainer.strategy=MegatronStrategy. In YAML: "
    "strategy: {class_path: MegatronStrategy, init_args: {...}}."
)
_OF_A_MODULE = ". Name the class with its module, such as torch.optim.SGD."
_OPTIMIZER = re.compile(r"--model(\.\w+)*\.optimizer")
_TOKENIZER_TYPE = re.compile(r"--([\w.]+\.)?tokenizer[-_]type")
_MISSING_NAME = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NO_FP8 = ". FP8 layers are not available; set --trainer.precision=bf16-mixed or bf16-true."


class OneLineParser(ArgumentParser):
    """Parser with single-line errors. An error names the nearest valid option.

    jsonargparse makes parsers for the options of a class, of the same type as the calling parser.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.parsers: list[ArgumentParser] = [self]
        """This parser and the parsers of subcommands, searched for the closest valid option."""
        self.strategy_options: Collection[str] = ()
        """Options of the strategy. Users may give the options to the Trainer by mistake."""

    @override
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **settings: Any
    ) -> Any:
        """Parse ``args``. See jsonargparse."""
        args = with_recipes(sys.argv[1:] if args is None else args)
        if self.strategy_options:  # `fit`, which would complete --lr to --lr_scheduler
            self._check_names(args)
        args = _with_tokenizer_types(args)
        args = [_yaml_of_python(args[0])] if len(args) == 1 else _with_class_paths(args)
        return super().parse_args(args, *rest, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error. jsonargparse catches the error and calls this method again. The message
        then has the hint.
        """
        name = hint = ""
        # A key of a file or of a class: "Group 'model' does not accept option 'layers'".
        if isinstance(ex, KeyError):
            *group, name = message.split("'")[1::2]
            name = ".".join([*(part for part in group if part not in COMMANDS), name])
        elif ex is None:  # "unrecognized arguments: --trainr.max_steps=3 --fast"
            name = next(
                (word[2:].partition("=")[0] for word in message.split() if word.startswith("--")),
                "",
            )
        words = message.removeprefix(_UNRECOGNIZED).split() if ex is None else []
        if answer := answers(words) or (name and answer_for_argument(name.rpartition(".")[2])):
            hint = f". {answer}"
        elif name:
            hint = self._hint_of_strategy(name) or suggestion(name, self._options())
        elif ex is None and message.startswith(_UNRECOGNIZED) and "checkpoint" in self._options():
            # "serve FOLDER", as with other servers
            hint = f". Did you mean --checkpoint {message.removeprefix(_UNRECOGNIZED).split()[0]}?"
        line = in_one_line(message)
        super().error(line + (hint or _why_left_out(line)), ex)

    def _check_names(self, args: Sequence[str]) -> None:
        """Answer options of Megatron, all of them in one error.

        Raises:
            ConfigError: If there is one that is no option here.
        """
        words = [
            word
            for word in args
            if word.startswith("--") and "." not in word.partition("=")[0] and word != "--config"
        ]
        own = {word for word in words if word[2:].partition("=")[0] in self._options()}
        if answer := answers([word for word in words if word not in own]):
            raise ConfigError(f"{answer}.")

    def _options(self) -> set[str]:
        return set().union(*(parser.get_defaults().keys() for parser in self.parsers))

    def _hint_of_strategy(self, name: str) -> str:
        """Return how to set an option of the strategy, if a user gave the option to the Trainer.
        "": not an option of the strategy.
        """
        group, _, option = name.rpartition(".")
        near = get_close_matches(option, self.strategy_options, n=1, cutoff=0.8)
        if group not in ("", "trainer") or not near:
            return ""
        return (
            f". {near[0]} is an option of the strategy: set --trainer.strategy=MegatronStrategy "
            f"--trainer.strategy.{near[0]}=..."
        )


def suggestion(name: str, names: Collection[str]) -> str:
    """Return a question for the nearest of ``names``, possibly dotted paths. "" without a near
    name.
    """
    nearest: list[str] = []
    for part in name.split("."):
        prefix = "".join(f"{group}." for group in nearest)
        valid = {
            key.removeprefix(prefix).partition(".")[0] for key in names if key.startswith(prefix)
        }
        nearest.append(
            part if part in valid else next(iter(get_close_matches(part, valid, n=1)), part)
        )
    path = ".".join(nearest)
    return f". Did you mean {path!r}?" if path != name else ""


_UNRECOGNIZED = "unrecognized arguments: "
_OF_A_TREE = ("Errors:", "Subtypes:", "Given value", "Parser key", "Problem with")


def in_one_line(message: str) -> str:
    """Return the key and the most specific words of a message of jsonargparse.

    For a Union the message is an indented tree with a branch for each type. The deepest lines of
    the tree are the most specific.
    """
    if "Errors:" not in map(str.strip, message.splitlines()):
        return " ".join(message.split())
    lines = _with_whole_sentences(message.splitlines())
    depths = [len(line) - len(line.lstrip(" ")) for line in lines]
    deepest = [index for index, depth in enumerate(depths) if depth == max(depths)]
    words = [line.strip(" -") for line in lines]
    if any("typing.Literal" in words[index] for index in deepest):  # a name, not a class
        deepest = [index for index in deepest if "dot import path" not in words[index]]
    key = f"{lines[0]} " if lines[0].endswith(":") else ""
    first = next(
        (index for index in deepest if not any(kind in words[index] for kind in _TYPES)), None
    )
    inner = [words[index] for index in deepest if words[index].startswith("Parser key")]
    if inner:  # the message of a nested group, already a single line
        return f"{key}{_plain(inner[0])}"
    if first is None:
        expectation = " or ".join(
            words[index].removeprefix("Expected").removeprefix(" a ").strip() for index in deepest
        )
        value = words[-1].rpartition(": ")[2]
        no_fp8 = _NO_FP8 if '"trainer.precision"' in key and "fp8" in value.lower() else ""
        return f"{key}expected {_plain(expectation)}; got {value}{no_fp8}"
    of_class = (
        f"{words[first - 1]} "
        if words[first - 1].startswith("Problem with given class_path")
        else ""
    )
    return f"{key}{of_class}{words[first]}{_hint(key, words[first])}"


def _with_whole_sentences(lines: list[str]) -> list[str]:
    """Return the lines of a tree with the further lines of an error appended to the first line.

    A branch begins with a dash. The further lines of a branch's text are two columns deeper, as are
    the lines of a tree inside the branch. Lines of a tree begin after a colon or with words of
    jsonargparse.
    """
    joined: list[str] = []
    depth = -1  # of the text of the branch that is open
    for line in lines:
        text = line.strip()
        own_depth = len(line) - len(line.lstrip(" "))
        if text.startswith("- "):
            depth = -1 if text.endswith(":") else own_depth + 2
        elif own_depth == depth and text and not text.startswith(_OF_A_TREE):
            joined[-1] += f" {text}"
            continue
        else:
            depth = -1
        joined.append(line)
    return joined


def _yaml_of_python(argument: str) -> str:
    """Return "--key=value" with the value in YAML.

    jsonargparse reads an option of an object in an object (--model.config.moe=null), and hands the
    option to the parser of the inner object in Python's notation ("--config.moe=None").
    """
    name, _, text = argument.partition("=")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return argument
    return f"{name}={json.dumps(value)}" if isinstance(value, dict | list | None) else argument


def _with_class_paths(args: Sequence[str]) -> list[str]:
    """Return the arguments with the class of an optimizer as a mapping, if there are options of the
    optimizer, too.

    ``--model.optimizer=torch.optim.SGD --model.optimizer.lr=0.1``: jsonargparse merges options into
    a mapping, and would lose a name.
    """
    result: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if not (_OPTIMIZER.fullmatch(name) and any(w.startswith(f"{name}.") for w in args)):
            result.append(word)
            continue
        value = value if equals else next(words, "")
        is_name = value.replace(".", "").isidentifier()
        result.append(f"{name}={json.dumps({'class_path': value}) if is_name else value}")
    return result


def _with_tokenizer_types(args: Sequence[str]) -> list[str]:
    """Return the arguments with Megatron's types of tokenizers in our names."""
    result: list[str] = []
    is_type = False
    for word in args:
        name, equals, value = word.partition("=")
        named = _TOKENIZER_TYPE.fullmatch(name) is not None
        kind = tokenizer_types().get(word if is_type else value) if is_type or named else None
        prefix = "" if is_type else f"{name}="
        result.append(word if kind is None else f"{prefix}{kind.here}")
        is_type = named and not equals
    return result


def _why_left_out(line: str) -> str:
    """Return why a value is not among an option's choices, and the setting to change. "": ``line``
    already says so, or no reason is known.
    """
    key, _, value = line.replace("Got value:", "got").rpartition(" got ")
    names = re.findall(r'Parser key "(?:[\w.]*\.)?(\w+)"', key)
    words = re.findall(r"\w+", value) if names else []
    if names and names[-1] == "tokenizer_type":
        kinds = [
            tokenizer_types()[word].answer(word) for word in words if word in tokenizer_types()
        ]
        return "".join(f". {kind}" for kind in kinds)
    reasons = [LEFT_OUT.get((names[-1], word), "") for word in words]
    return next((f". {reason}" for reason in reasons if reason and reason not in line), "")


def _plain(types: str) -> str:
    """Return the names of types in the user's notation."""
    types = types.replace("Expected a ", "expected ").replace(". Got value:", "; got")
    types = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", types)
    types = types.replace("<class 'NoneType'>", "null").replace("collections.abc.Sequence", "list")
    return types.replace("<class '", "").replace("'>", "")


def _hint(key: str, problem: str) -> str:
    """Return the setting to change for a problem with an unclear message."""
    needs_class = "dot import path" in problem or "Strategy is abstract" in problem
    if '"trainer.strategy"' in key and needs_class:
        return _OPTIONS_OF_A_CLASS
    if missing := _MISSING_NAME.search(problem):
        module, name = missing.groups()
        near = get_close_matches(name, dir(sys.modules.get(module)), n=1)
        return f". Did you mean {module}.{near[0]}?" if near else ""
    return _OF_A_MODULE if "dot import path" in problem else ""
