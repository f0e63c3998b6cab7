"""Models that see the tokens to be predicted are refused, by value and on layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import DPOModule, HuggingFaceModule
from tests.helpers.layouts import MICRO, PP, TP, fit, token_rows
from tests.helpers.preferences import PAIRS
from tests.helpers.ranks import run_ranks

VOCABULARY, LENGTH = 64, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {PP: 2, MICRO: 1},
    "tp2": {TP: 2},
    "fsdp2": {"data_parallel": "fsdp"},
}
SEES = r"BertLMHeadModel sees later tokens: .* in a row of \d+ changes an earlier loss by"


def _bert(folder: Path, **options: Any) -> str:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    config = BertConfig(num_hidden_layers=2, num_attention_heads=4, **sizes, **options)
    BertLMHeadModel(config).save_pretrained(folder)
    return str(folder)


def _data() -> Any:
    return DataLoader(token_rows(4, LENGTH, VOCABULARY), batch_size=2)


def test_an_encoder_is_refused_and_a_decoder_trains(tmp_path: Path) -> None:
    encoder, decoder = _bert(tmp_path / "e"), _bert(tmp_path / "d", is_decoder=True)
    for options in ({}, None):  # MegatronStrategy, plain Lightning
        with pytest.raises(ConfigError, match=SEES):
            fit(options, HuggingFaceModule(encoder), _data(), steps=1)
        assert len(fit(options, HuggingFaceModule(decoder), _data(), steps=1).losses) == 1
    with pytest.raises(ConfigError, match=SEES):
        module = DPOModule(HuggingFaceModule(encoder), loss="orpo")
        fit({}, module, DataLoader(PAIRS, batch_size=2), steps=1)


def test_an_encoder_with_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"T5ForCond.* \(t5\).*Train it by MaskedLanguageModule"):
        HuggingFaceModule(str(tmp_path)).configure_model()


def test_the_check_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _bert(tmp_path, is_decoder=True, hidden_dropout_prob=0.1)
    losses = []
    for checks in (True, False):
        if not checks:
            monkeypatch.setattr(HuggingFaceModule, "on_train_start", lambda self: None)
        torch.manual_seed(3)
        losses.append(fit({}, HuggingFaceModule(folder), _data(), steps=2).losses)
    assert losses[0] == losses[1]


def _refused(encoder: str, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(options, HuggingFaceModule(encoder), _data(), steps=1)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2", "tp2", "fsdp2"])
def test_an_encoder_is_refused_on_layouts(name: str, tmp_path: Path) -> None:
    for text in run_ranks(2, _refused, _bert(tmp_path), LAYOUTS[name]):
        assert "BertLMHeadModel sees later tokens" in text
