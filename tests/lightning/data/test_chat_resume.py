"""A fit on packed conversations resumes exactly, on any number of data-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megatron_lightning.errors import CheckpointError
from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.chats import chats, make_tokenizer, write_rows
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")

SEQUENCE, GLOBAL_BATCH = 64, 4
Batches = list[list[list[int]]]


class Seen(pl.Callback):
    """All rows of every batch."""

    def __init__(self) -> None:
        self.batches: Batches = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.batches.append(batch["tokens"].tolist())


def _data(folder: str, replicas: int, options: dict[str, Any]) -> FinetuneDataModule:
    settings = {"packing": "online", "packing_window": 12, **options}
    return FinetuneDataModule(
        [(0.5, f"{folder}/a.jsonl"), (0.5, f"{folder}/b.jsonl")],
        sequence_length=SEQUENCE, batch_size=GLOBAL_BATCH // replicas,
        tokenizer=f"{folder}/tokenizer", cache_dir=f"{folder}/cache", **settings,
    )  # fmt: skip


def _fit(folder: str, replicas: int, resume: bool, steps: int) -> Batches:
    seen = Seen()
    config = tiny_config(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=320,
        max_sequence_length=SEQUENCE,
    )  # fmt: skip
    run = trainer(MegatronStrategy(), max_steps=steps, max_epochs=-1, callbacks=[seen])
    path = f"{folder}/mid.ckpt"
    data = _data(folder, replicas, {})
    run.fit(GPTLightningModule(config), datamodule=data, ckpt_path=path if resume else None)
    if not resume:
        run.save_checkpoint(path)
    return seen.batches


def _together(ranks: list[Batches]) -> Batches:
    """Return the rows of every step over all ranks, in any order."""
    return [sorted(row for rows in parts for row in rows) for parts in zip(*ranks, strict=True)]


@pytest.mark.timeout(200)
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """In the third epoch: an epoch has fewer than six steps."""
    folder = str(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "a.jsonl", chats(36))
    write_rows(tmp_path / "b.jsonl", chats(20)[7:])
    whole = _together(run_ranks(1, _fit, folder, 1, False, 16))
    assert len({str(batch) for batch in whole}) == 16
    first = _together(run_ranks(2, _fit, folder, 2, False, 9))
    assert first == whole[:9]
    rest = _together(run_ranks(1, _fit, folder, 1, True, 16))
    assert rest == whole[9:]


def test_another_order_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "a.jsonl", chats(6))
    write_rows(tmp_path / "b.jsonl", chats(6)[3:])
    state = _data(folder, 1, {}).state_dict()
    _data(folder, 1, {}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"packing_window: 13 here, 12 there"):
        _data(folder, 1, {"packing_window": 13}).load_state_dict(state)
    write_rows(tmp_path / "b.jsonl", chats(5)[3:])
    with pytest.raises(CheckpointError, match=r"documents: .* here, .* there"):
        _data(folder, 1, {}).load_state_dict(state)
    with pytest.warns(UserWarning, match="Training reads on at the same position"):
        _data(folder, 1, {"on_changed_data": "reorder"}).load_state_dict(state)


def test_other_new_tokens_are_refused(tmp_path: Path) -> None:
    """Also where no document has the tokens, so that the order is the checkpoint's."""
    folder = str(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name in "ab":
        write_rows(tmp_path / f"{name}.jsonl", chats(6))
    first = _data(folder, 1, {"new_tokens": ["<a>", "<b>"]})
    state = first.state_dict()
    _data(folder, 1, {"new_tokens": ["<a>", "<b>"]}).load_state_dict(state)
    missing = r"with new_tokens \['<a>', '<b>'\], and this run has no such token in the place of"
    with pytest.raises(CheckpointError, match=missing):
        _data(folder, 1, {}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"id 321 in the place of '<a>' with id 320"):
        _data(folder, 1, {"new_tokens": ["<b>", "<a>"]}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"new_tokens has \['<c>'\], and the run of the chec"):
        _data(folder, 1, {"new_tokens": ["<a>", "<b>", "<c>"]}).load_state_dict(state)
    # The tokenizer of a full checkpoint has the tokens, and the next checkpoint names them again.
    first.tokenizer.tokenizer.save_pretrained(tmp_path / "tokenizer")
    resumed = _data(folder, 1, {})
    resumed.load_state_dict({"new_tokens": state["new_tokens"], "order": {}, "consumed_samples": 0})
    assert resumed.state_dict()["new_tokens"] == {"<a>": 320, "<b>": 321}
