"""GPTModel on one process: names, initial weights, stages with absent units, training; and its LightningModule."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.models import GPTModel, TransformerConfig
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.optim import LRSchedule
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan, parallelize
from megatron_lightning.parallel.materialize import materialize
from megatron_lightning.parallel.sharding import ShardSpec, named_shard_specs

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=20, max_sequence_length=12)
TIED = TransformerConfig(**(CONFIG.to_dict() | {"share_embeddings_and_output_weights": True}))  # type: ignore[arg-type]


def tokens(*shape: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def test_names_and_count() -> None:
    model = GPTModel(CONFIG)
    layer = "decoder.layers.1"
    assert {name for name, _ in model.named_parameters() if not name.startswith("decoder.layers.0")} == {
        "embedding.word_embeddings.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.self_attention.linear_qkv.weight",
        f"{layer}.self_attention.linear_proj.weight",
        f"{layer}.pre_mlp_layernorm.weight",
        f"{layer}.mlp.linear_fc1.weight",
        f"{layer}.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert not list(model.buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bias_linear": True, "normalization": "LayerNorm", "activation": "gelu"},
        {"position_embedding_type": "learned_absolute"},
        {"qk_layernorm": True, "add_qkv_bias": True, "num_query_groups": 1, "kv_channels": 6},
        {"share_embeddings_and_output_weights": True, "ffn_hidden_size": 24},
    ],
    ids=str,
)
def test_the_configuration_counts_the_parameters(changes: dict[str, Any]) -> None:
    config = TransformerConfig(**(CONFIG.to_dict() | changes))  # type: ignore[arg-type]
    assert config.num_parameters == sum(p.numel() for p in GPTModel(config).parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    config = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=200, add_bias_linear=True)
    model = GPTModel(config)
    assert torch.equal(torch.get_rng_state(), before)
    layer = model.decoder.layers["3"]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert layer.self_attention.linear_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert (layer.input_layernorm.weight == 1).all()
    assert not layer.mlp.linear_fc1.bias.any()
    assert not torch.equal(layer.mlp.linear_fc1.weight, model.decoder.layers["4"].mlp.linear_fc1.weight)
    other = GPTModel(TransformerConfig(**(config.to_dict() | {"init_seed": 1})))  # type: ignore[arg-type]
    assert not torch.equal(other.output_layer.weight, model.output_layer.weight)


def test_a_low_precision_model_is_the_rounded_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        low = GPTModel(CONFIG)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in GPTModel(CONFIG).named_parameters():
        assert torch.equal(low.get_parameter(name), parameter.to(torch.bfloat16)), name


def stage(model: GPTModel, units: list[str]) -> GPTModel:
    """Return a copy with these units only, as a pipeline rank holds it."""
    part = copy.deepcopy(model)
    for unit in set(model.pipeline_units()) - set(units):
        parent, _, name = unit.rpartition(".")
        owner = part.get_submodule(parent)
        if isinstance(owner, nn.ModuleDict):
            del owner[name]
        else:
            setattr(owner, name, None)
    return part


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_stages_compose_to_the_model(config: TransformerConfig) -> None:
    model = GPTModel(config)
    units = model.pipeline_units()
    assert units == ["embedding", "decoder.layers.0", "decoder.layers.1", "decoder.final_layernorm", "output_layer"]
    first, last = stage(model, units[:2]), stage(model, units[2:])
    x, labels = tokens(3, 8), tokens(3, 8).flip(0)
    hidden = first(x, labels=labels)
    assert hidden.shape == (8, 3, 16)
    assert torch.equal(last(hidden), model(x))
    assert torch.equal(last(hidden, labels=labels), model(x, labels=labels))
    assert {*named_shard_specs(first), *named_shard_specs(last)} >= set(named_shard_specs(model))
    spec = named_shard_specs(last)["output_layer.weight"]
    assert spec.tied_to == ("embedding.word_embeddings.weight" if config is TIED else None)


def test_a_meta_stage_materialises_to_the_same_weights() -> None:
    whole = GPTModel(TIED)
    with torch.device("meta"):
        meta = GPTModel(TIED)
    assert all(p.is_meta for p in meta.parameters())
    last = stage(meta, ["decoder.layers.1", "decoder.final_layernorm", "output_layer"])
    outer = nn.ModuleDict({"model": last})
    materialize(outer, "cpu")
    assert torch.equal(last.output_layer.weight, whole.embedding.word_embeddings.weight)
    materialize(meta, "cpu")
    assert meta.output_layer.weight is meta.embedding.word_embeddings.weight
    for name, parameter in whole.named_parameters():
        assert torch.equal(meta.get_parameter(name), parameter), name


def test_a_meta_model_without_init_weights_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"0.weight is on the meta device.*init_weights\(name, tensor\)"):
        materialize(model, "cpu")


def test_tied_modules_of_unlike_styles_are_refused() -> None:
    class HalfTable:
        def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
            half = nn.Embedding(10, 16)
            half.shard_specs = {"weight": ShardSpec.split((20, 16), dim=0, size=2, rank=0)}  # type: ignore[assignment]
            return half

    plan = ShardingPlan(modules={"embedding.word_embeddings": HalfTable()})
    with pytest.raises(ShardingError, match=r"output_layer.weight and embedding.word_embeddings.weight were one parameter"):
        parallelize(GPTModel(TIED), ParallelContext(ParallelLayout()), plan)


def test_labels_and_positions() -> None:
    model = GPTModel(CONFIG)
    x, labels = tokens(3, 8), tokens(3, 8).flip(1).clone()
    labels[0, :4] = -100
    losses, logits = model(x, labels=labels), model(x)
    assert logits.shape == (3, 8, 20)
    assert logits.is_contiguous()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 8)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(model(x, position_ids=torch.arange(8).expand(3, 8)), logits)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 20
    assert torch.equal(model(changed)[:, :5], logits[:, :5])


def module(**options: Any) -> GPTLightningModule:
    return GPTLightningModule(CONFIG, learning_rate=1e-2, **options)


def loader() -> DataLoader[Any]:
    rows = tokens(16, 9)
    mask = torch.ones(8)
    mask[0] = 0
    return DataLoader([{"tokens": r[:-1], "labels": r[1:], "loss_mask": mask} for r in rows], batch_size=4)  # type: ignore[arg-type]


def test_the_lightning_module_trains_and_loads(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    gpt = module(warmup_steps=2, decay_steps=40)
    trainer.fit(gpt, loader(), loader())
    assert trainer.callback_metrics["val_loss"] < 2.9  # log 20 = 3.0 before training
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = GPTLightningModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == CONFIG
    for name, parameter in gpt.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    predictions = trainer.predict(gpt, loader())
    assert predictions is not None
    assert predictions[0].shape == (4, 8)


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    gpt = module()
    gpt.configure_model()
    gpt.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = next(iter(loader()))
    out = gpt.training_step(batch, 0)
    assert out["num_items"] == 4 * 7
    torch.testing.assert_close(out["loss"], gpt.model(batch["tokens"], labels=batch["labels"])[:, 1:].mean())  # type: ignore[misc]
    masked = batch["labels"].clone()
    masked[:, 0] = -100
    out_labels = gpt.training_step({"tokens": batch["tokens"], "labels": masked}, 0)
    torch.testing.assert_close(out_labels["loss"], out["loss"])
    assert out_labels["num_items"] == out["num_items"]


def test_the_schedule() -> None:
    rates = _rates(module(warmup_steps=2, decay_steps=6, min_learning_rate=1e-3), 8)
    assert rates == pytest.approx([0.0, 5e-3, 1e-2, 8.681981e-3, 5.5e-3, 2.318019e-3, 1e-3, 1e-3])
    assert _rates(module(warmup_steps=2), 4) == [0.0, 5e-3, 1e-2, 1e-2]
    assert _rates(module(), 2) == [1e-2, 1e-2]
    samples = LRSchedule(lr_decay_style="linear", lr_decay_steps=40, unit="samples", samples_per_step=10)
    assert _rates(module(lr_schedule=samples), 5) == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0])
    with pytest.raises(ConfigError, match="lr_decay_steps=3 ends before lr_warmup_steps=5"):
        module(warmup_steps=5, decay_steps=3)
    with pytest.raises(ConfigError, match=r"min_learning_rate=1\.0"):
        module(min_learning_rate=1.0)
    with pytest.raises(ConfigError, match=r"min_learning_rate=0\.0001 is where the decay ends, and decay_steps is not set"):
        module(min_learning_rate=1e-4)
    with pytest.raises(ConfigError, match=r"lr_schedule is given beside min_learning_rate=0\.0, warmup_steps=5"):
        module(warmup_steps=5, lr_schedule=samples)


def _rates(gpt: GPTLightningModule, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    gpt.configure_model()
    configured: Any = gpt.configure_optimizers()
    if not isinstance(configured, dict):
        return [configured.param_groups[0]["lr"]] * steps
    rates = []
    for _ in range(steps):
        rates += configured["lr_scheduler"]["scheduler"].get_last_lr()[:1]
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    return rates
