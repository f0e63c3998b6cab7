"""Rows of new tokens have values drawn from their texts, on every layout and in plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from transformers import LlamaForCausalLM

from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import BATCH, TEXT, llama
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

NEW = {"<think>": 126, "</think>": 127}
ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.where(TEXT > 120, 126, TEXT)]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def _fit(
    folder: str, kind: str, options: dict[str, Any] | None, data: int, peft: LoRA | None
) -> tuple[list[float], torch.Tensor | None]:
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=2, callbacks=[record])
    settings: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-3, "peft": peft}
    module: Any
    if kind == "gpt":
        module = GPTLightningModule(init_from_hf=folder, **settings)
    else:
        module = HuggingFaceModule(folder, **settings)
    module.new_tokens = NEW
    fit.fit(module, DataLoader(ROWS, batch_size=BATCH // data))
    rows = module.model.get_input_embeddings().weight[126:] if options is None else None
    return record.losses, None if rows is None else rows.detach()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("folder")
    model = llama(tie_word_embeddings=request.param)
    with torch.no_grad():  # spare rows of no meaning
        model.get_input_embeddings().weight[126:] = 9.0
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "layout", "data"),
    [
        ("llama", {TP: 2}, 1),
        pytest.param("llama", {"data_parallel": "fsdp"}, 2, marks=pytest.mark.slow),
        pytest.param("llama", {PP: 2, "micro_batch_size": 2}, 1, marks=pytest.mark.slow),
        pytest.param("gpt", {PP: 2, "micro_batch_size": 2}, 1, marks=pytest.mark.slow),
    ],
)
def test_rows_are_drawn_alike(folder: str, kind: str, layout: dict[str, Any], data: int) -> None:
    [(losses, rows)] = run_ranks(1, _fit, folder, "llama", None, 1, None)
    assert rows is not None and rows.std() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(rows[0], rows[1])
    ranks = run_ranks(2, _fit, folder, kind, layout, data, None)
    for step, loss in enumerate(losses):
        own = sum(rank[0][step] for rank in ranks) / 2
        assert own == pytest.approx(loss, rel=1e-5)  # fp32, after a step of AdamW


def test_frozen_rows_keep_their_values_with_a_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = HuggingFaceModule(folder, peft=LoRA(r=2))
    module.new_tokens = NEW
    with pytest.warns(UserWarning, match="embed_tokens.weight.* is frozen.*modules_to_save"):
        module.configure_model()
    own = dict(module.model.named_parameters())["model.embed_tokens.weight"]
    theirs = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert torch.equal(own, theirs["model.embed_tokens.weight"])


def test_a_trained_embedding_beside_adapters_has_drawn_rows(folder: str, tmp_path: Path) -> None:
    saved = ["embed_tokens", "lm_head"]
    module = HuggingFaceModule(folder, peft=LoRA(r=2, modules_to_save=saved))
    module.new_tokens = NEW
    module.configure_model()
    first = module.model.get_input_embeddings().weight[126:].detach()
    assert float(first.abs().max()) < 1
    assert module.model.config.tie_word_embeddings == (
        module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight
    )
