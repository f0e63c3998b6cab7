"""Checkpoints of earlier versions load. ``tests/oracles/earlier.ckpt`` was saved by a fit of three
steps before the first release, and that version trained two more steps to the losses below.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import Losses, trainer

SAVED = Path(__file__).parents[2] / "oracles" / "earlier.ckpt"
LOSSES = [3.4422523975372314, 3.454772472381592]


def test_a_checkpoint_of_an_earlier_version_resumes() -> None:
    module = GPTLightningModule.load_from_checkpoint(SAVED)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=32,
        max_sequence_length=16, moe=MoEConfig(num_experts=4, router_topk=2),
    )  # fmt: skip
    assert module.config == config
    losses = Losses()
    fit = trainer(MegatronStrategy(), max_steps=5, callbacks=[losses])
    data = PretrainDataModule(
        mock=True, vocab_size=32, sequence_length=16, batch_size=2, num_train_samples=16
    )
    fit.fit(GPTLightningModule(config, learning_rate=1e-2), data, ckpt_path=SAVED)
    # Another CPU may sum in another order.
    assert losses.losses == pytest.approx(LOSSES, rel=1e-6)
