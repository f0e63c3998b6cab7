"""Models of Hugging Face folders train under every layout as in plain Lightning, and each rank
reads the bytes that it owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.hf_models import transformers_model
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
from tests.helpers.hf_folders import MODELS, VOCABULARY, make_folder

SEQUENCE, BATCH, STEPS = 12, 8, 3
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero1": (2, {}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, PIPELINE),
    "tp2 x pp2": (4, {"tensor_model_parallel_size": 2} | PIPELINE),
    "pp2 x fsdp": (4, {"data_parallel": "fsdp"} | PIPELINE | {"micro_batch_size": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
FEW = [
    ("llama", "tp2 x pp2"), ("llama", "fsdp"), ("tied", "pp2"), ("gpt2", "tp2"), ("experts", "ep2"),
    ("llama", "cp2"), ("experts", "pp2 x fsdp"),
]  # fmt: skip


class FromFolder(pl.LightningModule):
    """A user's module that starts from a folder."""

    sequence_dims = {"ids": 1, "labels": 1}  # noqa: RUF012 (as a user writes it)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoBridge.from_hf_pretrained(self.path).to_model()

    def num_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] >= 0).sum()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        logits = self.model(input_ids=batch["ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Outcome(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    read: int
    owned: int


def _fit(path: Path, options: dict[str, Any] | None, batch_size: int) -> Outcome:
    text = torch.randint(
        0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(5)
    )
    rows: Any = [{"ids": t[:-1], "labels": t[1:]} for t in text]
    counted, read = [0, 0], transformers_model.read_weights

    def count(module: Any, *args: Any) -> int:
        num_bytes = read(module, *args)
        if num_bytes:
            own = {id(p): p for p in module.parameters() if p.numel()}.values()
            local = [getattr(p, "_local_tensor", p) for p in own]
            counted[:] = num_bytes, sum(p.nbytes for p in local)
        return num_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_lightning.bridge.hf_models.transformers_model.read_weights", count)
        run = fit(options, FromFolder(path), DataLoader(rows, batch_size=batch_size), max_epochs=1)
    return Outcome(run.losses, *counted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of every model."""
    parent = tmp_path_factory.mktemp("folders")
    return {name: make_folder(name, parent) for name in MODELS}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in FEW else pytest.mark.slow)
        for name in MODELS
        for layout in LAYOUTS
        if name == "experts" or layout != "ep2"
    ],
)
def test_a_folder_trains_as_in_plain_lightning(
    folders: dict[str, Path], name: str, layout: str
) -> None:
    num_ranks, options = LAYOUTS[layout]
    (plain,) = run_ranks(1, _fit, folders[name], None, BATCH)
    num_data_ranks = 2 if {"fsdp", "zero1", "ep2"} & set(layout.split()) else 1
    ranks = run_ranks(num_ranks, _fit, folders[name], options, BATCH // num_data_ranks)
    losses = [sum(values) / len(ranks) for values in zip(*(r.losses for r in ranks), strict=True)]
    # fp32, sums in another order.
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    for rank in ranks:
        assert 0 < rank.read == rank.owned
