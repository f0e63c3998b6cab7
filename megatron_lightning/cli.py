"""The command line, ``megatron-lightning COMMAND``: the Trainer's commands, and tools.

Function signatures and docstrings define the options. jsonargparse parses the options. The
Trainer's commands come from LightningCLI. A wrong setting ends in a single line on stderr with the
nearest valid option, and in exit code 2. Any other error keeps the traceback.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import traceback
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import docstring_parser
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

import megatron_lightning
from megatron_lightning.cli_parser import (
    COMMANDS,
    TRAINER_COMMANDS,
    OneLineParser,
    in_one_line,
    suggestion,
)
from megatron_lightning.errors import EXPLAINED, CheckpointError, ConfigError, ReportedError
from megatron_lightning.resilience.exit_codes import FAILED, INTERRUPTED, WRONG_CONFIGURATION

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

_TRACEBACK_VARIABLE = "MEGATRON_LIGHTNING_TRACEBACK"
_USAGE = """usage: megatron-lightning COMMAND [options]

  fit         train a model
  validate    run the validation loop
  test        run the test loop
  predict     run the prediction loop
  preprocess  tokenize text into indexed files
  data        show, inspect, merge or index data
  generate    continue prompts with a trained model
  evaluate    run tasks of lm-evaluation-harness with a trained model
  serve       answer an OpenAI client with a trained model
  checkpoint  inspect, verify, reshard, consolidate, average, prune or upcycle checkpoints
  adapters    export, import or merge LoRA adapters
  convert     import, export or prune Hugging Face folders; verify, compare folders and dumps
  verify-card verify a model of the Hub, and keep a card with commands and measured values
  schedule    show a pipeline schedule: table, bubble, memory; --output DIR: picture
  plan        show grid, stages, memory, FLOPs and bubble of a configuration file; --search: layouts
  recipe      list, show or copy the configuration files of published models
  doctor      show versions and devices, test the collectives, look at the checkpoint folder

megatron-lightning COMMAND --help lists the options of a command; --version prints the version.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        args: The command and its options. None: the arguments of this process.

    Raises:
        SystemExit: With code 2 for a wrong setting, input or checkpoint. The traceback is shown if
            the environment variable ``MEGATRON_LIGHTNING_TRACEBACK`` is set. With code 130 after
            Ctrl-C.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    arguments = list(sys.argv[1:] if args is None else args)
    # Unlike `python -m`, an installed command does not find modules in the working directory.
    if args is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"megatron-lightning {megatron_lightning.__version__}")
        return
    try:
        if arguments[0] in TRAINER_COMMANDS:
            trainer_cli(args)
        else:
            _run(arguments[0], arguments[1:])
    except Exception as error:
        if not _names_a_setting(error) or os.environ.get(_TRACEBACK_VARIABLE):
            raise
        is_first = all(
            os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")
        )
        if is_first and not _was_printed(error):
            message = in_one_line(str(error))
            print(f"megatron-lightning: error: {message}", file=sys.stderr, flush=True)
            if _asks_for_json(arguments) and not isinstance(error, ReportedError):
                print(json.dumps({"errors": [message]}))
        raise SystemExit(WRONG_CONFIGURATION) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # as a shell reports Ctrl-C, without a traceback


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether a command prints JSON: ``--json`` or ``--js``, alone or with a value."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if len(option) > 2 and "--json".startswith(option):  # as argparse completes it
            return (value or following).lower() not in ("false", "no", "off")
    return False


def trainer_cli(args: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Run ``fit``, ``validate``, ``test`` or ``predict`` with any LightningModule and
    LightningDataModule.

    Without a ``class_path``, the model is a :class:`GPTLightningModule` and the data a
    :class:`PretrainDataModule`.

    Args:
        args: The command and its options. None: the arguments of this process.
        run: Whether to run. False only makes the objects, and ``args`` has no command.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    from megatron_lightning.cli_trainer import MegatronCLI, TrainerParser

    arguments = list(sys.argv[1:] if args is None else args)
    command = next((name for name in arguments[:1] if name in TRAINER_COMMANDS), None)
    return MegatronCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},  # a resumed run writes to the same folder
        parser_class=TrainerParser,
        parser_kwargs={"exit_on_error": False, "prog": "megatron-lightning"},
        args=None if args is None else list(args),
        run=run,
        command=command,
    )


_FUNCTIONS: Mapping[str, str] = types.MappingProxyType(
    {
        "preprocess": "megatron_lightning.data.text.preprocess.preprocess",
        "generate": "megatron_lightning.inference.commands.generate.generate",
        "evaluate": "megatron_lightning.inference.commands.evaluate.evaluate",
        "serve": "megatron_lightning.inference.commands.serve.serve",
        "schedule": "megatron_lightning.pipeline.schedules.description.describe_schedule",
    }
)
"""Command -> function that returns a text, or a list of texts, to print. Imported at the call."""
_REPORTS: Mapping[str, tuple[str, int]] = types.MappingProxyType(
    {
        "plan": ("megatron_lightning.recipe_reading.plan_command.plan", WRONG_CONFIGURATION),
        "doctor": ("megatron_lightning.doctor.command.doctor", FAILED),
        "verify-card": ("megatron_lightning.cards.command.verify_card", FAILED),
    }
)
"""Command -> function that returns a text and whether all is well, and the exit code if not."""
_TOOLS: Mapping[str, str] = types.MappingProxyType(
    {
        "adapters": "megatron_lightning.peft.commands",
        "convert": "megatron_lightning.bridge.commands",
        "recipe": "megatron_lightning.recipe_reading.recipe_files",
    }
)
"""Command -> module with the command's tools."""


def _run(command: str, options: list[str]) -> None:
    if command in _FUNCTIONS:
        module, _, name = _FUNCTIONS[command].rpartition(".")
        result = _call(getattr(importlib.import_module(module), name), command, options)
        for text in result if isinstance(result, list) else [result]:
            if isinstance(text, str):  # a tool's report of files is for Python
                print(text)
    elif command in _REPORTS:
        path, code = _REPORTS[command]
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        text, is_well = _call(
            function,
            command,
            _with_overrides(options),
            required_as_positional=command == "verify-card",
        )
        print(text, end="\n" if text else "")
        if not is_well:
            raise SystemExit(code)
    elif command == "checkpoint":
        from megatron_lightning.checkpoint.tools.commands import COMMANDS as TOOLS
        from megatron_lightning.models.upcycling import upcycle

        _use_tool(command, {**TOOLS, "upcycle": upcycle}, options)
    elif command in _TOOLS:
        _use_tool(command, importlib.import_module(_TOOLS[command]).COMMANDS, options)
    elif command == "data":
        from megatron_lightning.modules.data_modules.data_commands import COMMANDS as TOOLS

        _use_tool(command, TOOLS, _with_overrides(options))
    else:
        from megatron_lightning.names.lookup import answer_for_command

        answer = answer_for_command(command)
        nearest = f": {answer}." if answer else suggestion(command, COMMANDS)
        raise ConfigError(
            f"there is no command {command!r}{nearest or '.'} `megatron-lightning --help` lists "
            "the commands."
        )


def _use_tool(
    command: str, tools: Mapping[str, Callable[..., None]], options: Sequence[str]
) -> None:
    tool = options[0] if options else None
    if tool is None:
        raise ConfigError(
            f"{command} needs a tool: {', '.join(tools)}. Add --help for their descriptions."
        )
    if tool in ("-h", "--help"):
        print(f"usage: megatron-lightning {command} [-h] TOOL [options]\n")
        for name, function in tools.items():
            print(
                textwrap.fill(
                    _first_sentence(function),
                    100,
                    initial_indent=f"  {name:<12} ",
                    subsequent_indent=15 * " ",
                )
            )
        raise SystemExit(0)
    if tool not in tools:
        nearest = suggestion(tool, tools)
        raise ConfigError(
            f"there is no tool {tool!r}{nearest or '.'} The tools are {', '.join(tools)}."
        )
    try:
        _call(tools[tool], f"{command} {tool}", options[1:], required_as_positional=True)
    except OSError as error:  # a folder without write access, a full disk
        raise CheckpointError(str(error)) from error


def _first_sentence(function: Callable[..., None]) -> str:
    """Return the first sentence of a docstring, without roles of Sphinx."""
    paragraph = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    words = re.sub(r":\w+:`~?([^`]*)`", r"\1", paragraph).replace("``", "")
    return f"{words.partition('. ')[0].removesuffix('.')}."


def _call(
    function: Callable[..., Any],
    command: str,
    options: Sequence[str],
    *,
    required_as_positional: bool = False,
) -> Any:
    parser = OneLineParser(prog=f"megatron-lightning {command}", exit_on_error=False)
    if "config" not in inspect.signature(function).parameters:
        parser.add_argument("--config", action="config", help="Path to a configuration file.")
    _add_options(parser, function, required_as_positional)
    # jsonargparse names the method ``instantiate`` from 4.49 on, and warns of the older name.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    settings = instantiate(parser.parse_args(_underscored(options)))
    return function(**_arguments(function, settings))


class _Option(NamedTuple):
    """Option of a command: a parameter of its function, or a field of a parameter's dataclass."""

    name: str
    hint: Any
    default: Any
    """``Parameter.empty``: the option is required."""
    is_named: bool
    """Whether the option is never positional."""
    description: str | None


def _groups(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters whose fields are options like others: dataclasses that are not
    keyword-only. A keyword-only one stays a group (``--moe.num_experts``).
    """
    hints = typing.get_type_hints(function)
    return {
        name: hints[name]
        for name, parameter in inspect.signature(function).parameters.items()
        if dataclasses.is_dataclass(hints[name]) and parameter.kind is not parameter.KEYWORD_ONLY
    }


def _options_of(function: Callable[..., Any]) -> Iterator[_Option]:
    """Yield the options of a function, and of its groups."""
    hints, described, groups = (
        typing.get_type_hints(function),
        _descriptions(function),
        _groups(function),
    )
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            is_named = parameter.kind is parameter.KEYWORD_ONLY
            yield _Option(name, hints[name], parameter.default, is_named, described[name])
            continue
        inner_hints, inner = typing.get_type_hints(hints[name]), _descriptions(hints[name])
        for one in dataclasses.fields(hints[name]):
            default = parameter.empty if one.default is dataclasses.MISSING else one.default
            yield _Option(one.name, inner_hints[one.name], default, True, inner[one.name])


def _descriptions(documented: Any) -> dict[str, str | None]:
    found = docstring_parser.parse_from_object(documented)
    return {param.arg_name: param.description for param in found.params}


def _add_options(
    parser: ArgumentParser, function: Callable[..., Any], required_as_positional: bool
) -> None:
    """Add the options of ``function``. A list takes several words, a bool needs no value, and a
    keyword-only parameter is never positional.
    """
    parser.description = docstring_parser.parse(inspect.getdoc(function) or "").short_description
    for name, hint, given, is_named, description in _options_of(function):
        is_required = given is inspect.Parameter.empty
        positional = is_required and required_as_positional and not is_named
        default = None if is_required else given
        settings: dict[str, Any] = {"type": hint}
        if element := _element_of_list(hint):
            settings = {"type": list[element] | element, "nargs": "+"}  # type: ignore[valid-type]
            default = [default] if isinstance(default, str) else default and list(default)
        elif hint is bool:  # with positional arguments the next word is an argument
            settings = (
                {"action": "store_true"}
                if required_as_positional
                else {"type": bool, "nargs": "?", "const": True}
            )
        if not positional:
            settings |= {"required": True} if is_required else {"default": default}
        parser.add_argument(name if positional else f"--{name}", help=description, **settings)


def _arguments(function: Callable[..., Any], settings: Namespace) -> dict[str, Any]:
    values = {}
    for option in _options_of(function):
        value = settings.get(option.name)
        if value is not None and _element_of_list(option.hint):
            # A word may be "[a, b]".
            value = [
                item for word in value for item in (word if isinstance(word, list) else [word])
            ]
            kinds = typing.get_args(option.hint)
            takes_one = isinstance(option.hint, types.UnionType) and str in kinds
            value = value[0] if takes_one and len(value) == 1 else value
        values[option.name] = value
    for name, group in _groups(function).items():
        names = [one.name for one in dataclasses.fields(group)]
        values[name] = group(**{one: values.pop(one) for one in names})
    return values


def _element_of_list(hint: Any) -> type | None:
    lists = (
        kind
        for kind in (hint, *typing.get_args(hint))
        if typing.get_origin(kind) in (list, Sequence)
    )
    return next((typing.get_args(kind)[0] for kind in lists), None)


def _with_overrides(options: Sequence[str]) -> list[str]:
    """Return the options of ``plan``: every ``--config`` in a list, and options of ``fit``
    (``--trainer.devices=8``, ``--trainer.devices 8``) in another.
    """
    lists: dict[str, list[str]] = {"--config": [], "--overrides": []}
    other_words: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        is_override = name.partition(".")[0] in ("--trainer", "--model", "--data")
        if name != "--config" and not is_override:
            other_words.append(word)
            continue
        value = value if equals else next(words, "")
        words_taken = lists["--overrides" if is_override else "--config"]
        words_taken.append(f"{name[2:]}={value}" if is_override else value)
    return other_words + [
        word for name, words_taken in lists.items() if words_taken for word in (name, *words_taken)
    ]


def _underscored(options: Sequence[str]) -> list[str]:
    """Return ``options`` with underscores in the names, so that Megatron's spelling,
    ``--append-eod``, is valid too.
    """
    split = [(option, *option.partition("=")) for option in options]
    return [
        f"--{name[2:].replace('-', '_')}{rest}{value}"
        if name[:2] == "--" and " " not in name
        else word
        for word, name, rest, value in split
    ]


def _was_printed(error: Exception) -> bool:
    """Return whether a failing rank has already printed ``error``."""
    from megatron_lightning.resilience.failure import is_printed  # imports torch

    return is_printed(error)


def _names_a_setting(error: Exception) -> bool:
    """Return whether ``error`` is about a setting, so that the text is enough. Other errors are
    bugs and need a traceback.
    """
    if isinstance(error, (*EXPLAINED, ArgumentError)):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by = frame.f_globals.get("__name__", "").partition(".")[0]
    if raised_by != "lightning":
        # An object cannot be made from the settings.
        return raised_by == "jsonargparse" and isinstance(error, ValueError)
    from megatron_lightning.lightning_internals.trainer import refuses_settings

    return refuses_settings(error)
