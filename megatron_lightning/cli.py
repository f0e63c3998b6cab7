"""The command line: ``megatron-lightning fit|validate|test|predict|preprocess|generate|checkpoint|schedule``.

Signatures and their docstrings are the options; jsonargparse reads them. The Trainer's commands are LightningCLI's. A value
that cannot work ends in one line on stderr and exit code 2; any other error keeps its traceback.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import traceback
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import megatron_lightning
from megatron_lightning.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

_TRACEBACK_VARIABLE = "MEGATRON_LIGHTNING_TRACEBACK"
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(?P<kinds>[^\]]*)\] Errors:"
    r"(?: - Expected an? <class '\w+'>)+ Given value type: <class '\w+'> Given value: (?P<value>\S+)"
)
_GENERAL = re.compile("Does not validate|Expected an? (?!dot import path)|Not a valid subclass|a class path|a dict with")
_OPTIONS_OF_A_CLASS = "Options go with the name of a class, as in --trainer.strategy=MegatronStrategy."
_USAGE = """usage: megatron-lightning COMMAND [options]

  fit         train a model
  validate    run the validation loop
  test        run the test loop
  predict     run the prediction loop
  preprocess  tokenize text into indexed files
  generate    continue prompts with a trained model
  checkpoint  inspect, verify, reshard, consolidate, average or prune checkpoints
  schedule    show a pipeline schedule: table, bubble, memory, picture

megatron-lightning COMMAND --help lists the options of a command, megatron-lightning --version the version.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: The command and its options; None: those of this process.

    Raises:
        SystemExit: With code 2 for a wrong setting, input or checkpoint. The traceback is shown if the environment variable
            ``MEGATRON_LIGHTNING_TRACEBACK`` is set. With code 130 after Ctrl-C.
    """
    from jsonargparse import set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    arguments = list(sys.argv[1:] if args is None else args)
    if args is None and os.getcwd() not in sys.path:  # an installed command lacks what `python -m` has: modules that lie here
        sys.path.insert(0, os.getcwd())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"megatron-lightning {megatron_lightning.__version__}")
        return
    try:
        if arguments[0] in ("fit", "validate", "test", "predict"):
            trainer_cli(args)
        else:
            _run(arguments[0], arguments[1:])
    except Exception as error:
        reason = _reason(error)
        if reason is None or os.environ.get(_TRACEBACK_VARIABLE):
            raise
        if _is_first_rank():
            print(f"megatron-lightning: error: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as a shell reports it; there is nothing that a traceback would tell


def trainer_cli(args: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Run ``fit``, ``validate``, ``test`` or ``predict`` with any LightningModule and LightningDataModule.

    Models and data that are not named by a ``class_path`` are :class:`GPTLightningModule` and :class:`PretrainDataModule`.

    Args:
        args: The command and its options; None: those of this process.
        run: Whether to run; otherwise the objects are made only, and ``args`` has no command.

    Raises:
        ConfigError: If the values cannot work together.
    """
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    from megatron_lightning.optim import ScheduledLR

    import_module("megatron_lightning.strategies.megatron")  # registers the name "megatron"
    import_module("megatron_lightning.modules.gpt")
    import_module("megatron_lightning.modules.pretrain_data")
    defaults = {
        "model": {"class_path": "megatron_lightning.modules.GPTLightningModule"},
        "data": {"class_path": "megatron_lightning.modules.PretrainDataModule"},
    }

    class MegatronCLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults(defaults)

        @staticmethod
        def configure_optimizers(lightning_module: LightningModule, optimizer: Any, lr_scheduler: Any = None) -> Any:
            if isinstance(lr_scheduler, ScheduledLR):  # Lightning would step it once an epoch
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}
            return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    return MegatronCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},  # a resumed run writes to the same folder
        parser_kwargs={"exit_on_error": False, "prog": "megatron-lightning"},
        args=None if args is None else list(args),
        run=run,
    )


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

        if not options:
            raise ConfigError(f"checkpoint needs a tool: {', '.join(COMMANDS)}. Add --help to see what one does.")
        tool, rest = (options[0], options[1:]) if options and options[0] in COMMANDS else ("", [])
        spelled = [tool, *_spelled_out(rest, COMMANDS[tool])] if tool else options
        try:
            _parse(dict(COMMANDS), command, spelled, as_positional=True)
        except OSError as error:  # a folder that may not be written, a disk that is full
            raise CheckpointError(str(error)) from error
    else:
        raise ConfigError(f"there is no command {command!r}. `megatron-lightning --help` lists the commands.")


def _call(function: Callable[..., Any], command: str, options: list[str]) -> Any:
    return _parse(function, command, list(_spelled_out(options, function)), as_positional=False)


def _parse(components: Any, command: str, options: list[str], *, as_positional: bool) -> Any:
    from jsonargparse import auto_cli

    name = f"megatron-lightning {command}"
    return auto_cli(components, args=options, as_positional=as_positional, exit_on_error=False, prog=name)


def _spelled_out(options: Sequence[str], function: Callable[..., Any]) -> Iterator[str]:
    """Yield ``options`` as jsonargparse wants them, so that Megatron's spelling works too.

    ``--append-eod`` becomes ``--append_eod=true``, and ``--json-keys text title`` becomes ``--json_keys=["text", "title"]``.
    Where the last parameter without a default is a list, it takes all further values that no option takes.
    """
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    takes_rest = bool(required) and _is_list(hints[required[-1]])
    rest, num_positional = list(options), 0
    while rest:
        option = rest.pop(0)
        name = option.partition("=")[0].removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            num_positional += 1
            last = takes_rest and num_positional == len(required)
            yield json.dumps([option, *_values(rest, len(rest))]) if last else option
        elif name not in parameters:
            yield option
        elif "=" in option:
            yield f"--{name}={_joined([option.partition('=')[2]], hints[name])}"
        else:
            yield f"--{name}={_joined(_values(rest, _most_values(rest, hints[name])), hints[name])}"


def _values(rest: list[str], most: int) -> list[str]:
    """Take up to ``most`` words that are no options off the front of ``rest``."""
    count = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    taken, rest[:] = rest[: min(count, most)], rest[min(count, most) :]
    return taken


def _most_values(rest: Sequence[str], hint: Any) -> int:
    if hint is bool:
        return int(bool(rest) and rest[0].lower() in ("true", "false"))
    return len(rest) if _is_list(hint) else 1


def _joined(values: list[str], hint: Any) -> str:
    if hint is bool:
        return values[0] if values else "true"
    if len(values) > 1 or (values and _is_list(hint) and str not in _members(hint) and not values[0].startswith("[")):
        return json.dumps(values)
    return values[0] if values else ""


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(kind) in (list, Sequence) for kind in _members(hint))


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_first_rank() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _reason(error: Exception) -> str | None:
    """Return what the user can mend, as one line; None for any other error."""
    if isinstance(error, (ConfigError, DataError, CheckpointError)):
        return " ".join(str(error).split())
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_by = frames[-1][0].f_globals.get("__name__", "").partition(".")[0]
    if raised_by == "lightning":
        from megatron_lightning.strategies.lightning_internals import refuses_settings

        return " ".join(str(error).split()) if refuses_settings(error) else None
    if raised_by != "jsonargparse" or not isinstance(error, ValueError | ArgumentError):
        return None
    # jsonargparse tries the members of a Union in turn and lists what each says; show the words of a constructor.
    text, *said = _UNION.sub(_expected, " ".join(str(error).split())).partition(" Given value")[0].split(" - ")
    specific = [words for words in said if not _GENERAL.match(words)]
    key = re.match(r'Parser key "[^"]*":', text)
    reason = (f"{key[0]} " if key else "") + specific[-1] if specific else " - ".join([text, *said])
    named = 'Parser key "trainer.strategy": Expected a dot import path string' in reason
    return f"{reason}. {_OPTIONS_OF_A_CLASS}" if named else reason


def _expected(union: re.Match[str]) -> str:
    """Return what a Union of plain types says about a value in fewer words."""
    kinds = [kind.replace("NoneType", "null") for kind in re.findall(r"<class '(\w+)'>", union["kinds"])]
    return f"expected {' or '.join(kinds)}; got {union['value']}"
