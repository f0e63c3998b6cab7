"""What the pages of the docs show is what the commands print and the programs compute."""

from __future__ import annotations

import shlex
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.cli import main
from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.families import NanoGPT
from tests.helpers.trainers import trainer
from tests.project.test_readme import ROOT, blocks

DOCS = ROOT / "docs"


def _shown() -> list[Any]:
    """Return every command that a page shows with its output."""
    return [
        pytest.param(*block[2:].split("\n", 1), id=f"{page.name}: {block.splitlines()[0]}")
        for page in sorted(DOCS.glob("*.md"))
        for block in blocks(page.read_text(), "")
        if block.startswith("$ ")
    ]


@pytest.mark.parametrize(("command", "output"), _shown())
def test_a_command_prints_what_the_page_shows(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    assert capsys.readouterr().out.rstrip() == output.rstrip()


def test_the_plan_in_python_is_that_of_the_command() -> None:
    page = (DOCS / "planning.md").read_text()
    program, *_ = blocks(page, "python")
    names: dict[str, Any] = {}
    exec(program, names)
    [line] = [line for line in program.splitlines() if line.startswith("flops(")]
    value, comment = eval(line.partition("#")[0], names), line.partition("#")[2]
    assert f"{value:.3e}".replace("e+", "e") == comment.split(",")[0].strip()
    gibibytes = names["needed"].activations_bytes / 2**30
    assert f"{gibibytes:.2f}" in page.partition("```python")[0], "the fullest rank of the table"


_SIZES = (
    "num_hidden_layers=2, hidden_size=32, vocab_size=60, intermediate_size=32, "
    "num_attention_heads=4"
)


class _GPTConfig(SimpleNamespace):
    pass


class _GPT(NanoGPT):
    """nanoGPT's interface, smaller."""

    def __init__(self, config: _GPTConfig) -> None:
        super().__init__()
        assert config.n_layer == 12


def _classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the blocks of the page make, run one after the other with small
    models."""
    model: Any = ModuleType("model")
    model.GPT, model.GPTConfig = _GPT, _GPTConfig
    monkeypatch.setitem(sys.modules, "model", model)
    names: dict[str, Any] = {"__name__": "copied", "MegatronStrategy": MegatronStrategy}
    small = {
        "num_hidden_layers=8, hidden_size=512": _SIZES,
        "BertConfig(num_hidden_layers=8)": f"BertConfig({_SIZES})",
    }
    for block in blocks((DOCS / "own_model.md").read_text(), "python"):
        if "class NanoGPT" in block or "transformers import" in block:
            code = "\n".join(line for line in block.splitlines() if "pl.Trainer(" not in line)
            for shown, used in small.items():
                code = code.replace(shown, used)
            exec(code, names)
    return names


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["NanoGPT", "Llama", "Bert"])
def test_the_models_of_the_page_train_and_are_divided(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _classes(monkeypatch)
    ids = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    keys = ("ids", "targets") if name == "NanoGPT" else ("input_ids", "labels")
    loader: Any = DataLoader([dict.fromkeys(keys, row) for row in ids], batch_size=2)  # type: ignore[arg-type]
    module: pl.LightningModule = made[name]()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer(max_steps=1, enable_model_summary=True).fit(module, loader)
    assert any(not torch.equal(p, before[n]) for n, p in module.named_parameters())
    pages = (
        MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=4)
        if name == "NanoGPT"
        else made["strategy"]
    )
    described = pages.describe(made[name]())
    if name == "NanoGPT":
        for unit in ("transformer.wte", "transformer.wpe", "transformer.h.3", "lm_head"):
            assert f"model.{unit}" in described
    else:
        assert "ColumnParallelLinear" in described or "ColumnParallel" in described


def test_the_units_that_the_page_names_are_the_ones_found(monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [b for b in blocks((DOCS / "own_model.md").read_text(), "python") if "units=" in b]
    names: dict[str, Any] = {"PipelineOptions": PipelineOptions}
    exec(block, names)
    module = _classes(monkeypatch)["NanoGPT"]
    tables = [
        MegatronStrategy(pipeline_model_parallel_size=2, pipeline_options=options).describe(
            module()
        )
        for options in (None, names["pipeline_options"])
    ]
    assert tables[0] == tables[1]


def test_every_page_is_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in text]
    linked = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in missing if f"]({name}" not in linked] == []
