"""LightningCLI for ``fit``, ``validate``, ``test`` and ``predict``. Other commands start without
Lightning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from megatron_lightning import callbacks, modules
from megatron_lightning.callbacks.closing_summary import ClosingSummary
from megatron_lightning.callbacks.progress.progress_bars import count_to_max_steps
from megatron_lightning.callbacks.progress.progress_lines import use_lines_in_files
from megatron_lightning.callbacks.progress.short_runs import LogShortRuns
from megatron_lightning.checkpoint.format.class_paths import check_classes, check_instantiators
from megatron_lightning.checkpoint.format.plain_state import load_plain_file
from megatron_lightning.cli_parser import OneLineParser
from megatron_lightning.config.class_paths import imported_class
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.restart import run_with_restarts
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.modules.language_model import LanguageModule
from megatron_lightning.modules.objective import ObjectiveModule
from megatron_lightning.modules.pretrain_data import PretrainDataModule
from megatron_lightning.optim import ScheduledLR
from megatron_lightning.optim.named_optimizer import NamedOptimizer
from megatron_lightning.resilience.restart import Restarts
from megatron_lightning.strategies.megatron import MegatronStrategy

_MODULES = "megatron_lightning.modules"
_STRATEGY = "megatron_lightning.strategies.MegatronStrategy"


class TrainerParser(OneLineParser, LightningArgumentParser):
    """LightningCLI's parser with single-line errors."""

    @override
    def get_defaults(self, *args: Any, **settings: Any) -> Any:
        """Return the defaults of all options, of model and data the class alone.

        If the user names another class, the default class's options of the same names would apply
        to the named class. Defaults of the named class are added later.
        """
        defaults = super().get_defaults(*args, **settings)
        for name in ("model", "data", "trainer.strategy"):
            if "class_path" in (defaults.get(name) or ()):
                defaults[name].pop("init_args", None)
        return defaults


class MegatronCLI(LightningCLI):
    """LightningCLI with our defaults for model and data, and with ``--print_layout``.

    Args:
        command: The command that runs, if it is known: the others get no options.
        settings: As of LightningCLI.
    """

    parser: TrainerParser

    def __init__(self, *args: Any, command: str | None = None, **settings: Any) -> None:
        self._command = command
        super().__init__(*args, **settings)

    @override
    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **settings: Any
    ) -> LightningArgumentParser:
        """Make the parser of a command. Each takes a tenth of a second, so the others have no
        options.
        """
        if self._command not in (None, subcommand):
            return self.init_parser(**settings)
        return super()._prepare_subcommand_parser(klass, subcommand, **settings)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add defaults and options to the parser of a command."""
        # The parser finds the classes behind short names among the imported classes.
        for package in (callbacks, modules):
            for name in package.__all__:
                getattr(package, name)
        defaults = {"model": GPTLightningModule, "data": PretrainDataModule}
        for name, kind in defaults.items():
            parser.set_defaults({name: {"class_path": f"{_MODULES}.{kind.__name__}"}})
        parser.set_defaults({"trainer.strategy": {"class_path": _STRATEGY}})
        parser.add_argument(
            "--print_layout",
            action="store_true",
            help="Print stage, style, local shapes and axes of every layer, and exit.",
        )
        parser.add_class_arguments(Restarts, "restarts")
        self.parser.parsers.append(parser)
        # A wrong key of a file is found by the parser of the command.
        strategy_options = tuple(inspect.signature(MegatronStrategy).parameters)
        for one_parser in (self.parser, parser):
            one_parser.strategy_options = strategy_options

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments. LightningCLI's ``--optimizer`` of a module of ours becomes the
        option ``model.optimizer``. Import the class of the optimizer.

        Raises:
            ConfigError: If an optimizer is given twice, or has a scheduler beside it.
        """
        super().parse_arguments(parser, args)
        config = self._of_command(self.config)
        options = _options_of_ours(config.get("model"))
        if options is None:
            return
        if config.get("lr_scheduler") is not None:
            raise ConfigError(
                "lr_scheduler is given, and modules of this package have a schedule of their own. "
                "Set --model.lr_schedule=linear, cosine or wsd, and --model.warmup_steps."
            )
        if config.get("optimizer") is not None:
            if options.get("optimizer") is not None:
                raise ConfigError(
                    "optimizer and model.optimizer are both given, and mean the same. Leave one "
                    "out."
                )
            # Without the defaults of the class: the learning rate is the module's.
            is_parsed = isinstance(args, dict | Namespace)
            parse = parser.parse_object if is_parsed else parser.parse_args
            given = self._of_command(parse(args, defaults=False))
            options["optimizer"] = given["optimizer"].as_dict()
            config["optimizer"] = None
        if options.get("optimizer") is not None:
            NamedOptimizer.of(options["optimizer"]).import_classes()

    @override
    def _parse_ckpt_path(self) -> None:
        """Read a checkpoint file's hyper-parameters as LightningCLI does, after a check of the
        classes that they name.

        Raises:
            CheckpointError: If a class is not imported yet.
        """
        path = self._of_command(self.config).get("ckpt_path")
        if path and Path(path).is_file():
            state = load_plain_file(str(path))
            check_instantiators(state, str(path))
            check_classes(state, LightningModule, str(path), parsed=True)
        super()._parse_ckpt_path()

    @override
    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make the optimizer of a user's module, for ``--optimizer``.

        Raises:
            ConfigError: If the module has no parameters yet.
        """
        optimizer = self._get(self.config_init, "optimizer")
        if optimizer is not None and next(self.model.parameters(), None) is None:
            raise ConfigError(
                f"optimizer is given, and {type(self.model).__name__} has no parameters before "
                "configure_model, which the command line's optimizer needs. Build the model in "
                "__init__, or return the optimizer from configure_optimizers of the module."
            )
        super()._add_configure_optimizers_method_to_model(subcommand)

    @staticmethod
    def _of_command(config: Namespace) -> Namespace:
        """Return the options of the command."""
        options: Namespace = config.get(str(config.get("subcommand")), config)
        return options

    @override
    def instantiate_trainer(self, **settings: Any) -> Trainer:
        """Make the Trainer.

        Raises:
            ConfigError: If a GPU is asked for and torch finds none.
        """
        asked = self._get(self.config_init, "trainer.accelerator", default="auto")
        if asked in ("gpu", "cuda") and not torch.accelerator.is_available():
            raise ConfigError(
                f"trainer.accelerator={asked}, and torch {torch.__version__} finds no GPU on this "
                "machine. Set --trainer.accelerator=cpu and --trainer.devices to the number of "
                "processes; megatron-lightning doctor says what torch finds."
            )
        return super().instantiate_trainer(**settings)

    def prepare_screen(self) -> None:
        """Print the layout on request. Otherwise make the bar count to the last step, log every
        step of a short run, and print at the end of the fit how to continue.
        """
        self.print_layout()
        callbacks: list[Any] = vars(self.trainer)["callbacks"]
        if not any(isinstance(callback, ClosingSummary) for callback in callbacks):
            callbacks.append(ClosingSummary())
        bar = self.trainer.progress_bar_callback
        count_to_max_steps(bar)
        callbacks += use_lines_in_files(bar)
        if self._get(self.config_init, "trainer.log_every_n_steps") is None:
            callbacks.append(LogShortRuns())
            # Given before the number of steps is known.
            warnings.filterwarnings("ignore", ".*is smaller than the logging interval")

    def print_layout(self) -> None:
        """Print how the strategy divides the model, before anything is started."""
        if not self.config[self.subcommand].print_layout:
            return
        if not isinstance(self.trainer.strategy, MegatronStrategy):
            raise ConfigError(
                "--print_layout describes how MegatronStrategy divides a model, and the "
                f"strategy is {type(self.trainer.strategy).__name__}. Set "
                "--trainer.strategy=MegatronStrategy."
            )
        print(self.trainer.strategy.describe(self.model))
        raise SystemExit(0)

    before_fit = prepare_screen
    before_validate = before_test = before_predict = print_layout

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Run a command. ``fit`` runs as often as ``restarts`` says, each time with new objects."""
        run = partial(super()._run_subcommand, subcommand)
        restarts: Restarts = self.config_init[subcommand].restarts
        is_first = True

        def make_run() -> Callable[[], None]:
            nonlocal is_first
            if not is_first:
                self._set_seed()
                self.instantiate_classes()
                self.config_init[subcommand].ckpt_path = "last"
            is_first = False
            return run

        run_with_restarts(make_run, restarts if subcommand == "fit" else None)

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        """Return the optimizer and the scheduler of the command line, as a module would."""
        # Lightning would step the scheduler once an epoch.
        if isinstance(lr_scheduler, ScheduledLR):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"},
            }
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)


def _options_of_ours(model: Any) -> Namespace | None:
    """Return the options of the module of ours that makes the optimizer. None: another module."""
    kind = None if model is None else imported_class(model.get("class_path"))
    if not isinstance(kind, type) or not issubclass(kind, LanguageModule):
        return None
    if issubclass(kind, ObjectiveModule):
        return _options_of_ours(model.get("init_args.model"))
    is_ours = kind.configure_optimizers is LanguageModule.configure_optimizers
    return model.init_args if is_ours and "init_args" in model else None
