"""Data at a URL: the samples of local files, also from a slow store that fails."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from torch.utils.data import DataLoader

from megatron_lightning.data import ByteTokenizer, load_tokenizer
from megatron_lightning.data.indexed import remote
from megatron_lightning.data.indexed.identity import content_digest
from megatron_lightning.data.indexed.indexed_files import IndexedDataset, IndexedDatasetWriter
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.data.indexed.sidecar import Sidecar, check_tokenizer
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig
from megatron_lightning.data.rows.sources import source_files
from megatron_lightning.data.text.preprocess import preprocess
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import PretrainDataModule


class Store(MemoryFileSystem):
    """A store with a pause for every request. Some requests fail."""

    protocol = ("store",)
    pause_s: ClassVar[float] = 0.0
    failing: ClassVar[float] = 0.0
    requests: ClassVar[list[tuple[int, int]]] = []
    process: int
    dice: ClassVar[random.Random] = random.Random(0)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.process = os.getpid()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('store://').lstrip('/')}"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        if self.process != os.getpid():  # as the stores of fsspec with an event loop
            raise RuntimeError("This class is not fork-safe")
        time.sleep(self.pause_s)
        if self.dice.random() < self.failing:
            raise OSError("503 Slow Down")
        self.requests.append((start, end))
        content: bytes = super().cat_file(path, start=start, end=end, **options)
        return content


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of a data set, also at store://data/text."""
    draws = np.random.RandomState(0)
    prefix = tmp_path / "text"
    with IndexedDatasetWriter(prefix, "int32") as writer:
        for _ in range(200):
            writer.add_document(draws.randint(0, 1000, draws.randint(1, 90)))
    fsspec.register_implementation("store", Store, clobber=True)
    store = fsspec.filesystem("store")
    for end in ("bin", "idx"):
        store.pipe(f"/data/text.{end}", Path(f"{prefix}.{end}").read_bytes())
    monkeypatch.setattr(remote, "BLOCK", 1000)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(Store, "pause_s", 0.0)
    monkeypatch.setattr(Store, "failing", 0.0)
    Store.requests.clear()
    return str(prefix)


def dataset(prefix: str, cache: Path, cache_bytes: int | None = None) -> GPTDataset:
    config = GPTDatasetConfig(
        sequence_length=32, split="1", cache_dir=str(cache), cache_bytes=cache_bytes
    )
    return GPTDataset(prefix, config, "train", 300)


def samples(data: Any, num: int | None = None) -> list[list[int]]:
    return [data[index]["tokens"].tolist() for index in range(len(data))[:num]]


def test_the_samples_of_local_files(files: str, tmp_path: Path) -> None:
    found = dataset("store://data/text", tmp_path / "kept")
    assert samples(found) == samples(dataset(files, tmp_path / "local"))
    size = Path(f"{files}.bin").stat().st_size
    blocks = {request for request in Store.requests if request[1] - request[0] <= 1000}
    assert len(blocks) >= -(-size // 1000)
    Store.requests.clear()
    # The folder belongs to a node: another process, or a resume, reads no byte again.
    assert samples(dataset("store://data/text", tmp_path / "kept")) == samples(found)
    assert Store.requests == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_store_that_fails(
    workers: int, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "pause_s", 0.02)
    monkeypatch.setattr(Store, "failing", 0.05)
    data = dataset("store://data/text", tmp_path / "kept")
    loader = DataLoader(data, batch_size=4, num_workers=workers)
    found = [row for batch in loader for row in batch["tokens"].tolist()]
    assert found == samples(dataset(files, tmp_path / "local"))


def test_blocks_are_fetched_before_they_are_read(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset("store://data/text", tmp_path / "kept")
    data[0]
    deadline = time.monotonic() + 10
    while len(list(remote._blocks_in(str(tmp_path / "kept")))) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_folder_stays_near_its_size(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SWEEP", 1)
    data = dataset("store://data/text", tmp_path / "kept", cache_bytes=8000)
    assert samples(data, 80) == samples(dataset(files, tmp_path / "local"), 80)
    kept = [path for path, _ in remote._blocks_in(str(tmp_path / "kept"))]
    assert 1 <= len(kept) <= 8 + remote._NUM_THREADS


def test_what_is_written_is_local(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`file://` is a local path, and other URLs are refused instead of folders of their names."""
    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("memory").pipe("/blend.yaml", f"train: [[1.0, {files}]]".encode())
    data = PretrainDataModule(
        "memory://blend.yaml", 32, 4, num_train_samples=8, cache_dir=f"file://{tmp_path}/kept"
    )
    data.prepare_data()
    assert list((tmp_path / "kept").glob("*-shuffle_index.npy"))
    GPTDataset(f"file://{files}", GPTDatasetConfig(sequence_length=32, split="1"))
    assert (Path(files) / "cache").is_dir()
    with pytest.raises(ConfigError, match="cache_dir=store://kept is a URL"):
        PretrainDataModule(files, 32, 4, split="1", cache_dir="store://kept").prepare_data()
    with pytest.raises(ConfigError, match="output_prefix=store://data/x is a URL"):
        preprocess("store://data/x", files, tokenizer_type="null", tokenizer_model="9")
    with pytest.raises(ConfigError, match="inputs=store://data/text is a URL"):
        merge(["store://data/text"], output_prefix="x")
    merge([f"file://{files}"], output_prefix=f"file://{tmp_path}/merged")
    assert Path(f"{tmp_path}/merged.bin").read_bytes() == Path(f"{files}.bin").read_bytes()
    with pytest.raises(ConfigError, match="tokenizer_model=store://t is a URL"):
        load_tokenizer("store://t")
    assert not list(tmp_path.glob("*:"))


def test_what_cannot_be_read_is_named(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"store://data/none\.idx: there is no such file"):
        dataset("store://data/none", tmp_path / "kept")
    with pytest.raises(DataError, match="is a URL, and there is no folder to keep"):
        GPTDataset("store://data/text", GPTDatasetConfig(sequence_length=32, split="1"))
    monkeypatch.setattr(Store, "failing", 1.0)
    with pytest.raises(DataError, match="the store did not answer 6 times"):
        dataset("store://data/text", tmp_path / "kept")


@pytest.mark.parametrize(("store", "reason"), [("never", "not known"), ("absent", "Install x")])
def test_a_store_without_a_package_is_named(
    store: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As s3:// where s3fs is not installed."""
    package = {"class": "x_is_not_installed.Store", "err": "Install x"}
    monkeypatch.setitem(known_implementations, "absent", package)
    url, message = f"{store}://bucket/x.json", rf"{store}://bucket/x.*{reason}"
    with pytest.raises(ConfigError, match=message):
        preprocess(str(tmp_path / "o"), url, tokenizer_type="bytes")
    with pytest.raises(ConfigError, match=message):
        source_files(url)
    with pytest.raises(DataError, match=message):  # the file of a blend
        PretrainDataModule(url, 32, 4)
    data = PretrainDataModule(f"{store}://bucket/x", 32, 4, cache_dir=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match=message):
        data.check_files("fit")


def test_processes_of_a_node_copy_an_index_once(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "pause_s", 0.05)
    cache = remote.BlockCache(str(tmp_path / "kept"))
    with ThreadPoolExecutor(4) as ranks:
        copies = set(ranks.map(cache.whole, ["store://data/text.idx"] * 4))
    assert [copy.read_bytes() for copy in copies] == [Path(f"{files}.idx").read_bytes()]
    assert len(Store.requests) == len(set(Store.requests))


def test_a_folder_that_cannot_be_written_is_named(files: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: what is read of store://data/text\.idx cannot be"):
        dataset("store://data/text", tmp_path / "file")


def test_data_at_a_url_of_another_tokenizer_are_refused(files: str, tmp_path: Path) -> None:
    small, large = ByteTokenizer(), ByteTokenizer(["<more>"])
    Sidecar.of(large, append_eod=False).write(files, IndexedDataset(files))
    store, content = fsspec.filesystem("store"), Path(f"{files}.json").read_bytes()
    store.pipe("/data/text.json", content)
    cache = remote.BlockCache(str(tmp_path / "kept"))
    check_tokenizer("store://data/text", large, "large", cache)
    with pytest.raises(DataError, match="store://data/text was written with another tokenizer"):
        check_tokenizer("store://data/text", small, "small", cache)
    store.rm("/data/text.json")
    check_tokenizer("store://data/text", small, "small", cache)


def test_a_changed_file_is_another_file(files: str, tmp_path: Path) -> None:
    before = dataset("store://data/text", tmp_path / "kept").indexed[0].tolist()
    with IndexedDatasetWriter(files, "int32") as writer:
        writer.add_document(np.arange(50))
    for end in ("bin", "idx"):
        fsspec.filesystem("store").pipe(f"/data/text.{end}", Path(f"{files}.{end}").read_bytes())
    after = dataset("store://data/text", tmp_path / "kept").indexed[0].tolist()
    assert before != after == list(range(50))


def test_the_data_module_by_url(files: str, tmp_path: Path) -> None:
    """`file://` too: the same batches and the same identity."""
    batches = {}
    for prefix in (files, f"file://{files}", "store://data/text"):
        data = PretrainDataModule(
            prefix, 32, 4, split="1", num_train_samples=40, cache_dir=str(tmp_path / "kept")
        )
        data.check_files("fit")
        data.prepare_data()
        data.setup("fit")
        loader: Any = data.train_dataloader()
        rows = [batch["tokens"].tolist() for batch in loader]
        batches[prefix] = rows, data.state_dict()["order"]
    assert batches[files] == batches[f"file://{files}"] == batches["store://data/text"]
    cache = remote.BlockCache(str(tmp_path / "kept"))
    assert content_digest(files) == content_digest("store://data/text", cache)
