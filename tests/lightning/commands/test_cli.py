"""The command line: every command is found, values reach the objects, and a wrong value is one line
and exit code 2."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import megatron_lightning
from megatron_lightning import cli_trainer
from megatron_lightning.checkpoint import open_checkpoint, save_sharded
from megatron_lightning.checkpoint.format.class_paths import check_classes
from megatron_lightning.cli import main, trainer_cli
from megatron_lightning.cli_parser import in_one_line
from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.text.preprocess import preprocess
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models import RopeScaling
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyModule

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: megatron_lightning.strategies.MegatronStrategy
    init_args:
      micro_batch_size: 2
"""
TOY = """
model:
  class_path: tests.helpers.toy.ToyModule
data:
  class_path: tests.helpers.toy.ToyData
"""


GPT = (
    "--model.config={num_layers: 1, hidden_size: 8, num_attention_heads: 1, vocab_size: 32}",
    "--data={mock: true, sequence_length: 8, batch_size: 2}",
    "--trainer.logger=false",
    "--trainer.accelerator=cpu",
)


class BuiltToy(ToyModule):
    """Built at once, as the command line's ``optimizer:`` section needs it."""

    def __init__(
        self, lr: float = 1e-2, num_layers: int = 4, plateau: bool = False, mask: bool = False
    ) -> None:
        super().__init__(lr, num_layers, plateau, mask)
        self.configure_model()


class GivenLayer(pl.LightningModule):
    """Takes an object from the command line, and keeps its arguments as users do."""

    def __init__(
        self,
        layer: torch.nn.Module,
        width: int = 1,
        draw: Callable[..., Any] | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = layer
        self.head = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG + TOY)
    yield str(path)
    monkeypatch.undo()


def _fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a wrong command; return the one line it prints."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("megatron-lightning: error:")
    ]
    assert exit_.value.code == 2 and len(lines) == 1
    return lines[0]


def _made(args: list[str]) -> LightningCLI:
    return trainer_cli(args, run=False)


def _slow(*cases: tuple[str, ...]) -> list[Any]:
    """Return further cases of the same kind; each parses the options of a whole job, which takes
    seconds."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def test_help_lists_the_commands() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megatron_lightning", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for command in (
        "fit",
        "validate",
        "test",
        "predict",
        "preprocess",
        "generate",
        "checkpoint",
        "schedule",
    ):
        assert f"\n  {command} " in result.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"megatron-lightning {megatron_lightning.__version__}\n"


def test_no_command_is_an_error_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2 and "preprocess" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        ("--json=true", True), ("--json true", True), ("--json", True), ("--json --wrong 1", True),
        ("--js", True), ("--jso --wrong 1", True), ("--json=false", False), ("--json false", False),
        ("--json=no", False), ("--jso=off", False), ("", False), ("--", False),
    ],
)  # fmt: skip
def test_an_error_is_json_for_scripts(
    words: str, is_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fails(*_: Any) -> None:
        raise ConfigError("no model")

    monkeypatch.setattr("megatron_lightning.cli._run", fails)
    with pytest.raises(SystemExit):
        main(["evaluate", *words.split()])
    assert capsys.readouterr().out == ('{"errors": ["no model"]}\n' if is_json else "")


def test_a_mistyped_class_has_the_nearest_name(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "--model.class_path=megatron_lightning.modules.GPTLightningModul"
    said = _fails(["fit", "--config", config, wrong], capsys)
    assert said.endswith("Did you mean megatron_lightning.modules.GPTLightningModule?")


def test_only_the_command_that_runs_has_options(config: str) -> None:
    """The options of each take a tenth of a second. Lightning's hook for it is private."""
    made: list[Any] = []
    add = cli_trainer.MegatronCLI.add_arguments_to_parser

    def count(self: Any, parser: Any) -> None:
        made.append(parser)
        add(self, parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_trainer.MegatronCLI, "add_arguments_to_parser", count)
        patch.setattr(cli_trainer.MegatronCLI, "_run_subcommand", lambda *_: None)
        trainer_cli(["fit", "--config", config])
    assert len(made) == 1


def test_a_value_of_the_strategy_is_set_over_the_file(config: str) -> None:
    strategy = _made(["--config", config, "--trainer.strategy.data_parallel=ddp"]).trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    assert strategy.options.data_parallel == "ddp" and strategy.options.micro_batch_size == 2


@pytest.mark.parametrize(
    ("given", "types", "sizes"),
    [
        (["cp_comm_type=all_gather"], "all_gather", None),
        (["cp_comm_type=[p2p,a2a,p2p]"], ["p2p", "a2a", "p2p"], None),
        (
            ["cp_comm_type=a2a+p2p", "hierarchical_context_parallel_sizes=[2,1]"],
            "a2a+p2p",
            [2, 1],
        ),
    ],
)
def test_types_of_context_parallelism(
    config: str, given: list[str], types: object, sizes: object
) -> None:
    options = [f"--trainer.strategy.context_options.{option}" for option in given]
    sizes_of_job = ["--trainer.devices=2", "--trainer.strategy.context_parallel_size=2"]
    strategy = _made(["--config", config, *sizes_of_job, *options]).trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    found = strategy.options.sequence
    assert found.cp_comm_type == types and found.hierarchical_context_parallel_sizes == sizes


def test_a_pipeline_is_described_in_the_file(config: str, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "trainer: {devices: 2, strategy: {class_path: "
        "megatron_lightning.strategies.MegatronStrategy, init_args: {\n"
        "  pipeline_model_parallel_size: 2,\n"
        "  pipeline_schedule: [1F0 1B0, 0F0 0B0],\n"
        "  pipeline_options: {pipeline_model_parallel_layout: 'Ett*1|(t)*2,L'}}}}\n" + TOY
    )
    strategy = _made(["--config", str(path)]).trainer.strategy
    assert (
        isinstance(strategy, MegatronStrategy)
        and str(strategy.options.schedule.table(1)) == "0: 1F0 1B0\n1: 0F0 0B0"
    )
    assert strategy.options.pipeline.pipeline_model_parallel_layout == "Ett*1|(t)*2,L"
    option = "--trainer.strategy.pipeline_options.num_layers_in_first_pipeline_stage=1"
    strategy = _made(["--config", config, option]).trainer.strategy
    assert (
        isinstance(strategy, MegatronStrategy)
        and strategy.options.pipeline.num_layers_in_first_pipeline_stage == 1
    )


def test_recomputation_is_yaml(tmp_path: Path, config: str) -> None:
    path = tmp_path / "recompute.yaml"
    options = "recompute: {recompute_granularity: selective, recompute_modules: [core_attn, mlp]}"
    path.write_text(
        Path(config)
        .read_text()
        .replace("micro_batch_size: 2", f"micro_batch_size: 2\n      {options}")
    )
    strategy = _made(
        ["--config", str(path), "--trainer.strategy.recompute.offload_modules=[mlp]"]
    ).trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    assert list(strategy.options.recompute.recompute_modules) == ["core_attn", "mlp"]
    assert list(strategy.options.recompute.offload_modules) == ["mlp"]


def test_the_strategy_is_known_by_name(config: str) -> None:
    assert isinstance(
        _made(["--config", config, "--trainer.strategy", "megatron"]).trainer.strategy,
        MegatronStrategy,
    )


def test_our_model_and_data_need_no_class_path(tmp_path: Path, config: str) -> None:
    path = tmp_path / "gpt.yaml"
    sizes = (
        "{num_layers: 2, hidden_size: 16, num_attention_heads: 2, vocab_size: 32, "
        "max_sequence_length: 8}"
    )
    path.write_text(
        f"{CONFIG}model: {{init_args: {{config: {sizes}}}}}\n"
        "data: {init_args: {data_prefix: nowhere, sequence_length: 8, batch_size: 2}}\n"
    )
    cli = _made(["--config", str(path), "--model.config.num_layers=3"])
    assert isinstance(cli.model, GPTLightningModule) and isinstance(
        cli.datamodule, PretrainDataModule
    )
    assert cli.model.config.num_layers == 3 and cli.model.config.hidden_size == 16


class WithRates(pl.LightningModule):
    """A user's module with options that ours has, too."""

    def __init__(self, learning_rate: float = 0.5, weight_decay: float = 0.25) -> None:
        super().__init__()
        self.rates = (learning_rate, weight_decay)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_users_module_keeps_its_own_defaults(tmp_path: Path, in_file: bool) -> None:
    """Not those of our module, which is the default."""
    named = f"{__name__}.WithRates"
    (tmp_path / "model.yaml").write_text(f"model: {{class_path: {named}}}")
    given = f"--config={tmp_path / 'model.yaml'}" if in_file else f"--model={named}"
    data = ("--data.data_prefix=text", "--data.sequence_length=8", "--data.batch_size=2")
    cli = trainer_cli([given, *data, "--trainer.logger=false"], run=False)
    assert cli.model.rates == (0.5, 0.25)


def test_rope_scaling_is_yaml(tmp_path: Path, config: str) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(
        f"""{CONFIG}
model:
  init_args:
    config:
      {{num_layers: 2, hidden_size: 16, num_attention_heads: 2, vocab_size: 32,
        rope_scaling: {{rope_type: llama3, factor: 8, original_max_position_embeddings: 8192}}}}
data: {{init_args: {{data_prefix: nowhere, sequence_length: 8, batch_size: 2}}}}
"""
    )
    model = _made(["--config", str(path), "--model.config.rope_scaling.factor=32"]).model
    assert isinstance(model, GPTLightningModule)
    assert model.config.rope_scaling == RopeScaling(
        rope_type="llama3", factor=32.0, original_max_position_embeddings=8192
    )


def test_schedule_and_parameter_groups_are_yaml(tmp_path: Path, config: str) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(
        f"""{CONFIG}
model:
  init_args:
    config:
      {{num_layers: 2, hidden_size: 16, num_attention_heads: 2, vocab_size: 32,
        max_sequence_length: 8}}
    lr_schedule: {{lr_decay_style: WSD, lr_decay_steps: 100, wsd_decay_steps: 10, unit: samples}}
    param_groups:
      - {{name: embeddings, params: ["**word_embeddings.weight"], lr: 1.0e-4,
          options: {{betas: [0.8, 0.9]}}}}
      - {{name: no_decay, max_dims: 1, wd_mult: 0}}
data:
  init_args:
    data_prefix: nowhere
    sequence_length: 8
    batch_size: 2
    batch_size_schedule: {{global_batch_size: 8, rampup_batch_size: [2, 2, 100]}}
"""
    )
    assert _made(["--config", str(path)]).datamodule.batch_size_schedule.sizes == [2, 4, 6, 8]
    model = _made(["--config", str(path), "--model.lr_schedule.min_lr=1e-5"]).model
    assert isinstance(model, GPTLightningModule)
    model.configure_model()
    configured: Any = model.configure_optimizers()
    assert [group["name"] for group in configured["optimizer"].param_groups] == [
        "default",
        "embeddings",
        "no_decay",
    ]
    assert tuple(configured["optimizer"].param_groups[1]["betas"]) == (0.8, 0.9)
    assert configured["lr_scheduler"]["scheduler"].schedule.min_lr == 1e-5


@pytest.mark.parametrize(
    "args, expected",
    [
        (("--optimizer=SGD", "--optimizer.momentum=0.9"), ("torch.optim.SGD", {"momentum": 0.9})),
        (
            ("--model.optimizer=SGD", "--model.optimizer.lr=1e-3", "--model.lr_schedule=wsd"),
            ("SGD", {"lr": 1e-3}),
        ),
        *_slow(
            (("--optimizer=torch.optim.AdamW",), ("torch.optim.AdamW", {})),
            (("--model.optimizer", "SGD", "--model.optimizer.lr", "2"), ("SGD", {"lr": 2})),
            (
                ("--model.optimizer.class_path=torch.optim.SGD", "--model.optimizer.lr=2"),
                ("torch.optim.SGD", {"lr": 2}),
            ),
        ),
    ],
)
def test_the_optimizer_has_one_name(
    config: str, args: tuple[str, ...], expected: tuple[str, dict[str, Any]]
) -> None:
    """LightningCLI's own --optimizer is the option of our modules, without defaults."""
    cli = _made([*GPT, *args])
    named = cli.model.hparams["optimizer"]
    assert (named["class_path"], named["init_args"]) == expected
    assert cli.config.optimizer is None and cli.config.model.init_args.optimizer is not None


@pytest.mark.parametrize(
    "args, message",
    [
        (("--optimizer=SGD", "--model.optimizer=SGD"), "both given"),
        *_slow(
            (("--optimizer=SGD", "--lr_scheduler=ConstantLR"), "--model.lr_schedule=linear"),
            (("--model.optimizer=nowhere.Lion",), "cannot be imported"),
            (("--model.lr_schedule=lin",), "expected one of 'linear', 'cosine', 'wsd' or null"),
        ),
    ],
)
def test_a_wrong_optimizer_is_one_line(
    config: str, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _fails(["fit", *GPT, *args], capsys)


def test_an_optimizer_of_a_module_without_parameters_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["fit", "--config", config, "--optimizer=SGD"]
    assert "ToyModule has no parameters before configure_model" in _fails(args, capsys)


def test_a_schedule_of_the_command_line_is_stepped_with_the_optimizer(
    tmp_path: Path, config: str
) -> None:
    path = tmp_path / "scheduled.yaml"
    path.write_text(
        Path(config).read_text().replace("tests.helpers.toy.ToyModule", f"{__name__}.BuiltToy")
        + """
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1.0}}
lr_scheduler:
  class_path: megatron_lightning.optim.ScheduledLR
  init_args: {schedule: {lr_decay_style: linear, lr_decay_steps: 4}}
"""
    )
    cli = _made(
        ["--config", str(path), "--trainer.max_steps=3", "--trainer.num_sanity_val_steps=0"]
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.25]


def test_fit_runs(config: str, recwarn: pytest.WarningsRecorder) -> None:
    main(["fit", "--config", config, "--trainer.max_steps=1", "--trainer.num_sanity_val_steps=0"])
    # Lightning's, on every rank.
    assert not [warning for warning in recwarn if "LeafSpec" in str(warning.message)]


def test_a_module_of_the_command_line_is_loaded_from_its_folder(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightningCLI keeps how it made the module; a foreign folder could name any code there."""
    name = f"{__name__}.GivenLayer"
    args = ["fit", "--config", config, f"--model={name}", "--model.layer=torch.nn.Flatten"]
    args += ["--trainer.max_steps=0", f"--trainer.default_root_dir={tmp_path}"]
    cli = trainer_cli([*args, "--model.width=3"])
    cli.trainer.save_checkpoint(tmp_path / "x")
    saved = open_checkpoint(tmp_path / "x").state()["hyper_parameters"]
    assert saved["_class_path"] == name
    assert saved["_instantiator"] == "lightning.pytorch.cli.instantiate_module"
    for kind in (GivenLayer, pl.LightningModule):
        loaded = kind.load_from_checkpoint(tmp_path / "x", weights_only=True)
        assert type(loaded) is GivenLayer and loaded.hparams.width == 3
        assert isinstance(loaded.layer, torch.nn.Flatten)
    with pytest.raises(CheckpointError, match="is no subclass of GPTLightningModule in a module"):
        GPTLightningModule.load_from_checkpoint(tmp_path / "x")

    # A module that runs at its import lies beside the checkpoint.
    (tmp_path / "lying.py").write_text("open('ran', 'w').close()\nclass Layer: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for number, change in enumerate(
        (
            {"_class_path": "lying.Layer"},
            {"layer": {"class_path": "lying.Layer"}},
            {"layer": {"class_path": "torch.nn.Sequential", "init_args": {"a": [
                {"class_path": "lying.Layer"}]}}},
            {"draw": "lying.Layer"},
            {"layer": "lying.Layer"},
        )
    ):  # fmt: skip
        state = dict(open_checkpoint(tmp_path / "x").state())
        state["hyper_parameters"] = {**saved, **change}
        save_sharded(tmp_path / f"y{number}", [], {**state, "state_dict": {}})
        with pytest.raises(CheckpointError, match=r"lying\.Layer.*import the module of lying"):
            GivenLayer.load_from_checkpoint(tmp_path / f"y{number}", weights_only=True)
    state["hyper_parameters"] = {**saved, "layer": {"class_path": "os.system"}}
    save_sharded(tmp_path / "z", [], {**state, "state_dict": {}})
    with pytest.raises(CheckpointError, match=r"names os\.system as a class .* which is none"):
        GivenLayer.load_from_checkpoint(tmp_path / "z", weights_only=True)
    # A text stays a text.
    state["hyper_parameters"] = {**saved, "file": "lying.txt", "draw": "torch.relu"}
    check_classes(state, GivenLayer, "x")
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_file_of_others_imports_nothing(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """LightningCLI reads options of the model from a file named by ckpt_path."""
    (tmp_path / "lying.py").write_text("open('ran', 'w').close()\nclass Layer: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for entry in (
        {"_class_path": "lying.Layer"},
        {"class_path": "lying.Layer"},
        {"lr": 1.0, "layer": {"class_path": "lying.Layer"}},
        {"_instantiator": "lying.Layer"},
    ):
        torch.save({"state_dict": {}, "hyper_parameters": entry}, tmp_path / "x.ckpt")
        args = ["fit", "--config", config, f"--ckpt_path={tmp_path / 'x.ckpt'}"]
        assert "lying.Layer" in _fails(args, capsys)
    assert not (tmp_path / "ran").exists()


def test_the_configuration_is_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                "fit",
                "--config",
                config,
                "--trainer.strategy.tensor_model_parallel_size=2",
                "--print_config",
            ]
        )
    assert exit_.value.code == 0 and "tensor_model_parallel_size: 2" in capsys.readouterr().out


def test_an_option_of_a_model_can_be_null(capsys: pytest.CaptureFixture[str]) -> None:
    options = "num_query_groups=null", "mla={q_lora_rank: null, kv_lora_rank: 8}", "moe=null"
    file = Path(__file__).parents[3] / "configs" / "tiny_moe_cpu.yaml"
    words = [f"--model.config.{option}" for option in options]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(file), *words, "--print_config"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    for line in ("num_query_groups: null", "q_lora_rank: null", "kv_lora_rank: 8", "moe: null"):
        assert f" {line}\n" in out


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (  # the strategy is ours, and there is one device
            "strategy: {tensor_model_parallel_size: 2}",
            "1 ranks cannot be divided into model replicas of 2 ranks",
        ),
        *_slow(
            (
                "strategy: {class_path: megatron, init_args: {tensor_model_parallel_size: 2}}",
                "strategy: {class_path: MegatronStrategy, init_args: {...}}.",
            ),
            (
                "{strategy: megatron, tensor_parallel_size: 2}",
                "set --trainer.strategy=MegatronStrategy "
                "--trainer.strategy.tensor_model_parallel_size=...",
            ),
            ("precision: fp8", "set --trainer.precision=bf16-mixed or bf16-true."),
        ),
    ],
)
def test_a_wrong_file_says_what_to_set(
    trainer: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"trainer: {trainer if trainer[0] == '{' else '{' + trainer + '}'}\n" + TOY)
    assert message in _fails(["fit", "--config", str(path)], capsys)


def test_the_layout_is_printed_and_nothing_started(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["--trainer.devices=2", "--trainer.strategy.pipeline_model_parallel_size=2"]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", config, *two, "--print_layout"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 0 and "tensor 1 x pipeline 2 (2 stages)" in printed
    assert re.search(r"\nmodel\.layers\.3\.linear1 +1 +- +weight ", printed)
    line = _fails(["fit", "--config", config, "--trainer.strategy=auto", "--print_layout"], capsys)
    assert "--print_layout describes how MegatronStrategy" in line


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--trainer.strategy.pipeline_model_parallel_size=3",
            "cannot be divided into model replicas of 3",
        ),
        ("--trainer.strategy.tensor_paralel=2", "tensor_paralel"),
        (
            "--trainer.tensor_parallel_size=2",
            "is an option of the strategy: set --trainer.strategy=MegatronStrategy "
            "--trainer.strategy.tensor_model_parallel_size=...",
        ),
        ("--trainer.precision=fp8", "set --trainer.precision=bf16-mixed or bf16-true."),
        ("--trainer.num_nodes=0", "`num_nodes` must be a positive integer, but got 0."),
        (
            "--trainer.callbacks+=EarlyStopping",
            "EarlyStopping': the following arguments are required: monitor",
        ),
        *_slow(
            ("--trainer.strategy.tensor_model_parallel_size=0", "tensor_model_parallel_size is 0"),
            ("--trainer.max_steps=many", "many"),
            ("--trainer.accelerator=tpu", "torch_xla"),
            ("--trainer.precision=transformer-engine", "transformer_engine"),
            ("--trainer.max_time=soon", "soon"),
            (
                "--trainer.devices=-1",
                "`devices` selected with `CPUAccelerator` should be an int > 0.",
            ),
            (
                "--trainer.val_check_interval=5000",
                "`val_check_interval` (5000) must be less than or equal to the number of",
            ),
            (
                "--trainer.accumulate_grad_batches=0",
                "accumulate_grad_batches is 0; it must be a positive",
            ),
            (
                "--trainer.callbacks=NoSuch",
                'error: Parser key "trainer.callbacks": Expected a dot import path string: NoSuch',
            ),
        ),
    ],
)
def test_a_wrong_value_is_one_line(
    config: str, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _fails(["fit", "--config", config, option], capsys)


LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("Set it to alltoall.", {"model.config.moe.token_dispatcher_type": "flex"}),
    "list": ("Sinkhorn iterates", {"model.config.moe.router_load_balancing_type": ["sinkhorn"]}),
    "recipe": ("Set it to current.", {"scaling": "tensorwise"}),
    "plugin": ("Kitchen, NVIDIA's library", {"backend": "kitchen"}),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_choices_of_megatron_are_refused_with_our_reason(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, behind the choices, which parser of nested ones finds it."""
    reason, options = LEFT_OUT[case]
    plugin = "megatron_lightning.strategies.MegatronFP8Precision"
    if case == "recipe":
        recipe = {"class_path": "megatron_lightning.precision.FP8Recipe", "init_args": options}
        options = {"recipe": recipe}
    if case in ("recipe", "plugin"):
        plugins = [{"class_path": plugin, "init_args": options}]
        path = tmp_path / "plugin.yaml"
        path.write_text(json.dumps({"trainer": {"plugins": plugins}}))
        given = [f"--config={path}"]
    else:
        given = [f"--{key}={json.dumps(value)}" for key, value in options.items()]
    line = _fails(["fit", "--config", "configs/tiny_cpu.yaml", *given], capsys)
    assert line.count(reason) == 1 and "expected one of '" in line


def test_options_of_a_strategy_go_with_its_class(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trainer.strategy=megatron", "--trainer.strategy.tensor_model_parallel_size=2"]
    assert "as in --trainer.strategy=MegatronStrategy." in _fails(
        ["fit", "--config", config, *options], capsys
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ckpt_path=/no/such.ckpt"], "Checkpoint file not found: /no/such.ckpt"),
        (
            [
                "--data=PretrainDataModule",
                "--data.data_prefix=/no/such",
                "--data.sequence_length=8",
                "--data.batch_size=2",
            ],
            "/no/such.idx: cannot be read",
        ),
    ],
)
def test_a_wrong_path_is_told_before_a_process_starts(
    config: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(_: object) -> None:
        pytest.fail("processes are started")

    monkeypatch.setattr("megatron_lightning.launch.popen_launcher.ScriptLauncher._start", start)
    assert message in _fails(["fit", "--config", config, "--trainer.devices=2", *options], capsys)


def test_a_part_without_documents_is_told_before_a_process_starts(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "megatron_lightning.launch.popen_launcher.ScriptLauncher._start",
        lambda _: pytest.fail("started"),
    )
    with IndexedDatasetWriter("six", "uint16") as writer:
        for _ in range(6):
            writer.add_document(np.arange(1, 30))
    data = [
        "--data=PretrainDataModule",
        "--data.data_prefix=six",
        "--data.sequence_length=8",
        "--data.batch_size=2",
    ]
    reason = _fails(
        ["fit", "--config", config, "--trainer.devices=2", *data, "--data.split=95,5,0"], capsys
    )
    assert (
        "six: the valid part of split='95,5,0' gets 0 of 6 documents and no token; give it a "
        "larger weight" in reason
    )


@pytest.mark.slow  # two processes import torch
def test_a_setting_that_ranks_find_wrong_is_one_line(config: str) -> None:
    """The length of the data is known to the ranks only."""
    options = ["--trainer.devices=2", "--trainer.val_check_interval=5000"]
    command = [sys.executable, "-m", "megatron_lightning", "fit", "--config", config, *options]
    environment = os.environ | {"PYTHONPATH": str(Path(megatron_lightning.__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    said = [
        line for line in result.stderr.splitlines() if line.startswith("megatron-lightning: error:")
    ]
    assert (
        len(said) == 1
        and "`val_check_interval` (5000) must be less than or equal to the number of" in said[0]
    )


@pytest.mark.parametrize("error", [TypeError, pytest.param(ValueError, marks=pytest.mark.slow)])
def test_an_error_in_a_step_keeps_its_traceback(
    config: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error("in a step")

    monkeypatch.setattr(ToyModule, "training_step", fails)
    with pytest.raises(error, match="in a step"):
        main(["fit", "--config", config])


@pytest.mark.spread(5)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "there is no command 'train'"),
        (
            ["checkpoint", "consolidate", "/no/such/checkpoint", "/tmp/x.ckpt"],
            "/no/such/checkpoint",
        ),
        (
            [
                "preprocess",
                "--output-prefix",
                "x",
                "--input",
                "/no/such/file.jsonl",
                "--vocab-size",
                "64",
            ],
            "/no/such/file.jsonl",
        ),
        (["preprocess", "--output-prefix", "x", "--workers", "few"], "few"),
        (["preprocess", "--input", "x"], "output_prefix"),
        (
            ["checkpoint"],
            "checkpoint needs a tool: inspect, verify, reshard, consolidate, average, prune, "
            "upcycle.",
        ),
        (
            ["checkpoint", "prune", "x", "--keep-last", "two"],
            '"keep_last": expected int or null; got two',
        ),
        (
            [
                "fit",
                "--config=configs/tiny_moe_cpu.yaml",
                "--model.config.moe.router_load_balancing_type=sinkhorn",
            ],
            '"moe": Parser key "router_load_balancing_type": expected one of \'aux_loss\', '
            "'seq_aux_loss', 'global_aux_loss', 'none' or list; got sinkhorn",
        ),
        (
            ["fit", "--config=configs/finetune_tiny_cpu.yaml", "--model.peft.base=nf4"],
            "'nvfp4' or null; got nf4. That is a format of bitsandbytes",
        ),
        (
            [
                "fit",
                "--config=configs/tiny_moe_cpu.yaml",
                "--model.config.moe.token_dispatcher_type=flex",
            ],
            "\"token_dispatcher_type\": expected one of 'alltoall', 'allgather'; got flex",
        ),
    ],
)
def test_a_wrong_command_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _fails(args, capsys)


def test_an_interrupt_needs_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_lightning.cli._run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(["preprocess"])
    assert exit_.value.code == 130 and capsys.readouterr().err == ""


def test_an_error_in_generated_code_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions made by exec, as some libraries do, belong to no module."""
    generated: dict[str, Any] = {}
    exec("def fails(*_):\n    raise RuntimeError('not a setting')", generated)
    monkeypatch.setattr("megatron_lightning.cli._run", generated["fails"])
    with pytest.raises(RuntimeError, match="not a setting"):
        main(["preprocess"])


@pytest.mark.parametrize("command", ["preprocess", "generate", "schedule", "checkpoint"])
def test_help_names_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-lightning {command} [")


def test_only_the_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        (["--append-eod"], "append_eod", True),
        (["--append-eod", "--workers", "2"], "workers", 2),
        (["--append_eod=false"], "append_eod", False),
        (["--append-eod", "false"], "append_eod", False),
        ([], "json_keys", ["text"]),
        (["--json-keys", "text", "title"], "json_keys", ["text", "title"]),
        (["--json-keys", "text"], "json_keys", ["text"]),
        (["--json-keys=[text]"], "json_keys", ["text"]),
        ([], "input", "stdlib"),
        (["--input", "a.txt"], "input", "a.txt"),
        (["--input", "a.txt", "b.txt"], "input", ["a.txt", "b.txt"]),
        (["--config", "keys.yaml"], "json_keys", ["body", "title"]),
    ],
)
def test_options_reach_the_function(
    given: list[str], name: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys.yaml").write_text("json_keys: [body, title]")
    calls: list[dict[str, object]] = []

    @functools.wraps(preprocess)
    def record(**arguments: object) -> None:
        calls.append(arguments)

    monkeypatch.setattr("megatron_lightning.data.text.preprocess.preprocess", record)
    main(["preprocess", "--output-prefix", "x", *given])
    assert calls[0][name] == expected


STRATEGY = "--trainer.strategy"
FIRST_STAGE = "num_layers_in_first_pipeline_stage"


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        (f"{STRATEGY}.tensor_model_paralel_size=2", "tensor_model_parallel_size"),
        (f"{STRATEGY}.pipeline_options.{FIRST_STAGE[:-3]}ge=2", FIRST_STAGE),
        ("--ckpt_pth=x", "ckpt_path"),
        ("--model.num_layrs=2", "num_layers"),
        *_slow(
            ("--trainer.max_stepps=2", "trainer.max_steps"),
            ("--trainr.max_stepps=2", "trainer.max_steps"),
            ("--trainer.callbacks.monitr=loss", "monitor"),
        ),
    ],
)
def test_a_wrong_option_names_the_nearest(
    config: str, wrong: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", config, "--trainer.callbacks+=EarlyStopping", wrong]
    assert _fails(["fit", *options], capsys).endswith(f"Did you mean {nearest!r}?")


@pytest.mark.parametrize(
    ("valid", "wrong", "nearest"),
    [
        (
            "micro_batch_size: 2",
            "pipline_options: {variable_seq_lengths: true}",
            "pipeline_options.variable_seq_lengths",
        ),
        *_slow(
            ("micro_batch_size", "micro_bach_size", "micro_batch_size"),
            ("enable_checkpointing", "enabel_checkpointing", "trainer.enable_checkpointing"),
            ("trainer", "trainr", "trainer.strategy.init_args.micro_batch_size"),
            ("micro_batch_size: 2", f"pipeline_options: {{{FIRST_STAGE[1:]}: 2}}", FIRST_STAGE),
        ),
    ],
)
def test_a_wrong_key_of_a_file_names_the_nearest(
    config: str, valid: str, wrong: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.yaml").write_text(Path(config).read_text().replace(valid, wrong, 1))
    assert _fails(["fit", "--config", "wrong.yaml"], capsys).endswith(f"Did you mean {nearest!r}?")


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        (["chekpoint"], "checkpoint"),
        (["checkpoint", "prun", "x"], "prune"),
        (["checkpoint", "prune", "x", "--keep-lst", "2"], "keep_last"),
        (["schedule", "--rnks", "2"], "ranks"),
        (["preprocess", "--ouput-prefix", "x"], "output_prefix"),
        (["generate", "--tokeniser-model=x"], "tokenizer_model"),
    ],
)
def test_a_wrong_word_names_the_nearest(
    wrong: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"Did you mean {nearest!r}?" in _fails(wrong, capsys)


def test_a_model_in_the_place_of_a_command_s_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tuned"], ["tuned", "more"]):
        line = _fails(["serve", *words], capsys)
        assert line.endswith(f"arguments: {' '.join(words)}. Did you mean --checkpoint tuned?")
    line = _fails(["serve", "--chekpoint=tuned"], capsys)
    assert line.endswith("arguments: --chekpoint=tuned. Did you mean 'checkpoint'?")


def test_nothing_is_near_an_option_of_another_world(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fails(["fit", "--config", config, "--zzz=1"], capsys).endswith(
        "unrecognized arguments: --zzz=1"
    )


def test_the_lines_of_an_error_in_a_configuration_stay_together() -> None:
    message = (
        "Does not validate against any of the Union subtypes\nErrors:\n"
        "  - tokens: there is no such folder\n    Check the path.\n  - Expected a NoneType\n"
        "Given value: Namespace()"
    )
    assert in_one_line(message) == "tokens: there is no such folder Check the path."
