"""``megatron-lightning data show``, and the recipe for a small machine."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import docstring_parser
import numpy as np
import pytest
import torch
import yaml

from megatron_lightning.cli import main
from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.masked.masked_data import MaskedOptions
from megatron_lightning.data.pretraining.pretrain_data import PretrainOptions
from megatron_lightning.data.rows.row_options import FinetuneOptions, PreferenceOptions
from megatron_lightning.data.rows.row_view import PROMPT, TRAINED, histogram, sample_text
from megatron_lightning.modules import (
    FinetuneDataModule,
    MaskedDataModule,
    PreferenceDataModule,
    PretrainDataModule,
)
from tests.helpers.chats import CHATML, TWO, make_tokenizer, write_rows

pytest.importorskip("transformers")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[3]


def _config(folder: Path, rows: list[Any], **options: Any) -> str:
    make_tokenizer().save_pretrained(folder / "tokenizer")
    data = {
        "path": write_rows(folder / "chats.jsonl", rows), "tokenizer": str(folder / "tokenizer"),
        "sequence_length": 64, "batch_size": 1, "cache_dir": str(folder / "cache"), **options,
    }  # fmt: skip
    section = {"class_path": "FinetuneDataModule", "init_args": data}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"devices": 64}, "data": section}))
    return str(path)


def test_rows_are_shown_without_a_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the devices of the recipe nor a model are needed."""
    config = _config(tmp_path, [{"messages": TWO[:2]}, {"messages": TWO}])
    main(["data", "show", "--config", config, "--data.packing=offline", "--samples=1"])
    shown = capsys.readouterr().out
    assert "row 1 of 1: 64 positions, " in shown
    assert "document 2" in shown
    assert "the sky<|im_end|>" in shown
    assert "2 documents, " in shown
    main(["data", "show", "--config", config, "--data.sequence_length=128"])  # rows that are cut
    assert "row 2 of 2: 128 positions, " in capsys.readouterr().out
    main(["data", "show", "--config", config, "--data.packing=offline", "--json"])
    found = json.loads(capsys.readouterr().out)
    sample = found["samples"][0]
    assert found["num_samples"] == len(found["samples"]) == 1
    assert len(sample["tokens"]) == len(sample["labels"]) == 64
    assert "the sky<|im_end|>" in sample["text"]
    for wrong, message in (
        (["--samples=0"], "samples=0: set it to 1 or more"),
        (["--data.packing=all"], "packing"),
        (["--data.path=none.jsonl"], "none.jsonl: there is no such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["data", "show", "--config", config, *wrong])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_tools_of_data_start_without_lightning(tmp_path: Path) -> None:
    """Lightning's import takes longer than all that a tool does."""
    chats = _config(tmp_path, [{"messages": TWO}])
    with IndexedDatasetWriter(tmp_path / "ids", "int32") as writer:
        writer.add_document([*range(40), 1])
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 64}
    sections = {
        "model": {"class_path": "GPTLightningModule", "init_args": {"config": model}},
        "data": {
            "class_path": "megatron_lightning.modules.PretrainDataModule",
            "init_args": {"data_prefix": str(tmp_path / "ids"), "batch_size": 1, "split": "1"},
        },
    }
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump(sections))
    code = f"""
import sys
from megatron_lightning.cli import main
for command in ("show", "index"):
    main(["data", command, "--config={chats}"])
    main(["data", command, "--config={tokens}", "--data.sequence_length=8"])
main(["data", "show", "--config={tokens}", "--data.sequence_length=8", "--samples=1", "--json"])
main(["data", "show", "--prefix={tmp_path / "ids"}", "--json"])
assert not any(name.partition(".")[0] == "lightning" for name in sys.modules)
assert "torch._dynamo" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "train: 1 samples" in run.stdout
    assert "train: 5 samples" in run.stdout
    assert "1 documents in 1 rows" in run.stderr
    sample, document = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    assert sample["num_samples"] == 5 and len(sample["samples"][0]["tokens"]) == 8
    assert document == {"num_samples": 1, "samples": [{"tokens": [*range(40), 1]}]}


@pytest.mark.parametrize(
    ("module", "options", "positional"),
    [
        (FinetuneDataModule, FinetuneOptions, ["path"]),
        (PreferenceDataModule, PreferenceOptions, ["path"]),
        (PretrainDataModule, PretrainOptions, ["data_prefix", "sequence_length", "batch_size"]),
        (
            MaskedDataModule,
            MaskedOptions,
            ["data_prefix", "kind", "sequence_length", "batch_size"],
        ),
    ],
)
def test_parameters_of_a_data_module_are_fields(
    module: type, options: type, positional: list[str]
) -> None:
    """With types and descriptions, for YAML and --help."""
    parameters = inspect.signature(module).parameters
    hints = typing.get_type_hints(options)
    assert {name: one.annotation for name, one in parameters.items()} == {
        one.name: hints[one.name] for one in fields(options)
    }
    assert {name: one.default for name, one in parameters.items()} == {
        one.name: inspect.Parameter.empty if one.default is MISSING else one.default
        for one in fields(options)
    }
    kinds = {name: one.kind is one.KEYWORD_ONLY for name, one in parameters.items()}
    assert [name for name, is_named in kinds.items() if not is_named] == positional
    described = docstring_parser.parse(inspect.getdoc(module.__init__) or "").params
    assert [one.arg_name for one in described if one.description] == list(parameters)


def test_trained_tokens_have_their_own_style() -> None:
    tokenizer = make_tokenizer(template=CHATML)
    ids = np.array(tokenizer("what is blue<|im_end|>").input_ids)
    labels = np.append(ids[1:], -100)
    labels[:2] = -100
    tokens = np.append(ids, [0] * 5)
    sample = {"tokens": tokens, "labels": np.append(labels, [-100] * 5)}
    text = sample_text(sample, tokenizer.decode)
    styles = {str(span.style): text.plain[span.start : span.end] for span in text.spans}
    assert styles[TRAINED] == tokenizer.decode(ids[3:])
    assert styles[PROMPT] == tokenizer.decode(ids[:3])
    assert "5 tokens of padding" in text.plain


def test_bars_are_as_long_as_the_counts() -> None:
    lines = histogram(np.array([1, 1, 1, 1, 8, 8]), 8).plain.splitlines()
    assert lines[0].startswith("1 to 1 " + "█" * 48 + " 4")
    assert lines[7].startswith("8 to 8 " + "█" * 24 + " 2")
    assert lines[-1] == "6 documents, 20 tokens, median 1"


def test_a_longer_document_is_in_no_bar() -> None:
    lines = histogram(np.array([7, 8, 9]), 8).plain.splitlines()
    assert lines[7].endswith(" 1")
    assert lines[-1].endswith("1 longer than 8")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a folder and chats that the example makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    example = runpy.run_path(str(ROOT / "examples" / "finetune.py"))
    example["make_model"](tmp_path / "demo" / "chat_model")
    example["make_chats"](tmp_path / "demo" / "chats.jsonl", 60)
    main([
        "fit", f"--config={ROOT / 'configs' / 'finetune_tiny_cpu.yaml'}", "--trainer.devices=1",
        "--trainer.strategy.tensor_model_parallel_size=1", "--trainer.enable_progress_bar=false",
    ])  # fmt: skip
    rows = next((tmp_path / "demo" / "finetune").glob("*/metrics.csv")).read_text().splitlines()
    losses = [float(row) for row in _column(rows, "val_loss")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main(["adapters", "export", "demo/finetune/checkpoints/last.ckpt", "demo/adapter"])
    base: Any = AutoModelForCausalLM.from_pretrained("demo/chat_model")
    tokenizer = AutoTokenizer.from_pretrained("demo/chat_model")
    turns = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "1 + 2 = 3."},
    ]
    ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(turns, tokenize=False)).input_ids])
    with torch.no_grad():
        before = float(base(ids, labels=ids).loss)
        tuned = peft.PeftModel.from_pretrained(base, "demo/adapter")
        assert float(tuned(ids, labels=ids).loss) < 0.9 * before


def _column(rows: list[str], name: str) -> list[str]:
    at = rows[0].split(",").index(name)
    return [value for row in rows[1:] if (value := row.split(",")[at])]
