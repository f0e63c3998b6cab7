"""Names of Megatron-LM, Megatron Bridge and NeMo, typed by their users."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from lightning.pytorch import Trainer

import megatron_lightning
from megatron_lightning import callbacks
from megatron_lightning.cli import main
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.names.lookup import CALLBACK, describe, option_named, options, parsed
from megatron_lightning.names.others import ATTRIBUTES, TOKENIZER_TYPES
from megatron_lightning.resilience import Restarts
from megatron_lightning.strategies import MegatronStrategy

ROOT = Path(__file__).parents[3]


def _error(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_fit_answers_every_option_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = _error(
        ["fit", "--lr", "1e-4", "--data-path", "x", "--ckpt-format=torch_dist", "--mock-data",
         "--train-iters", "10", "--swiglu", "--tp-comm-overlap", "--log-throughput"],
        capsys,
    )  # fmt: skip
    for answer in (
        "--lr is --model.learning_rate here",
        "--data-path is --data.data_prefix here",
        "--ckpt-format is not needed: one format",
        "--mock-data is --data.mock=true here",
        "--train-iters is --trainer.max_steps here",
        "--swiglu is --model.config.activation=swiglu here",
        "--tp-comm-overlap is not available: ",
        "--log-throughput is the callback ThroughputMonitor here",
    ):
        assert answer in line


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["fit", "train.train_iters=10"], "train.train_iters is --trainer.max_steps here"),
        (["fit", "--model.lr=1"], "lr is --model.learning_rate here"),
        (
            ["fit", "--trainer.strategy.use_distributed_optimizer=true"],
            "use_distributed_optimizer is data_parallel=zero1 here",
        ),
        (["pretrain"], "pretrain is fit here"),
        (["finetune"], "finetune is fit here"),
        (["run_recipe"], "fit --config NAME"),
        (["quantize"], "quantize is not available"),
        (["launch"], "launch is fit here"),
    ],
)
def test_names_are_answered_where_they_are_typed(
    args: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in _error(args, capsys)


def test_attributes_and_arguments_are_answered() -> None:
    with pytest.raises(AttributeError, match=r"initialize_model_parallel is ParallelContext here"):
        _ = megatron_lightning.initialize_model_parallel  # type: ignore[attr-defined]
    from megatron_lightning.bridge import AutoBridge

    with pytest.raises(AttributeError, match=r"to_megatron_provider is to_module here"):
        _ = AutoBridge.__new__(AutoBridge).to_megatron_provider  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"use_distributed_optimizer is data_parallel=zero1 here"):
        MegatronStrategy(use_distributed_optimizer=True)  # type: ignore[call-arg]


def test_megatrons_tokenizer_types_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a few words"}\n')
    options = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "out")]
    main(["preprocess", *options, "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"])
    assert list(tmp_path.glob("out*.bin"))
    assert len(list(parsed(TOKENIZER_TYPES))) == 9


def _option_type(owner: type, name: str) -> type | None:
    """Return the dataclass behind an option of a class, or None where it is a plain value.

    Raises:
        StopIteration: If there is no such option.
    """
    inits = (kind.__init__ for kind in owner.__mro__ if "__init__" in vars(kind))
    init = next(init for init in inits if name in inspect.signature(init).parameters)
    hint = get_type_hints(owner if is_dataclass(owner) else init).get(name)
    return next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)


def test_every_option_of_the_table_exists() -> None:
    missing: list[str] = []
    roots = {
        ("trainer", "strategy"): MegatronStrategy,
        ("trainer",): Trainer,
        ("model",): GPTLightningModule,
        ("data",): PretrainDataModule,
        ("restarts",): Restarts,
    }
    for name in options().values():
        path = tuple(name.here.split("."))
        root = next((root for root in roots if path[: len(root)] == root), None)
        if not name.is_option or root is None:
            continue
        owner: type | None = roots[root]
        try:
            for step in path[len(root) :]:
                assert owner is not None, f"{name.here}: {step} is below a plain value"
                owner = _option_type(owner, step)
        except StopIteration:
            missing.append(name.here)
    assert not missing


def test_every_class_of_the_tables_exists() -> None:
    rooms = "strategies|modules|models|callbacks|checkpoint|optim|config|peft|parallel|resilience"
    for name in [*parsed(ATTRIBUTES), *options().values()]:
        if name.here.startswith(CALLBACK):
            assert hasattr(callbacks, name.here.removeprefix(CALLBACK)), name.here
        elif re.fullmatch(rf"({rooms}|bridge)\.[\w.]+", name.here):
            assert pydoc.locate(f"megatron_lightning.{name.here}") is not None, name.here


def test_the_page_prints_the_table() -> None:
    page = (ROOT / "docs" / "from_megatron.md").read_text()
    assert describe() in page, "print(megatron_lightning.names.lookup.describe())"
    assert len(options()) > 200
    assert option_named("--num-layers-per-virtual-pipeline-stage") is not None


def test_the_tables_are_read_when_asked() -> None:
    code = "import sys, megatron_lightning.cli_parser; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "names.options" not in done.stdout
    assert "names.others" not in done.stdout
