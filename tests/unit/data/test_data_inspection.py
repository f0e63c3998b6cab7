"""What `data inspect` and `data show` print of indexed data, and the damage that they name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data.indexed.data_inspection import inspect
from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules.data_modules.data_commands import show

DOCUMENTS = [[5, 6, 1], [7, 1], [8, 9, 10, 11, 1]]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetWriter(tmp_path / "data", "int32") as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return str(tmp_path / "data")


def test_sizes_ids_and_lengths(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    inspect([prefix], vocab_size=12)
    out = capsys.readouterr().out
    assert "3 documents of 3 sequences" in out and "10 tokens of int32" in out
    assert "ids 1 to 11" in out and "3 documents, 10 tokens, median 3" in out
    with pytest.raises(DataError, match=r"has ids 1 to 11, and vocab_size=11"):
        inspect([prefix], vocab_size=11)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (34, np.int32(-3), "sequence 0 has -3 tokens"),
        (34 + 12 + 8, np.int64(1 << 20), r"sequence 1 lies at bytes 1048576 to 1048584 of 40"),
        (34 + 12 + 8, np.int64(-4), r"sequence 1 lies at bytes -4 to 4 of 40"),
        (34 + 12 + 8, np.int64(13), r"sequence 1 lies at bytes 13 to 21 .* in tokens of 4 bytes"),
        (34 + 12 + 24 + 8, np.int64(9), "document 1 ends before it begins"),
    ],
)
def test_damage_is_named(offset: int, value: np.generic, message: str, prefix: str) -> None:
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(offset)
        file.write(value.tobytes())
    with pytest.raises(DataError, match=message):
        inspect([prefix])
    with pytest.raises(DataError, match=message):
        merge([prefix], output_prefix=f"{prefix}-merged")
    assert not list(Path(prefix).parent.glob("*-merged*"))
    if offset < 34 + 12 + 24:  # training reads no boundaries of documents
        config = GPTDatasetConfig(sequence_length=2, split="1")
        with pytest.raises(DataError, match=r"sequence \d (has -3 tokens|do not exist)"):
            data = GPTDataset(prefix, config)
            [data[index] for index in range(len(data))]


def test_documents_without_a_tokenizer(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(prefix=prefix, samples=2)
    out = capsys.readouterr().out
    assert "document 2 of 3: 2 tokens" in out and "7 1" in out and "8 9" not in out
    with pytest.raises(ConfigError, match="config is None and prefix is None"):
        show()


def test_samples_of_a_configuration(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_lightning.data.text.tokenizers import train_sentencepiece

    train_sentencepiece(["def f(x): return x\n"] * 9, 280, tmp_path / "tokens.model")
    with IndexedDatasetWriter(tmp_path / "text", "int32") as writer:
        for _ in range(9):
            writer.add_document([263, 264, 2])
    (tmp_path / "config.yaml").write_text(
        "data:\n  class_path: megatron_lightning.modules.PretrainDataModule\n"
        f"  init_args: {{data_prefix: {tmp_path / 'text'}, sequence_length: 6, batch_size: 1, "
        f"split: '1', tokenizer_model: {tmp_path / 'tokens.model'}}}\n"
    )
    show(config=[str(tmp_path / "config.yaml")], samples=1)
    out = capsys.readouterr().out
    assert "sample 1 of 4: 6 tokens" in out and out.count("end of document") == 2
    assert f"{tmp_path / 'text'}\n" in out
