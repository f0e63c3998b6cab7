"""Adapters of stacked experts equal stock ``peft``'s ``target_parameters``: training, folders,
merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")
pytest.importorskip("peft", "0.21")

from megatron_lightning.models import GPTModel
from megatron_lightning.peft import LoRA, load_adapters, merge_adapters, save_adapters
from tests.helpers.hf_weights import from_llama
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks
from tests.parity.test_hf_experts import mixtral

STEPS, BATCH = 3, 4
TEXT = torch.randint(0, 67, (STEPS * BATCH, 17), generator=torch.Generator().manual_seed(2))
TP, EP = "tensor_model_parallel_size", "expert_model_parallel_size"
ETP, PP = "expert_tensor_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "ep": (2, 2, {EP: 2}),
    "etp": (2, 1, {TP: 2, ETP: 2}),
    "tp-ep": (2, 1, {TP: 2, EP: 2, ETP: 1}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, "micro_batch_size": 2}),
    "tp-ep-etp": (4, 2, {TP: 2, EP: 2, ETP: 2}),
}


def _base() -> tuple[Any, GPTModel]:
    torch.manual_seed(0)
    theirs, config = mixtral()
    model = GPTModel(config)
    model.load_state_dict(from_llama(theirs.state_dict(), config))
    return theirs, model


def _adapted() -> GPTModel:
    _, model = _base()
    LoRA(r=4, target_modules=["experts.linear_fc1", "experts.linear_fc2"]).apply(model)
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1, torch.Generator().manual_seed(number))
    return model


class _Tuned(pl.LightningModule):
    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder
        if folder is None:
            self.model: Any = _adapted()
        else:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(_base()[0], folder, is_trainable=True)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        x, y = batch["tokens"], batch["labels"]
        if self.folder is None:
            losses: Tensor = self.model(x, y).mean()
            return losses
        return nn.functional.cross_entropy(self.model(x).logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p for p in self.parameters() if p.requires_grad]}], 0.3)


def _train(
    folder: str | None, options: dict[str, Any] | None, data: int = 1
) -> tuple[list[float], list[float]]:
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
    return fit_losses(
        options, _Tuned(folder), DataLoader(rows, batch_size=BATCH // data), steps=STEPS
    )


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "etp" else pytest.mark.slow) for name in LAYOUTS],
)
def test_experts_train_as_in_stock_peft(layout: str, tmp_path: Path) -> None:
    save_adapters(_adapted(), tmp_path / "peft")
    [(losses, norms)] = run_ranks(1, _train, str(tmp_path / "peft"), None)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _train, None, options, data, timeout_s=110)
    for step, loss in enumerate(losses):
        own = sum(rank[0][step] for rank in ranks) / world
        assert own == pytest.approx(loss, rel=1e-6)  # fp32, sums in another order
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


@torch.no_grad()
def test_folders_and_merges_of_experts(tmp_path: Path) -> None:
    from peft import PeftModel

    model, x = _adapted(), TEXT[:2]
    save_adapters(model, tmp_path / "peft")
    stock = PeftModel.from_pretrained(_base()[0], tmp_path / "peft")
    torch.testing.assert_close(model(x), stock(x).logits, rtol=0, atol=2e-6)
    again = load_adapters(_base()[1], tmp_path / "peft")
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    weights = from_llama(stock.merge_and_unload().state_dict(), model.config)
    merged = merge_adapters(model).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=2e-7, msg=name)
    # Experts in another order are another model.
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert (merged[name].flip(0) - weights[name]).abs().max() > 1e-2
