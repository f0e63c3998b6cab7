"""PretrainDataModule under a plain Trainer, and from the command line's parser."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import PretrainDataModule
from tests.helpers.layouts import tiny_config


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(tmp_path / "data", "uint16") as writer:
        for _ in range(50):
            writer.add_document(random.randint(1, 100, size=random.randint(5, 60)))
    return str(tmp_path / "data")


class Recorder(pl.LightningModule):
    """Keeps the batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[dict[str, torch.Tensor]]] = {"train": [], "val": [], "test": []}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch)
        return self.weight * batch["loss_mask"].sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["val"].append(batch)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["test"].append(batch)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return batch["tokens"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**settings: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, **quiet, **settings
    )


@pytest.mark.parametrize("reader", [{}, {"num_workers": 1}, {"reading_thread": True}])
def test_fit_and_test(prefix: str, reader: dict[str, Any]) -> None:
    data = PretrainDataModule(
        prefix,
        16,
        4,
        split="80,10,10",
        num_train_samples=10,
        vocab_size=100,
        **reader,
    )
    module, runner = Recorder(), trainer(limit_train_batches=5, limit_val_batches=2)
    runner.fit(module, datamodule=data)
    assert len(module.seen["train"]) == 5
    batch = module.seen["train"][1]
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((4, 16), torch.int64),
        "labels": ((4, 16), torch.int64),
        "loss_mask": ((4, 16), torch.float32),
    }
    dataset = data._datasets["train"]
    # Front to back.
    assert torch.equal(batch["tokens"], torch.stack([dataset[i]["tokens"] for i in range(4, 8)]))
    assert module.seen["val"]
    runner.test(module, datamodule=data)
    assert sum(len(batch["tokens"]) for batch in module.seen["test"]) == len(data._datasets["test"])
    assert set(data.sequence_dims) == {*batch, "position_ids", "document_ids"}
    predictions = runner.predict(module, datamodule=data)  # of the test part
    assert len(predictions) == len(module.seen["test"])
    assert all(
        torch.equal(tokens, batch["tokens"])
        for tokens, batch in zip(predictions, module.seen["test"], strict=True)
    )


def test_parts_without_weight_have_no_loader(prefix: str) -> None:
    module = Recorder()
    trainer(limit_train_batches=2).fit(
        module, datamodule=PretrainDataModule(prefix, 16, 2, split="1")
    )
    assert len(module.seen["train"]) == 2
    assert not module.seen["val"]


def test_prepare_builds_what_setup_maps(prefix: str, tmp_path: Path) -> None:
    data = PretrainDataModule(prefix, 16, 2, split="90,10", cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    built = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(built) == 8
    data.setup("fit")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == built
    pickle.loads(pickle.dumps(data))


def test_tokenizer_gives_the_vocabulary(prefix: str, tmp_path: Path) -> None:
    train_sentencepiece(["some text to learn from"] * 10, 275, tmp_path / "t.model")
    data = PretrainDataModule(
        prefix, 16, 2, tokenizer_model=str(tmp_path / "t.model"), eod_mask_loss=True
    )
    assert (data.vocab_size, data.sequence_length) == (275, 16)
    assert pickle.loads(pickle.dumps(data)).vocab_size == 275


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resets_add_documents_and_positions(prefix: str, tmp_path: Path, num_workers: int) -> None:
    train_sentencepiece(["some text to learn from"] * 10, 275, tmp_path / "t.model")
    data = PretrainDataModule(
        prefix,
        64,
        4,
        split="1",
        tokenizer_model=str(tmp_path / "t.model"),
        reset_position_ids=True,
        reset_attention_mask=True,
        num_workers=num_workers,
    )
    assert data.tokenizer is not None
    module = Recorder()
    trainer(limit_train_batches=3).fit(module, datamodule=data)
    num_ends = 0
    for batch in module.seen["train"]:
        assert set(batch) == set(data.sequence_dims)
        for row, tokens in enumerate(batch["tokens"].tolist()):
            document = position = 0
            for place, token in enumerate(tokens):
                assert batch["document_ids"][row, place] == document
                assert batch["position_ids"][row, place] == position
                position += 1
                if token == data.tokenizer.eod:
                    document, position, num_ends = document + 1, 0, num_ends + 1
    assert num_ends > 5


def test_errors_reach_the_user(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        PretrainDataModule(prefix, 16, 0)
    with pytest.raises(DataError, match=r"missing\.idx: cannot be read"):
        trainer().fit(Recorder(), datamodule=PretrainDataModule(str(tmp_path / "missing"), 16, 2))
    with pytest.raises(ConfigError, match=r"tokenizer's eod has id 256, and the vocabulary .* 200"):
        data = PretrainDataModule(
            prefix, 16, 2, tokenizer_type="bytes", tokenizer_model="x", vocab_size=200
        )
        trainer().fit(Recorder(), datamodule=data)
    data = PretrainDataModule(prefix, 16, 2, tokenizer_type="bytes", vocab_size=257)
    trainer().fit(Recorder(), datamodule=data)  # the padding, 257, is in no sample
    readers: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"reading_thread": True}]
    for reader in readers:
        data = PretrainDataModule(prefix, 16, 2, split="1", vocab_size=50, **reader)
        with pytest.raises(
            DataError,
            match=r"data\.bin: token \d+ of sequence \d+ is id \d+, but the vocabulary has 50 ids",
        ):
            trainer().fit(Recorder(), datamodule=data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "0,100,0"}, "the train part has no weight; set it above 0"),
        (
            {"batch_size": 1000},
            r"has \d+ samples of 16 tokens, and batch_size=1000: .* num_train_samples to read",
        ),
        ({"num_train_samples": 0}, "num_train_samples=0: must be a positive integer"),
        ({"num_val_samples": -1}, "num_val_samples=-1: must be a positive integer"),
        ({"num_workers": -1}, "num_workers=-1: set it to 0"),
        (
            {"num_workers": 2, "reading_thread": True},
            r"reading_thread=True beside num_workers=2: .* Set one of the two",
        ),
        ({"seed": -1}, "seed=-1 is not a seed"),
    ],
)
def test_settings_that_nothing_can_be_trained_with(
    settings: dict[str, Any], message: str, prefix: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer().fit(
            Recorder(), datamodule=PretrainDataModule(prefix, 16, **{"batch_size": 2, **settings})
        )


def test_the_module_says_what_ids_it_knows(prefix: str) -> None:
    class Small(Recorder):
        config = tiny_config(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=50)

    with pytest.raises(DataError, match=r"is id \d+, but the vocabulary has 50 ids"):
        trainer().fit(Small(), datamodule=PretrainDataModule(prefix, 16, 2))


def test_command_line_schema(prefix: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PretrainDataModule, "data")
    found = parser.parse_args(
        [
            "--data=PretrainDataModule",
            f"--data.data_prefix={prefix}",
            "--data.sequence_length=8",
            "--data.batch_size=2",
        ]
    )
    data = parser.instantiate(found).data
    assert isinstance(data, PretrainDataModule)
    assert data.sequence_length == 8


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"split": "100,0,0"},
            r"the (validation|test) part, and split='100,0,0' gives it no document",
        ),
        ({"named": True}, r"the (validation|test) data, and data_prefix has none"),
    ],
)
def test_a_run_over_an_empty_part_is_refused(
    stage: str, settings: dict[str, Any], message: str, prefix: str
) -> None:
    options = {name: value for name, value in settings.items() if name != "named"}
    source: Any = {"train": prefix} if "named" in settings else prefix
    data = PretrainDataModule(source, 16, 2, **options)
    with pytest.raises(ConfigError, match=f"{stage} reads {message}"):
        getattr(trainer(), stage)(Recorder(), datamodule=data)
    mock = PretrainDataModule(mock=True, sequence_length=16, batch_size=2, split="1,0,0")
    with pytest.raises(ConfigError, match=f"{stage} reads"):
        mock.setup(stage)
