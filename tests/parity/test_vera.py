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
from tests.helpers.adapted import VOCABULARY, adapted_gpt, adapted_llama, llama, train
from tests.helpers.ranks import run_ranks
from tests.parity.test_lora import LAYOUTS

VERA = VeRA(r=12, projection_prng_key=3)
TOKENS = torch.arange(24).view(2, 12) * 5 % VOCABULARY
MODELS: dict[str, Any] = {"gpt": adapted_gpt, "llama": adapted_llama}
_USUAL = [("gpt", "tp-sp"), ("gpt", "pp"), ("llama", "fsdp")]


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
    [(losses, norms)] = run_ranks(1, _train, "peft", None, 1)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _train, kind, options, data, timeout_s=110)
    own = [sum(rank[0][step] for rank in ranks) / world for step in range(len(losses))]
    # fp32, sums in another order; SGD does not amplify them.
    assert own == pytest.approx(losses, rel=1e-6)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


def test_vectors_of_ranks_are_merged_as_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    run_ranks(2, _train, "gpt", LAYOUTS["tp"][2], 1, str(tmp_path), timeout_s=110)
    state = read_full(f"{tmp_path}/gpt.ckpt")["state_dict"]
    model = adapted_gpt(VERA)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    save_adapters(model, tmp_path / "folder")
    theirs = PeftModel.from_pretrained(llama(), tmp_path / "folder")
    expected = _logits(theirs)
    assert (_logits(model) - expected).abs().max() < 2e-6  # fp32
    again = load_adapters(adapted_gpt(VERA), tmp_path / "folder")
    assert torch.equal(_logits(again), _logits(model))
    assert (_logits(merge_adapters(model)) - expected).abs().max() < 5e-6  # in another order
