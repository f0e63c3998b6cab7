"""Adapters of stacked experts of untouched models equal stock ``peft``'s ``target_parameters``."""

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

from megatron_lightning.errors import ConfigError
from megatron_lightning.peft import LoRA, load_adapters, merge_adapters, save_adapters
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks
from tests.parity.test_hf_experts import mixtral

STEPS, BATCH = 3, 4
TEXT = torch.randint(0, 67, (STEPS * BATCH, 17), generator=torch.Generator().manual_seed(2))
TP, EP, PP = (f"{kind}_model_parallel_size" for kind in ("tensor", "expert", "pipeline"))
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "ep": (2, 2, {EP: 2}),
    "tp": (2, 1, {TP: 2}),
    "pp": (2, 1, {PP: 2, "micro_batch_size": 2}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
    "zero1": (2, 2, {}),
    "ep-fsdp": (4, 4, {EP: 2, "data_parallel": "fsdp"}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, "micro_batch_size": 2}),
}
STACKED = LoRA(
    r=4,
    target_modules=["q_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    rank_pattern={"experts.down_proj": 3},
)


def _base() -> Any:
    torch.manual_seed(0)
    return mixtral()[0]


def _adapted() -> Any:
    model = STACKED.apply(_base())
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1, torch.Generator().manual_seed(number))
    return model


class _Tuned(pl.LightningModule):
    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None and self.folder is None:
            self.model = _adapted()
        elif self.model is None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(_base(), self.folder, is_trainable=True)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        logits = self.model(batch["tokens"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p for p in self.parameters() if p.requires_grad]}], 0.3)


def _train(
    folder: str | None, options: dict[str, Any] | None, data: int = 1
) -> tuple[list[float], list[float]]:
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
    return fit_losses(
        options, _Tuned(folder), DataLoader(rows, batch_size=BATCH // data), steps=STEPS
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    folder = tmp_path_factory.mktemp("stock") / "peft"
    save_adapters(_adapted(), folder)
    [result] = run_ranks(1, _train, str(folder), None)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "ep" else pytest.mark.slow) for name in LAYOUTS],
)
def test_stacked_experts_train_as_in_stock_peft(
    layout: str, stock: tuple[list[float], list[float]]
) -> None:
    losses, norms = stock
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _train, None, options, data, timeout_s=110)
    for step, loss in enumerate(losses):
        own = sum(rank[0][step] for rank in ranks) / world
        assert own == pytest.approx(loss, rel=1e-6)  # fp32, sums in another order
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


@torch.no_grad()
def test_folders_and_merges_of_stacked_experts(tmp_path: Path) -> None:
    from peft import PeftModel

    model, x = _adapted(), TEXT[:2]
    save_adapters(model, tmp_path / "peft")
    stock = PeftModel.from_pretrained(_base(), tmp_path / "peft")
    expected = stock(x).logits
    torch.testing.assert_close(model(x).logits, expected, rtol=0, atol=2e-6)
    again = load_adapters(_base(), tmp_path / "peft")
    torch.testing.assert_close(again(x).logits, model(x).logits, rtol=0, atol=0)
    merged = merge_adapters(model).state_dict()
    weights = stock.merge_and_unload().state_dict()
    assert merged.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=2e-7, msg=name)
    # Experts in another order are another model.
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert (merged[name].flip(0) - weights[name]).abs().max() > 1e-2
    assert not (model(x).logits - expected).abs().max() > 2e-6


def test_what_has_no_stacked_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matches no stacked experts.*experts.gate_up_proj"):
        LoRA(target_parameters=["experts.up_proj"]).apply(_base())
    with pytest.raises(ConfigError, match="lora_dropout"):
        LoRA(lora_dropout=0.1, target_parameters=["experts.down_proj"]).apply(_base())
