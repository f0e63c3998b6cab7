"""The layout of a module is printed without ranks; Lightning's summary shows the full
model."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import ColumnParallel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.toy import ToyData, ToyModule
from tests.lightning.support import DP2, ONE, PP2, TP2_TOY, Layout, layouts, run

CONFIG = tiny_config(
    num_layers=4, hidden_size=16, vocab_size=67, share_embeddings_and_output_weights=True
)


def _rows(text: str) -> dict[str, list[str]]:
    """Return the first line of every module, as columns."""
    lines = [re.split(r"  +", line) for line in text.splitlines()[2:]]
    return {columns[0]: columns[1:] for columns in lines if columns[0]}


def test_every_layer_is_described() -> None:
    strategy = MegatronStrategy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    text = strategy.describe(GPTLightningModule(CONFIG))
    assert text.startswith("tensor 2 x pipeline 2 (2 stages), sequence parallel on, ")
    assert text.splitlines()[1].split() == ["module", "stage", "style", "local", "shape", "axes"]
    rows = _rows(text)
    words = ["0", "VocabParallel", "weight 34x16 of 67x16", "tp"]
    assert rows["model.embedding.word_embeddings"] == words
    first, last = (f"model.decoder.layers.{index}" for index in (0, 3))
    fc2 = ["1", "RowParallel", "weight 16x32 of 16x64", "tp"]
    assert rows[f"{last}.mlp.linear_fc2"] == fc2
    norm = ["0", "SequenceParallel", "weight 16", "gradients summed over tp"]
    assert rows[f"{first}.input_layernorm"] == norm
    assert rows["model.output_layer"][:3] == ["1", "VocabParallel", "weight 34x16 of 67x16"]
    assert "tied to model.embedding.word_embeddings.weight" in rows["model.output_layer"][3]
    assert rows["model.loss"] == ["all", "VocabParallelLoss", "-", "-"]


class Built(pl.LightningModule):
    """Is built at once, with a layer that the plan leaves out and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.trainer_like = object()


def test_a_module_stays_as_it_is_and_a_plan_of_the_strategy_is_used() -> None:
    module = Built()
    before = {name: id(tensor) for name, tensor in module.named_parameters()}
    plan = ShardingPlan(modules={"net.0": ColumnParallel()})
    strategy = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan=plan)
    text = strategy.describe(module)
    assert re.search(r"net\.0 +0 +ColumnParallel +weight 3x4 of 6x4 +tp\n +bias 3 of 6", text)
    assert _rows(text)["net.1"] == ["0", "-", "weight 6", "replicated"]
    assert {name: id(tensor) for name, tensor in module.named_parameters()} == before
    assert type(module.net[0]) is nn.Linear
    with pytest.raises(ConfigError, match=r"no module of Built declares how it is split"):
        MegatronStrategy(tensor_model_parallel_size=2).describe(module)


class Loads(ToyModule):
    """Reads its weights when it is built, which cannot be on ``meta``."""

    def configure_model(self) -> None:
        super().configure_model()
        if self.model.head.weight.is_meta:
            raise RuntimeError("no data")


def test_layers_that_configure_model_builds_are_described() -> None:
    for module in (ToyModule(), Loads()):
        rows = _rows(MegatronStrategy(pipeline_model_parallel_size=2).describe(module))
        assert rows["model.layers.3.linear1"][0] == "1" and module.model is None


def _summary(layout: Layout, folder: str, rich: bool) -> list[str]:
    """Return what rank 0 prints: the callback's table and our line."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    callback: Any = RichModelSummary() if rich else ModelSummary()
    with contextlib.redirect_stdout(stream):
        layout.trainer(folder, max_steps=1, callbacks=[callback], limit_val_batches=0).fit(
            ToyModule(), layout.data_module()
        )
    kept = {"_summary", "summarize"} & vars(callback).keys()
    return [stream.getvalue(), *kept]


@pytest.mark.spread(1)
@layouts(PP2, TP2_TOY, ONE)
@pytest.mark.parametrize("rich", [False, True])
def test_the_summary_shows_the_full_model(layout: Layout, rich: bool, tmp_path: Path) -> None:
    if rich:
        pytest.importorskip("rich")
    module = ToyModule()
    module.configure_model()
    size = sum(parameter.numel() for parameter in module.parameters())
    text, *kept = run(layout, _summary, tmp_path, rich)[0]
    assert not kept
    count = f"{size / 1000:.1f} K"
    assert re.search(rf"Total params\W*{count}|{count} +Total params", text), text
    assert "total flops" not in text.lower()
    if layout.ranks > 1:
        assert f"The model has {size:,} parameters; this rank holds" in text
        assert ("schedule" in text) == (layout is PP2)


class Unsynced(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self._loss(batch)
        self.log("plain", loss, on_epoch=True, on_step=False)
        return loss


def _advice(layout: Layout, folder: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        fit = layout.trainer(folder, max_epochs=1, limit_val_batches=0)
        warnings.simplefilter("always")
        fit.fit(Unsynced(), layout.data_module())
    return any("sync_dist=True" in str(warning.message) for warning in caught)


def test_the_advice_to_log_over_replicas_is_given_where_there_are_some(tmp_path: Path) -> None:
    assert run(DP2, _advice, tmp_path)[0] and not run(PP2, _advice, tmp_path)[0]


def test_a_module_that_was_divided_is_not_full(tmp_path: Path) -> None:
    run(PP2, _describe_after, tmp_path)


def _describe_after(layout: Layout, folder: str) -> None:
    module, fit = ToyModule(), layout.trainer(folder, max_steps=1, limit_val_batches=0)
    fit.fit(module, ToyData())
    assert isinstance(fit.strategy, MegatronStrategy)
    with pytest.raises(ConfigError, match=r"holds only a rank's part .* Describe a new module"):
        fit.strategy.describe(module)
    with torch.device("meta"):
        fit.strategy.describe(ToyModule())


class _Mismatched(pl.LightningModule):
    """An example that does not fit: the run on it fails, and torch would print why."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.example_input_array = torch.zeros(1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def test_a_run_on_an_example_that_fails_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    table = MegatronStrategy(pipeline_model_parallel_size=2).describe(_Mismatched())
    assert "net.3" in table
    assert caplog.records == []
