"""Upcycled checkpoints: the new model's first loss is the dense model's, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.cli import main
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.upcycling import upcycle
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

# fp32; the copies of a token's experts are weighted and added up again.
RTOL = 1e-6
EXPERTS = MoEConfig(num_experts=4, router_topk=2, layer_freq=[0, 1])


def _config(**options: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "ffn_hidden_size": 48,
    }
    return tiny_config(**sizes | options)


def _batches() -> DataLoader[Any]:
    tokens = torch.randint(0, 64, (16, 17), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    return DataLoader(rows, batch_size=4)


def _save_dense(path: Path, **options: Any) -> None:
    """Train two steps and save."""
    fit = trainer(MegatronStrategy(), max_steps=2)
    fit.fit(GPTLightningModule(_config(**options), learning_rate=1e-2), _batches())
    fit.save_checkpoint(path)


def _module(path: Path) -> GPTLightningModule:
    """Return a module of the checkpoint's configuration."""
    config = open_checkpoint(str(path)).state()["hyper_parameters"]["config"]
    return GPTLightningModule(TransformerConfig(**config))


def _validation(path: Path) -> float:
    check = trainer(MegatronStrategy())
    (found,) = check.validate(_module(path), _batches(), ckpt_path=path, verbose=False)
    return float(found["val_loss"])


def _first_loss(path: Path, sizes: dict[str, Any]) -> float:
    """Return the loss of the first step of a training from the checkpoint."""
    losses = Losses()
    fit = trainer(MegatronStrategy(**sizes), max_steps=1, callbacks=[losses])
    fit.fit(_module(path), _batches(), ckpt_path=path)
    return losses.losses[0]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "add_bias_linear": True, "normalization": "LayerNorm"},
        {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1},
    ],
    ids=["swiglu", "gelu and biases", "tied, multi-token"],
)
def test_the_new_models_loss_is_the_dense_ones(tmp_path: Path, options: dict[str, Any]) -> None:
    dense, new = tmp_path / "dense", tmp_path / "new"
    _save_dense(dense, **options)
    upcycle(str(dense), str(new), moe=EXPERTS)
    assert _validation(new) == pytest.approx(_validation(dense), rel=RTOL)


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_model_parallel_size": 2},
        pytest.param({"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["ep2", "tp2", "pp2"],
)
def test_a_training_of_any_layout_begins_from_it(tmp_path: Path, sizes: dict[str, Any]) -> None:
    dense, new = tmp_path / "dense", tmp_path / "new"
    _save_dense(dense)
    upcycle(str(dense), str(new), moe=EXPERTS)
    expected = _first_loss(new, {})
    if "expert_model_parallel_size" in sizes:  # two data-parallel ranks: twice the samples
        assert len(run_ranks(2, _first_loss, new, sizes)) == 2
    else:
        assert run_ranks(2, _first_loss, new, sizes)[0] == pytest.approx(expected, rel=RTOL)


def test_a_shared_expert_begins_at_zero_and_other_sums_are_announced(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    _save_dense(dense)
    shared = MoEConfig(num_experts=4, router_topk=2, shared_expert_intermediate_size=16)
    upcycle(str(dense), str(tmp_path / "shared"), moe=shared)
    assert _validation(tmp_path / "shared") == pytest.approx(_validation(dense), rel=RTOL)
    before = MoEConfig(num_experts=4, router_topk=2, router_pre_softmax=True)
    with pytest.warns(UserWarning, match="2 of 4 experts add up to less than 1"):
        upcycle(str(dense), str(tmp_path / "before"), moe=before)
    assert _validation(tmp_path / "before") != pytest.approx(_validation(dense), rel=1e-5)


def test_what_cannot_be_copied_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, new = str(tmp_path / "dense"), str(tmp_path / "new")
    _save_dense(Path(dense))
    with pytest.raises(ConfigError, match=r"moe.ffn_hidden_size=24 .* width 48: .*granular"):
        upcycle(dense, new, moe=MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=24))
    with pytest.raises(ConfigError, match=r"moe.latent_size=8 and .* tokens of size"):
        upcycle(dense, new, moe=MoEConfig(num_experts=4, router_topk=2, latent_size=8))
    main(["checkpoint", "upcycle", dense, new, "--moe.num_experts=4", "--moe.router_topk=2"])
    assert "2 of 2 layers have 4 experts each" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has 4 experts in a layer already"):
        upcycle(new, str(tmp_path / "again"), moe=EXPERTS)
    with pytest.raises(CheckpointError):
        upcycle(str(tmp_path), new, moe=EXPERTS)
