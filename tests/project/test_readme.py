"""Run the examples of the README, the tour and the docs, or at least parse them by the program that
would run them."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from megatron_lightning.checkpoint import TensorShards, save_sharded
from megatron_lightning.cli import main
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.models import GPTModel, llama_hf_plan
from megatron_lightning.pipeline import schedules
from megatron_lightning.pipeline.schedules.stage_layouts import parse_layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> list[str]:
    return [
        line
        for block in blocks(text, "bash")
        for line in re.sub(r" \\\n *", " ", block).splitlines()
    ]


COMMANDS = list(dict.fromkeys(commands_of(README) + commands_of(TOUR)))


def commands(*programs: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(programs)]


def test_every_command_is_checked_here() -> None:
    checked = commands("make", "pip", "python", "megatron-lightning", "torchrun", "srun")
    assert checked == COMMANDS
    assert len(COMMANDS) >= 12


def test_make_and_pip() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {command.split()[1] for command in commands("make")} <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    for command in commands("pip"):
        assert command == "pip install -c constraints.txt '.[finetune]'"
        assert (ROOT / "constraints.txt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes import torch and Lightning; seconds on an idle machine
def test_the_example_of_a_module_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "my_module.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert run.returncode == 0 and "terminate called" not in run.stderr, run.stderr
    assert float(run.stdout.split("loss ")[-1]) < 0.1  # ln 2 = 0.69 before training


def test_the_quick_start_makes_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = blocks(README, "python")
    fits = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda *arguments: fits.append(arguments))
    names: dict[str, Any] = {"pl": pl, "MyModule": pl.LightningModule, "my_data": None}
    exec(program, names)
    [(trainer, module, _)] = fits
    assert trainer.strategy is names["strategy"] and isinstance(module, pl.LightningModule)


def test_the_change_of_two_lines_is_python() -> None:
    [change] = blocks(README, "diff")
    before, after = (
        "\n".join(line[2:] for line in change.splitlines() if line[:1] in ("", " ", sign))
        for sign in "-+"
    )
    assert change.count("\n+ ") + change.startswith("+ ") == 2
    ast.parse(before)
    ast.parse(after)


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 180
    assert len(re.findall(r"^```\w", README, re.MULTILINE)) <= 8
    prose = re.sub(r"^(```.*?^```|\|.*?$|\[!.*?$|!.*?$)", "", README, flags=re.M | re.S)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 900


def test_losses_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, losses in enumerate([[7.5, 6.25], [5.0]]):
        logger = TensorBoardLogger(tmp_path, name="logs", version=run)
        for step, loss in enumerate(losses):
            logger.log_metrics({"val_loss": loss}, step=10 * step + 9)
        logger.finalize("success")
    monkeypatch.setattr(sys, "argv", ["show_losses.py", str(tmp_path / "logs")])
    runpy.run_path(str(ROOT / "examples" / "show_losses.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "version_0  step: loss  10: 7.500, 20: 6.250",
        "version_1  step: loss  10: 5.000",
    ]
    monkeypatch.setattr(sys, "argv", ["show_losses.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"usage: python examples/show_losses\.py FOLDER"):
        runpy.run_path(str(ROOT / "examples" / "show_losses.py"), run_name="__main__")


def fit_options() -> list[list[str]]:
    """Return what follows ``fit`` in every command that trains, under whatever starter."""
    found = [shlex.split(command.split(" fit ")[1]) for command in COMMANDS if " fit " in command]
    started = commands("megatron-lightning fit", "torchrun", "srun")
    assert len(found) == len([command for command in started if " doctor" not in command])
    return found


@pytest.mark.spread(3)
@pytest.mark.parametrize("options", fit_options(), ids=" ".join)
def test_fit_takes_the_options(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["megatron-lightning"])
    with pytest.raises(SystemExit) as exit_:
        main(
            ["fit", *[option for option in options if option != "--print_config"], "--print_config"]
        )
    assert not exit_.value.code, capsys.readouterr().err
    named = r"class_path: megatron_lightning\.(?:strategies\.)?MegatronStrategy"
    assert re.search(named, capsys.readouterr().out)


def test_torchrun_takes_the_options() -> None:
    from torch.distributed.run import get_args_parser

    [command] = commands("torchrun")  # the tour's
    parsed = get_args_parser().parse_args(shlex.split(command)[1:])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.module) == ("4", "8", True)
    assert (parsed.training_script, parsed.training_script_args[0]) == ("megatron_lightning", "fit")


def save(path: Path, vocab_size: int, *, layers: int = 2) -> GPTModel:
    config = TransformerConfig(
        num_layers=layers, hidden_size=16, num_attention_heads=2, vocab_size=vocab_size
    )
    model = GPTModel(config)
    shards = [
        TensorShards.full(f"state_dict.model.{name}", tensor)
        for name, tensor in model.named_parameters()
    ]
    shards.append(TensorShards.full("half", torch.arange(-4.0, 4.0).to(torch.bfloat16)))
    save_sharded(path, shards, {"hyper_parameters": {"config": asdict(config)}, "state_dict": {}})
    return model


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text and the checkpoint that the commands name."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "stdlib").write_text((ROOT / "README.md").read_text())
    save(folder / "demo" / "checkpoints" / "last.ckpt", 400)
    return folder


def run_here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of the README on little text: other sizes, the same options."""
    monkeypatch.chdir(folder)
    small = {"2048": "400", "stdlib": "./stdlib"}
    main(
        [
            *(small.get(word, word) for word in shlex.split(command)[1:]),
            *(["--max-new-tokens=4"] if "generate" in command else []),
        ]
    )


def _needs_the_hub(command: str) -> bool:
    return "--tokenizer-type huggingface" in command


def test_preprocess_generate_and_consolidate(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands(
        "megatron-lightning preprocess",
        "megatron-lightning generate",
        "megatron-lightning checkpoint",
    ):
        if "parallel" not in command and not _needs_the_hub(command):
            run_here(command, workplace, monkeypatch)
    assert "def __init__(self" in capsys.readouterr().out
    assert "state_dict" in torch.load(workplace / "demo" / "plain.ckpt", weights_only=True)


@pytest.mark.slow  # four processes import torch
def test_generate_on_a_layout(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands("megatron-lightning preprocess", "megatron-lightning generate"):
        if not _needs_the_hub(command):
            run_here(command, workplace, monkeypatch)
    assert "import " in capsys.readouterr().out


def test_the_reader_of_the_docs_reads_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The page ends with it.
    *_, program = blocks((ROOT / "docs" / "checkpoints.md").read_text(), "python")
    assert len(program.splitlines()) <= 51
    reader: dict[str, Any] = {"__name__": "reader"}
    exec(program, reader)
    folder = tmp_path / "checkpoint"
    model = save(folder, 50)
    reader["main"](folder)
    assert "state_dict.model.output_layer.weight (50, 16) float32" in capsys.readouterr().out
    manifest = reader["read_manifest"](folder)
    for name, parameter in model.named_parameters():
        read = reader["read_tensor"](folder, manifest, f"state_dict.model.{name}")
        assert np.array_equal(read, parameter.detach().numpy())
    assert reader["read_tensor"](folder, manifest, "half").tolist() == list(range(-4, 4))
    [shards] = folder.glob("tensors.*")
    shards.write_bytes(shards.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match="damaged"):
        reader["main"](folder)


def test_the_schedules_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "schedules.md").read_text()
    [program], [shell] = blocks(page, "python"), blocks(page, "bash")
    exec(program, {})
    step_time, bubble, peaks = capsys.readouterr().out.split(maxsplit=2)
    # 57 without messages.
    assert 57 < float(step_time) < 60 and 0.15 < float(bubble) < 0.2 and peaks == "(5, 7, 9, 11)\n"
    monkeypatch.chdir(tmp_path)
    for command in shell.splitlines():
        main(shlex.split(command)[1:])
    assert (tmp_path / "pictures" / "schedules-p4-m8.svg").read_text() == (
        ROOT / "docs" / "schedules.svg"
    ).read_text()
    [rows, options] = map(yaml.safe_load, blocks(page, "yaml"))
    assert schedules.resolve(rows["pipeline_schedule"], num_ranks=2).table(2)
    assert set(options["pipeline_options"]) == {field.name for field in fields(PipelineOptions)}
    parse_layout(options["pipeline_options"]["pipeline_model_parallel_layout"])


def test_the_picture_of_the_readme_is_what_its_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [command] = commands("megatron-lightning schedule")
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command)[1:])
    assert (tmp_path / "pictures" / "schedule-zbv-p4-c2-m8.svg").read_text() == (
        ROOT / "docs" / "zbv.svg"
    ).read_text()


def test_the_table_of_the_docs_is_the_one_of_the_package() -> None:
    program, *_ = blocks((ROOT / "docs" / "parallelism.md").read_text(), "python")
    config = SimpleNamespace(num_key_value_heads=2, num_attention_heads=4)
    names: dict[str, Any] = {"config": config}
    exec(program, names)
    assert repr(names["plan"]) == repr(llama_hf_plan(config))


def test_muon_and_adamw_of_the_docs_share_the_parameters() -> None:
    _, program = blocks((ROOT / "docs" / "parallelism.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(program, names)
    module = torch.nn.ModuleDict(
        {
            "model": torch.nn.ModuleDict(
                {"layers": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)}
            )
        }
    )
    groups = names["configure_optimizers"](module).param_groups
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [
        [(3, 3)],
        [(3,), (2, 3), (2,)],
    ]


def test_what_the_pages_import_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    nodes = [
        node
        for page in pages
        for block in blocks(page.read_text(), "python")
        for node in ast.walk(ast.parse(block))
    ]
    imports = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and "megatron" in node.module
    ]
    assert len(imports) > 10
    for node in imports:
        for alias in node.names:
            assert hasattr(import_module(str(node.module)), alias.name), (
                f"{node.module} has no {alias.name}"
            )


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    for path in re.findall(r"`((?:configs|examples|docs)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


def test_the_architecture_is_that_of_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {
        path.relative_to(ROOT / "megatron_lightning").as_posix()
        for path in (ROOT / "megatron_lightning").rglob("*.py")
    }
    files |= {
        path.relative_to(ROOT).as_posix()
        for folder in ("strategies", "callbacks")
        for path in (ROOT / folder).rglob("*.py")
    }
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert any(file == name or file.endswith(f"/{name}") for file in files), name
    for path in (ROOT / "strategies").rglob("[!_]*.py"):
        room = path.relative_to(ROOT).parent.as_posix()
        assert f"`{room}/{path.name}`" in text or (room != "strategies" and f"`{room}/`" in text), (
            path
        )
    for folder in (ROOT / "megatron_lightning").iterdir():
        assert (
            folder.name.startswith("_")
            or not folder.is_dir()
            or re.search(rf"\b{folder.name}  ", text)
        ), folder.name
