"""Every recipe in configs/ is parsed, made into objects and checked against its layout; nothing is
run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.recipe_table import MODELS
from megatron_lightning.cli import trainer_cli
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.models import num_parameters
from megatron_lightning.modules import (
    FinetuneDataModule,
    GPTLightningModule,
    HuggingFaceModule,
    MaskedDataModule,
    PretrainDataModule,
)
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.rules import check_model_layout
from megatron_lightning.strategies import MegatronStrategy

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_PARAMETERS = {
    "tiny_cpu": 1_311_872,
    "tiny_moe_cpu": 1_903_744,
    "tiny_hybrid_cpu": 1_340_512,
    "nemotron_h_8b": 8_100_852_736,
    "gpt2_small": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_lora": 8_030_261_248,
    "finetune_tiny_cpu": 869_504,
    "qwen3_8b_sft": 8_190_735_360,
}
MASKED = {"bert": 110_106_428, "t5": 222_903_552}
"""Parameters of the models of ``transformers``."""

IMAGES = {"qwen2_5_vl_7b_lora"}
"""Of folders with a vision tower."""

# Recipes of published models have a test of their own.
PATHS = [
    path
    for path in sorted(CONFIGS.glob("*.yaml"))
    if path.stem in NUM_PARAMETERS or path.stem not in {*MODELS, *MASKED, *IMAGES}
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(["def f(x):\n    return x\n"] * 20, 290, path)
    return str(path)


def instantiate(path: Path, tokenizer: str) -> Any:
    """Make the objects on a machine without the recipe's devices and data."""
    recipe = yaml.safe_load(path.read_text())
    options = [f"--config={path}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    if "tokenizer_model" in recipe["data"]["init_args"]:
        options.append(f"--data.tokenizer_model={tokenizer}")
    return trainer_cli(options, run=False)


@pytest.mark.spread(1)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_recipe_is_valid(
    path: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli = instantiate(path, tokenizer)
    model, data, strategy = cli.model, cli.datamodule, cli.trainer.strategy
    assert isinstance(model, GPTLightningModule)
    assert isinstance(data, PretrainDataModule | FinetuneDataModule)
    assert isinstance(strategy, MegatronStrategy)
    world_size = cli.trainer.num_nodes * cli.trainer.num_devices
    check_model_layout(
        model.config, strategy.layout, world_size, sequence_length=data.sequence_length
    )
    assert data.batch_size % (strategy.options.micro_batch_size or data.batch_size) == 0
    assert num_parameters(model.config) == NUM_PARAMETERS[path.stem]
    data_size = strategy.layout.data_parallel_size(world_size)
    init_args = yaml.safe_load(path.read_text())["data"]["init_args"]
    if isinstance(data, FinetuneDataModule):  # epochs, not samples
        return
    assert init_args["num_train_samples"] >= cli.trainer.max_steps * data.batch_size * data_size


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MASKED)
def test_a_recipe_of_masked_samples_is_valid(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "<extra_id_0>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[PAD]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]"}))
    path = CONFIGS / f"{name}.yaml"
    options = [f"--config={path}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    options += [f"--data.tokenizer_model={tmp_path}", "--data.tokenizer_type=json"]
    cli = trainer_cli(options, run=False)
    data, strategy = cli.datamodule, cli.trainer.strategy
    assert isinstance(data, MaskedDataModule) and isinstance(strategy, MegatronStrategy)
    with torch.device("meta"):
        cli.model.configure_model()
    assert sum(p.numel() for p in cli.model.model.parameters()) == MASKED[name]
    assert data.batch_size % (strategy.options.micro_batch_size or 1) == 0
    replicas = strategy.layout.data_parallel_size(cli.trainer.num_devices)
    count = yaml.safe_load(path.read_text())["data"]["init_args"]["num_train_samples"]
    assert count >= cli.trainer.max_steps * data.batch_size * replicas


def test_a_recipe_of_chats_with_images_is_valid() -> None:
    pytest.importorskip("transformers")
    path = CONFIGS / "qwen2_5_vl_7b_lora.yaml"
    options = [f"--config={path}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = trainer_cli([*options, "--trainer.precision=32-true"], run=False)
    data, strategy = cli.datamodule, cli.trainer.strategy
    assert isinstance(cli.model, HuggingFaceModule) and isinstance(data, FinetuneDataModule)
    assert cli.model.peft is not None and cli.model.peft.exclude_modules == ["**.visual.**"]
    assert data.images is not None and data.packing == "online"
    assert data.batch_size % strategy.options.micro_batch_size == 0


def test_the_demo_resumes_on_another_layout_with_the_same_global_batch() -> None:
    recipe = yaml.safe_load((CONFIGS / "tiny_cpu.yaml").read_text())
    strategy = recipe["trainer"]["strategy"]["init_args"]
    sizes = {name: size for name, size in strategy.items() if name.endswith("parallel_size")}
    assert ParallelLayout(**sizes).data_parallel_size(recipe["trainer"]["devices"]) == 1
    resumed = (CONFIGS.parent / "examples" / "demo.sh").read_text()
    assert "--trainer.devices=2" in resumed
    assert f"--data.batch_size={recipe['data']['init_args']['batch_size'] // 2}" in resumed
