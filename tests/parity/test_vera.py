"""VeRA trains, travels and merges as in stock ``peft``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5")
pytest.importorskip("peft", "0.21")

from megatron_lightning.checkpoint import read_full
from megatron_lightning.peft import VeRA, load_adapters, merge_adapters, save_adapters
from tests.helpers.adapted import (
    adapted_gpt,
    adapted_llama,
    check_trained_as_by_peft,
    llama,
    logits_of,
    train,
)
from tests.helpers.ranks import run_ranks
from tests.parity.test_lora import LAYOUTS

VERA = VeRA(r=12, projection_prng_key=3)
MODELS: dict[str, Any] = {"gpt": adapted_gpt, "llama": adapted_llama}
_USUAL = [("gpt", "tp-sp")]


def _train(kind: str, options: Any, data: int, folder: str = "") -> Any:
    return train(folder, kind, options, data, lora=VERA)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in _USUAL else pytest.mark.slow)
        for kind in MODELS
        for layout in LAYOUTS
        if layout != "tp4" and (kind, layout) != ("llama", "cp")  # see test_lora
    ],
)
def test_vera_trains_as_in_stock_peft(kind: str, layout: str) -> None:
    check_trained_as_by_peft(kind, LAYOUTS[layout], VERA)


@pytest.mark.slow
def test_vectors_of_ranks_are_merged_as_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    run_ranks(2, _train, "gpt", LAYOUTS["tp"][2], 1, str(tmp_path), timeout_s=110)
    state = read_full(f"{tmp_path}/gpt.ckpt")["state_dict"]
    model = adapted_gpt(VERA)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    save_adapters(model, tmp_path / "folder")
    theirs = PeftModel.from_pretrained(llama(), tmp_path / "folder")
    expected = logits_of(theirs)
    assert (logits_of(model) - expected).abs().max() < 2e-6  # fp32
    again = load_adapters(adapted_gpt(VERA), tmp_path / "folder")
    assert torch.equal(logits_of(again), logits_of(model))
    assert (logits_of(merge_adapters(model)) - expected).abs().max() < 5e-6  # in another order
