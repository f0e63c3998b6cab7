"""Folders of safetensors files: what is mapped, counted, and refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder import HuggingFaceFolder
from megatron_lightning.bridge.folders.folder_record import keep
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.file_names import PICKLED_INDEX, PICKLED_WEIGHTS, WEIGHTS, WEIGHTS_INDEX
from megatron_lightning.parallel.shards.spec import Box

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(10).to(torch.bfloat16),
    "c.scale": torch.tensor(2.0),
    "d.flags": torch.tensor([True, False, True]),
    "e.empty": torch.empty(0, 3),
}


def make(path: Path, num_files: int = 2) -> Path:
    """Write the tensors, in files with an index or in one."""
    path.mkdir()
    if num_files == 1:
        save_file(TENSORS, path / WEIGHTS)
        return path
    names = [f"model-{index:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]
    weight_map = {name: names[index % num_files] for index, name in enumerate(TENSORS)}
    for file in names:
        save_file({n: TENSORS[n] for n, f in weight_map.items() if f == file}, path / file)
    (path / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_tensors_are_read_box_by_box_and_counted(tmp_path: Path, num_files: int) -> None:
    folder = HuggingFaceFolder(make(tmp_path / "folder", num_files))
    assert {name: (x.shape, x.dtype) for name, x in folder.tensors.items()} == {
        name: (x.shape, x.dtype) for name, x in TENSORS.items()
    }
    assert folder.bytes_read == 0
    box = Box((1, 1), (2, 2))
    assert torch.equal(folder.tensors["a.weight"].read(box), TENSORS["a.weight"][1:, 1:3])
    assert folder.bytes_read == 16
    for name, expected in TENSORS.items():
        assert torch.equal(folder.tensors[name].read(), expected), name


def _disk_bytes() -> int:
    """Return the bytes that this process has read from the disk. 0: no counter."""
    counters = Path("/proc/self/io")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(x.split()[1]) for x in lines if x.startswith("read_bytes:")), 0)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing empties the page cache")
def test_the_kernel_counts_the_same_bytes(tmp_path: Path) -> None:
    """Cold, each byte comes from the disk once, in full pages and with the header."""
    tensors = {f"{index}.weight": torch.randn(512, 1024) for index in range(4)}
    save_file(tensors, tmp_path / WEIGHTS)
    with (tmp_path / WEIGHTS).open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, folder = _disk_bytes(), HuggingFaceFolder(tmp_path)
    for name, expected in tensors.items():
        assert torch.equal(folder.tensors[name].read(), expected)
    read = _disk_bytes() - before
    assert folder.bytes_read == sum(x.nbytes for x in tensors.values())
    if not read:
        pytest.skip("files of this machine are in memory, or nothing counts reads of the disk")
    assert read == pytest.approx(folder.bytes_read, rel=0.02)


def _truncate(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = (path / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return damage


def _oversized(path: Path) -> None:
    (path / WEIGHTS).write_bytes((10**12).to_bytes(8, "little") + b"{}")


def _twice(path: Path) -> None:
    entry = '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = f"{{{entry},{entry}}}".encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "and the file has"),
    "oversized header": (_oversized, "does not fit into a file"),
    "a name twice": (_twice, "a name appears twice"),
    "shape": (_header(lambda h: h["a.weight"].update(shape=[3, 5])), "bytes from .* were expected"),
    "negative shape": (_header(lambda h: h["a.weight"].update(shape=[-3, -4])), "has shape"),
    "dtype": (_header(lambda h: h["a.weight"].update(dtype="F5")), "a.weight has dtype 'F5'"),
    "overlap": (
        _header(lambda h: h["b.weight"].update(data_offsets=h["a.weight"]["data_offsets"])),
        "were expected",
    ),
    "no offsets": (_header(lambda h: h["a.weight"].pop("data_offsets")), "cannot be parsed"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    path = make(tmp_path / "folder", 1)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as error:
        HuggingFaceFolder(path)
    assert WEIGHTS in str(error.value)


INDEXES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is damaged"),
    "no table": ({"weight_map": []}, "is damaged"),
    "a name twice": (
        '{"weight_map": {"a.weight": "model-00000-of-00002.safetensors", "a.weight": "b"}}',
        "a name appears twice",
    ),
    "an index in itself": (
        {"weight_map": {"a.weight": WEIGHTS_INDEX}},
        "cannot be parsed|does not fit",
    ),
    "deep": ("[" * 100_000, "is damaged"),
    "numbers": ({"weight_map": {"a.weight": 1}}, "no table of file names"),
    "a path": ({"weight_map": {"a.weight": "../model.safetensors"}}, "no plain file name"),
    "an absolute path": ({"weight_map": {"a.weight": "/etc/passwd"}}, "no plain file name"),
    "a missing file": ({"weight_map": {"a.weight": "other.safetensors"}}, "is missing"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_hostile_indexes_are_refused(tmp_path: Path, name: str) -> None:
    content, message = INDEXES[name]
    path = make(tmp_path / "folder")
    (path / WEIGHTS_INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(path)


def test_files_that_never_end_and_links_in_circles_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "folder")
    file = min(path.glob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="is no regular file"):
        HuggingFaceFolder(path)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        HuggingFaceFolder(path)


def test_an_index_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "folder")
    index = json.loads((path / WEIGHTS_INDEX).read_text())
    del index["weight_map"]["c.scale"]
    (path / WEIGHTS_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"c\.scale is in no file, and it is in model-"):
        HuggingFaceFolder(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "folder")
    second = sorted(path.glob("*.safetensors"))[1]
    save_file({"b.weight": TENSORS["b.weight"], "a.weight": TENSORS["a.weight"]}, second)
    with pytest.raises(CheckpointError, match=r"a\.weight is in .* and in "):
        HuggingFaceFolder(path)


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "folder", 1)
    folder = HuggingFaceFolder(path)
    folder.tensors["b.weight"].read()
    _truncate(path)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        folder.tensors["a.weight"].read()


def test_a_file_that_is_empty_before_its_first_read_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "folder", 1)
    folder = HuggingFaceFolder(path)
    os.truncate(path / WEIGHTS, 0)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        folder.tensors["b.weight"].read()


def test_folders_without_safetensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError):
        HuggingFaceFolder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="it has no weights"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Path("somewhere")))
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        HuggingFaceFolder(tmp_path)


def _pickled(path: Path, num_files: int) -> Path:
    """Write the tensors as pickles, several of them with an index."""
    path.mkdir()
    if num_files == 1:
        torch.save(TENSORS, path / PICKLED_WEIGHTS)
        return path
    names = [f"pytorch_model-{index:05d}-of-{num_files:05d}.bin" for index in range(num_files)]
    weight_map = {name: names[index % num_files] for index, name in enumerate(TENSORS)}
    for file in names:
        torch.save({n: TENSORS[n] for n, f in weight_map.items() if f == file}, path / file)
    (path / PICKLED_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("num_files", [1, 2])
def test_pickles_are_mapped_and_written_as_safetensors(tmp_path: Path, num_files: int) -> None:
    path = _pickled(tmp_path / "folder", num_files)
    folder = HuggingFaceFolder(path)
    assert torch.equal(
        folder.tensors["a.weight"].read(Box((1, 1), (2, 2))), TENSORS["a.weight"][1:, 1:3]
    )
    assert folder.bytes_read == 16
    write_folder(tmp_path / "out", folder, folder.tensors)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {WEIGHTS}
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == TENSORS.keys()
    assert all(torch.equal(written[name], expected) for name, expected in TENSORS.items())
    save_file({"other": torch.ones(2)}, path / WEIGHTS)
    assert list(HuggingFaceFolder(path).tensors) == ["other"]


def test_an_export_without_some_tensor_is_refused(tmp_path: Path) -> None:
    folder = HuggingFaceFolder(make(tmp_path / "folder"))
    more = {**folder.tensors, "f.weight": folder.tensors["a.weight"]}
    fewer = {name: x for name, x in folder.tensors.items() if name != "b.weight"}
    for tensors, name in ((more, "f.weight"), (fewer, "b.weight"), ({}, "a.weight")):
        with pytest.raises(CheckpointError, match=f"{name}. Nothing was written"):
            write_folder(tmp_path / "out", folder, tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"folder"}


STALE = {"layers.0.rotary_emb.inv_freq": torch.ones(4), "embeddings.position_ids": torch.ones(1, 3)}


@pytest.mark.parametrize("num_files", [1, 2])
def test_buffers_of_earlier_versions_are_left_out_with_a_line(
    tmp_path: Path, num_files: int
) -> None:
    """As Llama 2's folders on the Hub have them, and checkpoints of such folders from before."""
    path = make(tmp_path / "folder", num_files)
    file = max(path.glob("*.safetensors"))
    save_file({**load_file(file), **STALE}, file)
    if num_files > 1:
        index = json.loads((path / WEIGHTS_INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(STALE, file.name)
        (path / WEIGHTS_INDEX).write_text(json.dumps(index))
    before = keep(HuggingFaceFolder(path), TENSORS, str(path), None)
    assert before.ignored.keys() == STALE.keys()
    with pytest.warns(UserWarning, match="2 buffers .* left out"):
        folder = HuggingFaceFolder(path, has_stale=False)
    kept = pickle.loads(pickle.dumps(before))  # by way of the checkpoint's entry
    kept.read_from({name: folder.tensors[name].fill for name in TENSORS})
    for number, like in enumerate((folder, kept)):
        out = tmp_path / f"out-{number}"
        write_folder(out, like, like.tensors)
        again = HuggingFaceFolder(out)  # the index fits the files
        assert again.tensors.keys() == like.tensors.keys() == TENSORS.keys()
        assert torch.equal(again.tensors["b.weight"].read(), TENSORS["b.weight"])
