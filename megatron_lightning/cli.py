"""The command line: ``megatron-lightning
fit|validate|test|predict|preprocess|generate|checkpoint|schedule``.

Signatures and their docstrings define the options; jsonargparse parses them. The Trainer's commands
are LightningCLI's. A wrong setting ends in one line on stderr, which names the nearest valid
option, and exit code 2; any other error keeps its traceback.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import docstring_parser
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

import megatron_lightning
from megatron_lightning.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

_TRACEBACK_VARIABLE = "MEGATRON_LIGHTNING_TRACEBACK"
_TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_COMMANDS = (*_TRAINER_COMMANDS, "preprocess", "generate", "checkpoint", "schedule")
_TYPES = ("<class '", "typing.")
_OPTIONS_OF_A_CLASS = (
    ". Options go with the name of a class, as in --trainer.strategy=MegatronStrategy."
)
_USAGE = """usage: megatron-lightning COMMAND [options]

  fit         train a model
  validate    run the validation loop
  test        run the test loop
  predict     run the prediction loop
  preprocess  tokenize text into indexed files
  generate    continue prompts with a trained model
  checkpoint  inspect, verify, reshard, consolidate, average or prune checkpoints
  schedule    show a pipeline schedule: table, bubble, memory; --output DIR: picture

megatron-lightning COMMAND --help lists the options of a command; --version prints the version.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: The command and its options; None: those of this process.

    Raises:
        SystemExit: With code 2 for a wrong setting, input or checkpoint. The traceback is shown if
            the environment variable ``MEGATRON_LIGHTNING_TRACEBACK`` is set. With code 130 after
            Ctrl-C.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    arguments = list(sys.argv[1:] if args is None else args)
    # An installed command lacks what `python -m` has: modules that lie here.
    if args is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"megatron-lightning {megatron_lightning.__version__}")
        return
    try:
        if arguments[0] in _TRAINER_COMMANDS:
            trainer_cli(args)
        else:
            _run(arguments[0], arguments[1:])
    except Exception as error:
        if not _names_a_setting(error) or os.environ.get(_TRACEBACK_VARIABLE):
            raise
        if all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
            print(
                f"megatron-lightning: error: {_in_one_line(str(error))}",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as a shell reports it, without a traceback


def trainer_cli(args: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Run ``fit``, ``validate``, ``test`` or ``predict`` with any LightningModule and
    LightningDataModule.

    Models and data that are not named by a ``class_path`` are :class:`GPTLightningModule` and
    :class:`PretrainDataModule`.

    Args:
        args: The command and its options; None: those of this process.
        run: Whether to run; False only makes the objects, and ``args`` has no command.
    """
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from megatron_lightning.optim import ScheduledLR

    import_module("megatron_lightning.strategies.megatron")  # registers the name "megatron"
    import_module("megatron_lightning.modules.gpt")
    import_module("megatron_lightning.modules.pretrain_data")
    defaults = {
        "model": {"class_path": "megatron_lightning.modules.GPTLightningModule"},
        "data": {"class_path": "megatron_lightning.modules.PretrainDataModule"},
    }

    class Parser(OneLineParser, LightningArgumentParser):
        pass

    class MegatronCLI(LightningCLI):
        parser: Parser

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults(defaults)
            self.parser.parsers.append(parser)

        @staticmethod
        def configure_optimizers(
            lightning_module: LightningModule, optimizer: Any, lr_scheduler: Any = None
        ) -> Any:
            if isinstance(lr_scheduler, ScheduledLR):  # Lightning would step it once an epoch
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"},
                }
            return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    return MegatronCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},  # a resumed run writes to the same folder
        parser_class=Parser,
        parser_kwargs={"exit_on_error": False, "prog": "megatron-lightning"},
        args=None if args is None else list(args),
        run=run,
    )


class OneLineParser(ArgumentParser):
    """Parser whose errors are one line and name the nearest valid option.

    The parsers that jsonargparse makes for the options of a class are of the same type as the
    parser that needs them.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.parsers: list[ArgumentParser] = [self]
        """This parser and those of its subcommands, among whose options a wrong one has its
        nearest."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error."""
        name = suggestion = ""
        # A key of a file or of a class: "Group 'model' does not accept option 'layers'".
        if isinstance(ex, KeyError):
            *group, name = message.split("'")[1::2]
            name = ".".join([*(part for part in group if part not in _COMMANDS), name])
        elif ex is None:  # "unrecognized arguments: --trainr.max_steps=3 --fast"
            name = next(
                (word[2:].partition("=")[0] for word in message.split() if word.startswith("--")),
                "",
            )
        if name:
            suggestion = _suggestion(
                name, set().union(*(parser.get_defaults().keys() for parser in self.parsers))
            )
        super().error(_in_one_line(message) + suggestion, ex)


def _suggestion(name: str, names: Collection[str]) -> str:
    """Return a question for the nearest of ``names``, which may be dotted paths; "" if there is
    none.
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
    found = ".".join(nearest)
    return f". Did you mean {found!r}?" if found != name else ""


def _in_one_line(message: str) -> str:
    """Return the key and the most specific words of a message of jsonargparse.

    For a Union the message is an indented tree with a branch for each type, of which the deepest
    lines are the most specific.
    """
    lines = message.splitlines()
    if "Errors:" not in map(str.strip, lines):
        return " ".join(message.split())
    depths = [len(line) - len(line.lstrip(" ")) for line in lines]
    deepest = [index for index, depth in enumerate(depths) if depth == max(depths)]
    words = [line.strip(" -") for line in lines]
    key = f"{lines[0]} " if lines[0].endswith(":") else ""
    first = next(
        (index for index in deepest if not any(kind in words[index] for kind in _TYPES)), None
    )
    if first is None:
        expected = " or ".join(
            words[index].removeprefix("Expected").removeprefix(" a ").strip() for index in deepest
        )
        plain = (
            expected.replace("<class 'NoneType'>", "null").replace("<class '", "").replace("'>", "")
        )
        return f"{key}expected {plain}; got {words[-1].rpartition(': ')[2]}"
    of_class = (
        f"{words[first - 1]} "
        if words[first - 1].startswith("Problem with given class_path")
        else ""
    )
    hint = (
        _OPTIONS_OF_A_CLASS
        if '"trainer.strategy"' in key and "dot import path" in words[first]
        else ""
    )
    return f"{key}{of_class}{words[first]}{hint}"


def _run(command: str, options: list[str]) -> None:
    if command == "preprocess":
        from megatron_lightning.data.preprocess import preprocess

        _call(preprocess, command, options)
    elif command == "generate":
        from megatron_lightning.inference.generate import generate

        for text in _call(generate, command, options):
            print(text)
    elif command == "schedule":
        from megatron_lightning.pipeline.report import describe_schedule

        print(_call(describe_schedule, command, options))
    elif command == "checkpoint":
        from megatron_lightning.checkpoint.commands import COMMANDS

        _use_tool(COMMANDS, options)
    else:
        nearest = _suggestion(command, _COMMANDS)
        raise ConfigError(
            f"there is no command {command!r}{nearest or '.'} `megatron-lightning --help` lists "
            "the commands."
        )


def _use_tool(tools: Mapping[str, Callable[..., None]], options: Sequence[str]) -> None:
    tool = options[0] if options else None
    if tool is None:
        raise ConfigError(
            f"checkpoint needs a tool: {', '.join(tools)}. Add --help for their descriptions."
        )
    if tool in ("-h", "--help"):
        print("usage: megatron-lightning checkpoint [-h] TOOL [options]\n")
        for name, function in tools.items():
            print(
                f"  {name:<12} "
                f"{docstring_parser.parse(inspect.getdoc(function) or '').short_description}"
            )
        raise SystemExit(0)
    if tool not in tools:
        nearest = _suggestion(tool, tools)
        raise ConfigError(
            f"there is no tool {tool!r}{nearest or '.'} The tools are {', '.join(tools)}."
        )
    try:
        _call(tools[tool], f"checkpoint {tool}", options[1:], required_as_positional=True)
    except OSError as error:  # a folder that may not be written, a disk that is full
        raise CheckpointError(str(error)) from error


def _call(
    function: Callable[..., Any],
    command: str,
    options: Sequence[str],
    *,
    required_as_positional: bool = False,
) -> Any:
    parser = OneLineParser(prog=f"megatron-lightning {command}", exit_on_error=False)
    parser.add_argument("--config", action="config", help="Path to a configuration file.")
    _add_options(parser, function, required_as_positional)
    return function(**_arguments(function, parser.parse_args(_underscored(options))))


def _add_options(
    parser: ArgumentParser, function: Callable[..., Any], required_as_positional: bool
) -> None:
    """Add the parameters of ``function``; a list takes several words, and a bool needs no value."""
    documented = docstring_parser.parse(inspect.getdoc(function) or "")
    described = {param.arg_name: param.description for param in documented.params}
    parser.description = documented.short_description
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        settings: dict[str, Any] = {"type": hints[name]}
        if element := _element_of_list(hints[name]):
            settings = {"type": list[element] | element, "nargs": "+"}  # type: ignore[valid-type]
            default = [default] if isinstance(default, str) else default and list(default)
        elif hints[name] is bool:  # where there are positions, the next word is one
            settings = (
                {"action": "store_true"}
                if required_as_positional
                else {"type": bool, "nargs": "?", "const": True}
            )
        positional = required and required_as_positional
        if not positional:
            settings |= {"required": True} if required else {"default": default}
        parser.add_argument(name if positional else f"--{name}", help=described[name], **settings)


def _arguments(function: Callable[..., Any], settings: Namespace) -> dict[str, Any]:
    arguments = {}
    for name, hint in typing.get_type_hints(function).items():
        value = settings.get(name)
        if value is not None and _element_of_list(hint):
            # A word may be "[a, b]".
            value = [
                item for word in value for item in (word if isinstance(word, list) else [word])
            ]
            takes_one = isinstance(hint, types.UnionType) and str in typing.get_args(hint)
            value = value[0] if takes_one and len(value) == 1 else value
        arguments[name] = value
    arguments.pop("return")
    return arguments


def _element_of_list(hint: Any) -> type | None:
    lists = (
        kind
        for kind in (hint, *typing.get_args(hint))
        if typing.get_origin(kind) in (list, Sequence)
    )
    return next((typing.get_args(kind)[0] for kind in lists), None)


def _underscored(options: Sequence[str]) -> list[str]:
    """Return ``options`` with underscores in their names, so that Megatron's spelling,
    ``--append-eod``, is valid too.
    """
    split = [(option, *option.partition("=")) for option in options]
    return [
        f"--{name[2:].replace('-', '_')}{rest}{value}" if name[:2] == "--" else word
        for word, name, rest, value in split
    ]


def _names_a_setting(error: Exception) -> bool:
    """Return whether ``error`` is about a setting, so that its text is enough; others are bugs and
    need their traceback.
    """
    if isinstance(error, (ConfigError, DataError, CheckpointError, ArgumentError)):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by = frame.f_globals.get("__name__", "").partition(".")[0]
    if raised_by != "lightning":
        # An object that cannot be made.
        return raised_by == "jsonargparse" and isinstance(error, ValueError)
    from megatron_lightning.strategies.lightning_internals import refuses_settings

    return refuses_settings(error)
