"""DoRA trains, travels and merges as in stock ``peft``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5")
pytest.importorskip("peft", "0.21")

from megatron_lightning.checkpoint import read_full
from megatron_lightning.peft import LoRA, load_adapters, merge_adapters
from megatron_lightning.peft.folder import write_folder
from megatron_lightning.peft.saved import adapters_of_module
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

DORA = LoRA(use_dora=True)
_USUAL = [("llama", "fsdp")]


def _train(kind: str, options: Any, data: int, folder: str = "") -> Any:
    return train(folder, kind, options, data, lora=DORA)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in _USUAL else pytest.mark.slow)
        for kind in ("gpt", "llama")
        for layout in LAYOUTS
        if layout != "tp4" and (kind, layout) != ("llama", "cp")  # see test_lora
    ],
)
def test_dora_trains_as_in_stock_peft(kind: str, layout: str) -> None:
    check_trained_as_by_peft(kind, LAYOUTS[layout], DORA)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_folders_and_merges_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    # After a training on two ranks, so that lengths are no longer those of the base.
    run_ranks(2, _train, kind, {"tensor_model_parallel_size": 2}, 1, str(tmp_path), timeout_s=110)
    state = read_full(f"{tmp_path}/{kind}.ckpt")["state_dict"]
    model: Any = {"gpt": adapted_gpt, "llama": adapted_llama}[kind](DORA)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    _, saved = adapters_of_module(model)
    write_folder(tmp_path / "folder", saved)
    theirs = PeftModel.from_pretrained(llama(), tmp_path / "folder")
    expected = logits_of(theirs)
    assert (logits_of(model) - expected).abs().max() < 2e-6  # fp32
    again: Any = {"gpt": adapted_gpt, "llama": adapted_llama}[kind](DORA)
    load_adapters(again, tmp_path / "folder")
    assert torch.equal(logits_of(again), logits_of(model))
    merged, alone = logits_of(merge_adapters(model)), logits_of(theirs.merge_and_unload())
    assert (merged - alone).abs().max() < 2e-6
    assert (merged - expected).abs().max() < 5e-6  # another order of operations


def test_merging_in_boxes_is_merging_at_once() -> None:
    """Row lengths need all columns of a row."""
    model = adapted_gpt(DORA)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data.mul_(1.3)
    from megatron_lightning.parallel.shards.spec import Box
    from megatron_lightning.peft.merge import deltas_in, merged_fills

    parameters = dict(model.named_parameters())
    deltas = deltas_in(model, parameters.__getitem__)

    def fill_of(name: str) -> Any:
        return lambda box, out: out.copy_(parameters[name][box.slices])

    fills = merged_fills({name: fill_of(name) for name in deltas}, deltas)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    shape = tuple(parameters[name].shape)
    whole, part = torch.empty(shape), torch.empty(7, 9)
    with torch.no_grad():
        fills[name](Box.full(shape), whole)
        fills[name](Box((5, 11), (7, 9)), part)
        expected = merge_adapters(model).get_parameter(name)
    assert torch.allclose(whole, expected, rtol=1e-6)
    assert torch.equal(part, whole[5:12, 11:20])
