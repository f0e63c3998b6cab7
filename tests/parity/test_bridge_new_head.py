"""Models that differ on purpose from their folder's: what is missing has to be named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.errors import CheckpointError, ConfigError
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
import transformers

from tests.helpers.hf_folders import VOCABULARY, make_folder

HEAD: dict[str, Any] = {
    "architecture": "LlamaForSequenceClassification",
    "new_tensors": ["score.weight"],
    "left_out": ["lm_head.*"],
}


class Classifier(pl.LightningModule):
    """A new head on a folder's model."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoBridge.from_hf_pretrained(self.path, **HEAD).to_model()
            self.model.config.pad_token_id = 0

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        logits = self.model(input_ids=batch["ids"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(path: Path, target: Path, seed: int) -> tuple[list[float], Tensor]:
    pl.seed_everything(seed + torch.distributed.get_rank() * 7 if seed else 1)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (8, 12), generator=generator)
    rows: Any = [{"ids": row, "label": row[0] % 2} for row in ids]
    module = Classifier(path)
    run = fit("tp2", module, DataLoader(rows, batch_size=4), max_epochs=1)
    run.trainer.save_checkpoint(target)
    return run.losses, module.model.score.weight.detach().clone()


def test_a_new_head_is_drawn_equally_and_given_back(tmp_path: Path) -> None:
    path = make_folder("llama", tmp_path)
    ranks: Any = run_ranks(2, _fit, path, tmp_path / "c.ckpt", 3)  # seeds differ by rank
    (losses, head), (_, other) = ranks
    assert len(losses) == 2
    assert torch.equal(head, other)
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    again, info = transformers.LlamaForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again.score.weight, head)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_what_is_not_named_is_an_error(tmp_path: Path) -> None:
    path = make_folder("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"missing \(score.weight\).*unexpected"):
        AutoBridge.from_hf_pretrained(path, architecture=HEAD["architecture"]).to_model()
    with pytest.raises(CheckpointError, match=r"1 tensors are unexpected \(lm_head.weight\)"):
        AutoBridge.from_hf_pretrained(path, **{**HEAD, "left_out": []}).to_model()
    with pytest.raises(ConfigError, match="own model"):
        AutoBridge.from_hf_pretrained(path, **HEAD).to_model("gpt")
    with pytest.raises(ConfigError, match="own model"):
        AutoBridge.from_hf_pretrained(path, **HEAD).to_module()
    bridge = AutoBridge.from_hf_pretrained(path, **HEAD)
    model = bridge.to_model()
    bridge.save_hf_pretrained(model, tmp_path / "out")
    again = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again.score.weight, model.score.weight)  # type: ignore[union-attr,attr-defined]


def test_a_checkpoint_gets_a_new_head(tmp_path: Path) -> None:
    path, checkpoint = make_folder("llama", tmp_path), tmp_path / "c.ckpt"
    AutoBridge.import_ckpt(path, checkpoint)
    model: Any = AutoBridge.from_hf_pretrained(checkpoint, **HEAD).to_model()
    expected = transformers.LlamaForCausalLM.from_pretrained(path).model.state_dict()
    found = model.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert kept_folders(model)[""].origin == str(path)
    assert model.score.weight.abs().max() > 0
