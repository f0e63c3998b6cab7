"""VeRA: shared projections, folders of stock ``peft``, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", "5")
pytest.importorskip("peft", "0.21")

from megatron_lightning.config import MoEConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.peft import LoRA, VeRA, load_adapters, merge_adapters, save_adapters
from megatron_lightning.peft.folder import read_folder
from megatron_lightning.peft.record import read_records, write_record
from megatron_lightning.peft.resume import check_scales
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.rank_parameters import ParameterCount
from tests.helpers.adapted import CONFIG, VOCABULARY, adapted_gpt, llama, stock
from tests.helpers.layouts import tiny_config

TOKENS = torch.arange(24).view(2, 12) * 5 % VOCABULARY
VERA = VeRA(r=12, projection_prng_key=3)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.fixture(scope="module")
def theirs() -> Any:
    return stock(VERA)


@pytest.mark.parametrize("saves", [True, False])
def test_folders_are_those_of_stock_peft(theirs: Any, saves: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    theirs.peft_config["default"].save_projection = saves
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_adapters(llama(), tmp_path / "theirs")
    assert torch.equal(_logits(ours), _logits(theirs))
    gpt = adapted_gpt(VERA)
    assert (_logits(gpt) - _logits(theirs)).abs().max() < 2e-6  # fp32
    save_adapters(gpt, tmp_path / "ours")
    again = PeftModel.from_pretrained(llama(), tmp_path / "ours")
    assert torch.equal(_logits(again), _logits(theirs))
    assert (_logits(merge_adapters(ours)) - _logits(theirs)).abs().max() < 2e-6


def test_projections_of_a_folder_count_before_its_seed(theirs: Any, tmp_path: Path) -> None:
    theirs.peft_config["default"].save_projection = True
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.vera_A"] *= 2
    save_file(tensors, file, {"format": "pt"})
    kind = read_folder(tmp_path).kind
    assert kind.has_own_values
    changed = _logits(load_adapters(llama(), tmp_path))
    assert not torch.allclose(changed, _logits(theirs))
    merged = _logits(merge_adapters(load_adapters(llama(), tmp_path)))
    assert (merged - changed).abs().max() < 2e-6
    with pytest.raises(CheckpointError, match="projection_prng_key=3, with which the same vectors"):
        load_adapters(VERA.apply(llama()), tmp_path)
    with pytest.raises(CheckpointError, match="its seed does not draw here, which a checkpoint"):
        write_record(load_adapters(llama(), tmp_path), {})
    del tensors["base_model.vera_A"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"save_projection=true, and .* no vera_A"):
        read_folder(tmp_path)


def test_layers_share_the_projections() -> None:
    model = VERA.apply(GPTModel(CONFIG))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".vera_")[2] for name in trained} == {
        "lambda_b.weight", "lambda_d.weight"
    }  # fmt: skip
    assert not any("vera_A" in name for name in model.state_dict())
    _logits(model)
    parts: list[Any] = [
        part for layer in model.modules() for part in getattr(layer, "parts", {}).values()
    ]
    assert len({part.vera_A.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert len({part.vera_B.weight.untyped_storage().data_ptr() for part in parts}) == 1
    expected = _logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(_logits(other), expected)
    assert _logits(model.to(torch.bfloat16)).dtype == torch.bfloat16


def test_adapters_of_another_seed_are_not_loaded(tmp_path: Path) -> None:
    save_adapters(VERA.apply(llama()), tmp_path / "saved")
    load_adapters(VERA.apply(llama()), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"of projection_prng_key=3, and .*key=4"):
        load_adapters(VeRA(r=12, projection_prng_key=4).apply(llama()), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="set target_modules of VeRA to"):
        load_adapters(VeRA(r=12, target_modules=["q_proj"]).apply(llama()), tmp_path / "saved")


def test_a_model_trains_after_text_in_inference_mode() -> None:
    model: Any = VERA.apply(GPTModel(CONFIG))
    with torch.inference_mode():
        model(TOKENS)
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_does_not_fit_is_refused() -> None:
    config = tiny_config(moe=MoEConfig(num_experts=4))
    with pytest.raises(ConfigError, match="is a layer of experts, for which VeRA has no vectors"):
        VeRA().apply(GPTModel(config))
    with pytest.raises(ConfigError, match="r of VeRA is 0"):
        VeRA(r=0)
    with pytest.raises(ConfigError, match="projection_prng_key of VeRA is None"):
        VeRA(projection_prng_key=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="VeRA is set beside qat"):
        GPTLightningModule(CONFIG, peft=VeRA(), qat="nvfp4")


def test_another_seed_or_method_is_another_model() -> None:
    state: dict[str, Any] = {}
    write_record(VERA.apply(GPTModel(CONFIG)), state)
    records = read_records(json.loads(json.dumps(state)))
    assert records[0].applied.method == VeRA(
        r=12, projection_prng_key=3, exclude_modules=[], modules_to_save=[]
    )
    for other, message in (
        (VeRA(r=12, projection_prng_key=4), "seed 3, and those of this run 4"),
        (LoRA(), "adapters are VeRA, and those of this run LoRA"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_scales(other.apply(GPTModel(CONFIG)), records, ())


def test_plans_count_vectors_and_the_projections() -> None:
    sizes = AdapterSizes.of_options({"r": 12}, "megatron_lightning.peft.VeRA")
    model: nn.Module = VERA.apply(GPTModel(CONFIG))
    units = [unit if isinstance(unit, str) else unit[0] for unit in pipeline_units(CONFIG)]
    counts = (sizes.count_unit(CONFIG, ParallelLayout(), unit) for unit in units)
    assert sum(counts, ParameterCount()).total == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    assert sizes.shared_size(CONFIG) == 12 * (96 + 96)  # rows of gate, columns of fc2
    with pytest.raises(ConfigError, match=r"linear_fc1 is a layer of experts, for which VeRA has"):
        sizes.shared_size(tiny_config(moe=MoEConfig(num_experts=4)))
    without = AdapterSizes(method="VeRA", exclude_modules=["experts.*"])
    assert without.shared_size(tiny_config(moe=MoEConfig(num_experts=4)))
    with pytest.raises(ConfigError, match=r"model.peft is a.Other, whose sizes"):
        AdapterSizes.of_options({}, "a.Other")
