"""Models without a folder are trained, and written as new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")
import transformers

from tests.helpers.hf_folders import MODELS, VOCABULARY, model_class

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}


def config_of(name: str, **more: Any) -> Any:
    sizes = MODELS[name][1] | {"eos_token_id": 2} | more
    return model_class(name).config_class(**sizes)


class FromScratch(pl.LightningModule):
    """A model of transformers with initial weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config_ = config
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            bridge = AutoBridge.from_hf_config(self.config_, max_shard_size="60KB")
            self.model = bridge.to_model()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        logits = self.model(input_ids=batch).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(config: Any, target: Path) -> dict[str, Tensor]:
    ids: Any = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(5))
    fit = trainer(MegatronStrategy(tensor_model_parallel_size=2), max_epochs=1)
    module = FromScratch(config)
    fit.fit(module, DataLoader(ids, batch_size=4))
    fit.save_checkpoint(target)
    strategy: Any = fit.strategy
    return dict(strategy.full_tensors(module.model))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["experts", "tied"])
def test_a_model_of_a_configuration_is_written_as_a_new_folder(tmp_path: Path, name: str) -> None:
    config = config_of(name, rope_parameters=YARN, max_position_embeddings=64)
    weights, *_ = run_ranks(2, _fit, config, tmp_path / "c.ckpt")
    out = tmp_path / "out"
    commands.export(str(tmp_path / "c.ckpt"), str(out))
    again, info = model_class(name).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key, value in again.state_dict().items():
        assert torch.equal(value, weights[key]), key
    # As save_pretrained would have named the tensors.
    again.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    expected, found = (
        json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        for path in (tmp_path / "theirs", out)
    )
    assert set(found) == set(expected)
    assert max(file.stat().st_size for file in out.glob("*.safetensors")) < 70_000
    written = json.loads((out / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]["rope_type"]) == (5e5, "yarn")
    assert written["rope_parameters"]["factor"] == 4.0
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == 2
    assert "library_name: transformers" in (out / "README.md").read_text()
    assert (
        transformers.AutoConfig.from_pretrained(out).rope_parameters == again.config.rope_parameters
    )


def test_a_configuration_without_weights_says_so(tmp_path: Path) -> None:
    bridge = AutoBridge.from_hf_config(config_of("llama"))
    assert bridge.to_config().num_layers == 4
    with pytest.raises(CheckpointError, match="has no weights"):
        bridge.load_hf_weights(bridge.to_model())
    with pytest.raises(ConfigError, match="no causal language model for ViTConfig"):
        AutoBridge.from_hf_config(transformers.ViTConfig())


def _read(path: Path) -> tuple[str, float]:
    """Read a folder as a program does that knows only safetensors and transformers."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(index.values()):
        with safe_open(path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {n for n, f in index.items() if f == file} == set(opened.keys())
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return type(model).__name__, sum(p.double().sum().item() for p in model.parameters())


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    bridge = AutoBridge.from_hf_config(config_of("experts"), max_shard_size="60KB")
    model: Any = bridge.to_model()
    bridge.save_hf_pretrained(model, tmp_path / "out")
    [(name, total)] = run_ranks(1, _read, tmp_path / "out")
    assert name == "MixtralForCausalLM"
    expected = sum(p.double().sum().item() for p in model.parameters())
    assert total == pytest.approx(expected, rel=1e-12)  # fp64 sums in one order
