"""The balancing loss of an untouched model is that of transformers, and that of one process on
layouts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from transformers import MixtralConfig, MixtralForCausalLM

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import DPOModule, GPTLightningModule, HuggingFaceModule
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, fit
from tests.helpers.ranks import run_ranks

LENGTH, BATCH, STEPS = 16, 4, 3
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "initializer_range": 0.2, "router_aux_loss_coef": 0.5, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp2-ep2": ({TP: 2, EP: 2, ETP: 1}, BATCH),
    "tp2": ({TP: 2}, BATCH),
    "ep2": ({EP: 2}, BATCH // 2),
    "fsdp2": ({"data_parallel": "fsdp"}, BATCH // 2),
}
"""Name -> options, and rows of a micro-batch."""


def _folder(path: Path, **options: Any) -> str:
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, **options)).save_pretrained(path)
    return str(path)


def _rows() -> Any:
    """Return padded rows, in the order in which two replicas share them."""
    text = torch.randint(0, 64, (STEPS * BATCH, 10), generator=torch.Generator().manual_seed(3))
    padding = torch.arange(LENGTH) >= 9
    return [
        {
            "tokens": F.pad(row[:-1], (0, LENGTH - 9), value=5),
            "labels": F.pad(row[1:], (0, LENGTH - 9), value=-100),
            "padding": padding,
        }
        for row in text
    ]


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    folder = _folder(tmp_path, output_router_logits=True)
    rows = _rows()[:BATCH]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    reference = MixtralForCausalLM.from_pretrained(folder)
    mask = (~batch["padding"]).long()
    out = reference(batch["tokens"], mask, labels=batch["labels"], shift_labels=batch["labels"])
    out.loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    # Packed rows have positions that start again, and no mask.
    packed = batch | {
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1) % 9,
        "document_ids": torch.arange(LENGTH).expand(BATCH, -1) // 9,
    }
    for fused in (True, False):
        for found in (batch, packed):
            module = HuggingFaceModule(folder, fused_loss=fused)
            module.configure_model()
            loss, _ = module._loss(found)
            torch.testing.assert_close(loss, out.loss)
            loss.backward()
            for name, p in module.model.named_parameters():
                torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
    assert module.eval()._loss(batch)[0] < out.loss


def test_a_coefficient_alone_changes_nothing_and_an_override_is_of_the_training(
    tmp_path: Path,
) -> None:
    folder = _folder(tmp_path / "base")
    rows = _rows()[:BATCH]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    losses = []
    for overrides in (None, {"output_router_logits": True}):
        module = HuggingFaceModule(folder, config_overrides=overrides)
        module.configure_model()
        losses.append(float(module._loss(batch)[0]))
    assert losses[1] > losses[0] + 0.5
    assert module.hparams["config_overrides"] == {"output_router_logits": True}
    module.save_hf_pretrained(str(tmp_path / "out"))
    assert not MixtralConfig.from_pretrained(tmp_path / "out").output_router_logits


def test_preferences_have_the_loss_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path, output_router_logits=True)
    rows = _rows()[:2]
    batch = {
        f"{side}{entry}": row[name][None]
        for side, row in zip(("chosen", "rejected"), rows, strict=True)
        for entry, name in (("", "tokens"), ("_labels", "labels"), ("_padding", "padding"))
    }
    losses = []
    for overrides in (None, {"output_router_logits": False}):
        template = HuggingFaceModule(folder, config_overrides=overrides)
        module = DPOModule(template, loss="orpo")
        module.configure_model()
        losses.append(module._loss(batch)[0])
    model = MixtralForCausalLM.from_pretrained(folder)
    mask = torch.stack([~row["padding"] for row in rows])
    out = model(torch.stack([row["tokens"] for row in rows]), mask.long())
    torch.testing.assert_close(losses[0] - losses[1], 0.5 * out.aux_loss)
    pair = DPOModule(HuggingFaceModule(folder), reference="model")
    with pytest.raises(ConfigError, match="with a second model has no balancing loss"):
        pair.configure_model()


def test_a_gpt_model_balances_by_layer(tmp_path: Path) -> None:
    for wants, coefficient in ((False, 0.0), (True, 0.5 * 2 / 2)):
        folder = _folder(tmp_path / str(wants), output_router_logits=wants)
        module = AutoBridge.from_hf_pretrained(folder).to_module()
        assert isinstance(module, GPTLightningModule)
        assert module.config.moe is not None
        assert module.config.moe.aux_loss_coeff == coefficient


def _train(folder: str, names: list[str]) -> list[Any]:
    found = []
    for name in names:
        options, rows = LAYOUTS[name]
        module = HuggingFaceModule(folder, learning_rate=1e-3)
        run = fit(options, module, DataLoader(_rows(), batch_size=rows), steps=STEPS)
        found.append((run.losses, run.norms, run.logged["aux_loss"]))
    return found


@pytest.mark.parametrize(
    "names", [["tp2-ep2", "ep2"], pytest.param(["tp2", "fsdp2"], marks=pytest.mark.slow)], ids=str
)
def test_layouts_equal_one_process(names: list[str], tmp_path: Path) -> None:
    """fp32, sums in another order: 1e-5."""
    folder = _folder(tmp_path, output_router_logits=True)
    ranks = run_ranks(2, _train, folder, names)
    for index, name in enumerate(names):
        rows = LAYOUTS[name][1]
        loader = DataLoader(_shared(BATCH // rows), batch_size=BATCH)
        module = HuggingFaceModule(folder, learning_rate=1e-3)
        one = fit({MICRO: rows}, module, loader, steps=STEPS)
        for rank in ranks:
            losses, norms, _ = rank[index]
            assert norms == pytest.approx(one.norms, rel=1e-5), name
            if rows == BATCH:
                assert losses == pytest.approx(one.losses, rel=1e-5), name
                assert rank[index][2] == pytest.approx(one.logged["aux_loss"], rel=1e-5)


def _shared(replicas: int) -> Any:
    """Return the rows in an order in which micro-batches are those of the replicas."""
    rows = _rows()
    steps = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    return [row for step in steps for r in range(replicas) for row in step[r::replicas]]


@pytest.mark.slow
@pytest.mark.parametrize("axis", [PP, CP])
def test_parts_of_layers_and_tokens_are_refused(axis: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, output_router_logits=True)
    for text in run_ranks(2, _refused, folder, {axis: 2}):
        assert re.search("output_router_logits(=| to )False", text)


def _refused(folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(options, HuggingFaceModule(folder), DataLoader(_rows(), batch_size=BATCH), steps=1)
    return str(caught.value)
