"""Rows of new tokens are the mean of the rows before, on every layout and in plain Lightning, in
spare rows and in a vocabulary that grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from transformers import AutoTokenizer, LlamaForCausalLM

from megatron_lightning.bridge.commands import export as export_model
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.peft.commands import export, merge
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import BATCH, TEXT, llama
from tests.helpers.chats import chats, make_tokenizer, turn, write_rows
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

SPARE = {"<think>": 126, "</think>": 127}
GROWN = {"<think>": 128, "</think>": 129}
NUM_GROWN = 192  # rows, a multiple of 64
ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.where(TEXT > 120, 126, TEXT)]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def _fit(
    folder: str, kind: str, options: dict[str, Any] | None, data: int, new: dict[str, int]
) -> tuple[list[float], list[torch.Tensor], str]:
    """Return losses, the first values of embedding and output layer, and an exported folder."""
    settings: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-3}
    module: Any
    if kind == "gpt":
        module = GPTLightningModule(init_from_hf=folder, **settings)
    else:
        module = HuggingFaceModule(folder, **settings)
    module.new_tokens = new
    first: list[torch.Tensor] = []
    if options is None:
        module.configure_model()
        layers = module.model.get_input_embeddings(), module.model.get_output_embeddings()
        first = [layer.weight.detach().clone() for layer in layers]
    rows: Any = [
        {name: torch.where(x == 126, min(new.values()), x) for name, x in row.items()}
        for row in ROWS
    ]
    run = fit(options, module, DataLoader(rows, batch_size=BATCH // data), steps=2)
    target = f"{folder}-{kind}-{len(new)}-{min(new.values())}-{data}-{len(options or ())}"
    module.save_hf_pretrained(target, overwrite=True)
    return run.losses, first, target


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("folder")
    model = llama(tie_word_embeddings=request.param)
    with torch.no_grad():  # spare rows of no meaning
        model.get_input_embeddings().weight[126:] = 9.0
    model.save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "kind", "layout", "data"),
    [
        (SPARE, "llama", {TP: 2}, 1),
        (GROWN, "llama", {TP: 2}, 1),
        (GROWN, "gpt", {PP: 2, "micro_batch_size": 2}, 1),
        (GROWN, "llama", {"data_parallel": "fsdp"}, 2),
        (SPARE, "llama", {PP: 2, "micro_batch_size": 2}, 1),
        (SPARE, "gpt", {PP: 2, "micro_batch_size": 2}, 1),
    ],
)
def test_rows_begin_as_the_mean_alike(
    folder: str, new: dict[str, int], kind: str, layout: dict[str, Any], data: int
) -> None:
    [(losses, first, _)] = run_ranks(1, _fit, folder, "llama", None, 1, new)
    before = LlamaForCausalLM.from_pretrained(folder)
    layers = before.get_input_embeddings(), before.get_output_embeddings()
    own = min(new.values())
    for rows, layer in zip(first, layers, strict=True):
        mean = layer.weight[:own].float().mean(0)
        assert len(rows) == (NUM_GROWN if new is GROWN else 128)
        torch.testing.assert_close(rows[own:], mean.expand(len(rows) - own, -1), rtol=0, atol=1e-7)
        assert torch.equal(rows[:own], layer.weight[:own])
    ranks = run_ranks(2, _fit, folder, kind, layout, data, new)
    for step, loss in enumerate(losses):
        mean_loss = sum(rank[0][step] for rank in ranks) / 2
        assert mean_loss == pytest.approx(loss, rel=1e-5)  # fp32, after a step of AdamW
    written = LlamaForCausalLM.from_pretrained(ranks[0][2])
    assert written.config.vocab_size == len(written.get_input_embeddings().weight) == len(first[0])
    assert written.config.tie_word_embeddings == before.config.tie_word_embeddings


def test_frozen_rows_keep_their_values_with_a_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = HuggingFaceModule(folder, peft=LoRA(r=2))
    module.new_tokens = SPARE
    with pytest.warns(UserWarning, match="embed_tokens.weight.* is frozen.*modules_to_save"):
        module.configure_model()
    own = dict(module.model.named_parameters())["model.embed_tokens.weight"]
    theirs = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert torch.equal(own, theirs["model.embed_tokens.weight"])


def test_a_trained_embedding_beside_adapters_has_rows(folder: str, tmp_path: Path) -> None:
    saved = ["embed_tokens", "lm_head"]
    module = HuggingFaceModule(folder, peft=LoRA(r=2, modules_to_save=saved))
    module.new_tokens = SPARE
    module.configure_model()
    first = module.model.get_input_embeddings().weight[126:].detach()
    assert float(first.abs().max()) < 1
    assert module.model.config.tie_word_embeddings == (
        module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight
    )


def _fine_tune(
    folder: str, rows: str, target: str, steps: int, options: dict[str, Any], peft: LoRA | None
) -> tuple[int, list[float]]:
    """Train up to a step, and write the model if there are no adapters. Return the first step."""
    record = Losses()
    first: list[int] = []
    begun = pl.callbacks.LambdaCallback(on_train_start=lambda t, _: first.append(t.global_step))
    keep = ModelCheckpoint(f"{target}-run", save_last=True, every_n_train_steps=1)
    fit = trainer(
        MegatronStrategy(**options),
        max_steps=steps,
        callbacks=[record, begun, keep],
        enable_checkpointing=True,
        default_root_dir=f"{target}-run",
    )
    module = HuggingFaceModule(folder, learning_rate=1e-3, peft=peft)
    data = FinetuneDataModule(
        rows, sequence_length=64, batch_size=2, new_tokens=["<new>"], cache_dir=f"{target}-cache"
    )
    fit.fit(module, datamodule=data, ckpt_path="last")
    if peft is None:
        module.save_hf_pretrained(target, overwrite=True)
    return first[0], record.losses


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_an_exported_folder_has_the_tokenizer_with_new_tokens(
    adapters: bool, tmp_path: Path
) -> None:
    """Also after a resume, which reads the tokenizer from the checkpoint."""
    folder, target = str(tmp_path / "base"), str(tmp_path / "target")
    llama(vocab_size=len(make_tokenizer())).save_pretrained(folder)  # no spare row: it grows
    make_tokenizer().save_pretrained(folder)
    conversation = {"messages": [turn("user", "what is <new>"), turn("assistant", "a <new>")]}
    rows = write_rows(tmp_path / "rows.jsonl", [*chats(6), *[conversation] * 6])
    saved = ["embed_tokens", "lm_head"]
    peft = LoRA(r=2, modules_to_save=saved) if adapters else None
    for steps in (1, 2):
        ranks = run_ranks(2, _fine_tune, folder, rows, target, steps, {TP: 2}, peft)
        assert all(rank[0] == steps - 1 for rank in ranks)
    checkpoint = f"{target}-run/last.ckpt"
    written = [target]
    if adapters:
        written = [f"{target}-adapters", f"{target}-merged", f"{target}-merged-too"]
        export(checkpoint, written[0])
        merge(checkpoint, written[1], base=folder)
        with pytest.raises(CheckpointError, match="of another size"):
            merge(written[0], written[2], base=folder)
        written.pop()
    else:
        written.append(f"{target}-converted")
        export_model(checkpoint, written[1])
    known = make_tokenizer()
    assert known.convert_tokens_to_ids("<new>") == known.unk_token_id
    for path in written:
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert tokenizer("what<new>").input_ids == [*known("what").input_ids, len(known)], path
        assert tokenizer.chat_template == known.chat_template and tokenizer.eos_token_id == (
            known.eos_token_id
        )


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_a_tokenizer_beyond_the_rows_is_refused(tmp_path: Path, strategy: str) -> None:
    """New tokens make room for themselves alone."""
    folder = str(tmp_path / "base")
    llama(vocab_size=len(make_tokenizer()) - 2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rows = write_rows(tmp_path / "rows.jsonl", chats(4))
    data = FinetuneDataModule(rows, sequence_length=64, batch_size=2, new_tokens=["<new>"])
    fit = trainer(MegatronStrategy() if strategy == "megatron" else "auto", max_steps=1)
    with pytest.raises(ConfigError, match=r"ids without new_tokens, and the embedding"):
        fit.fit(HuggingFaceModule(folder), datamodule=data)
