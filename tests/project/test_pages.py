"""What the pages of the docs show is what the commands print and the programs compute."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megatron_lightning.cli import main
from megatron_lightning.config import PipelineOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.families import NanoGPT
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import TP2, Layout, run, single
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


class _Attention(nn.Module):
    """The attention of timm's vision transformers, by its names."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        heads = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(b, n, self.attn_dim))


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = _Attention(dim, 4)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(dim, 32))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(32, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _ViT(nn.Module):
    """A vision transformer of timm, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.full((1, 5, 16), 0.1))
        self.blocks = nn.Sequential(*(_Block(16) for _ in range(4)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def _vit_blocks() -> dict[str, Any]:
    """Return the names of the page's section about vision transformers."""
    page = (DOCS / "own_model.md").read_text().partition("## A vision transformer")[2]
    names: dict[str, Any] = {
        "__name__": "copied",
        "pl": pl,
        "torch": torch,
        "MegatronStrategy": MegatronStrategy,
    }
    for block in blocks(page.partition("\n## ")[0], "python"):
        exec(block.replace("import timm\n", ""), names)
    names["timm"] = SimpleNamespace(create_model=lambda name, num_classes: _ViT())
    return names


def _vit_losses(layout: Layout, folder: str) -> list[float]:
    names = _vit_blocks()
    pl.seed_everything(0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 3, 8, 8, generator=generator)
    loader: Any = DataLoader(TensorDataset(images, torch.arange(24) % 10), batch_size=8)
    strategy = "auto" if layout.options is None else names["strategy"]
    losses = Losses()
    trainer(strategy, max_steps=3, callbacks=[losses]).fit(names["ViT"](), loader)
    return losses.losses


@pytest.mark.timeout(120)  # two starts of processes
def test_the_table_of_the_vision_transformer_equals_one_device(tmp_path: Path) -> None:
    for losses in run(TP2, _vit_losses, tmp_path):
        assert losses == pytest.approx(single(_vit_losses), rel=1e-5)  # fp32 in another order


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
