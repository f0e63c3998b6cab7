"""Checkpoints of Megatron-Core: read as torch reads them, equal in logits, never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.commands import export, import_, verify
from megatron_lightning.bridge.megatron_checkpoints.megatron import MegatronBridge
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import MegatronFolder
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError, MissingCheckpointError
from megatron_lightning.parallel.shards.spec import Box, Shard

pytest.importorskip("transformers")
from tests.helpers.record_torch_dist import STEP, VOCABULARY, tokens
from tests.helpers.torch_dist import FOLDERS, ITERATION, unpack, write_config


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parent = tmp_path_factory.mktemp("megatron")
    unpack(parent)
    for case in FOLDERS:
        write_config(case, parent / f"like-{case}")
    yield parent
    shutil.rmtree(parent)


@pytest.fixture
def dense(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(checkpoints / "dense" / ITERATION, tmp_path / ITERATION))


def _read(case: str, parent: Path) -> MegatronBridge:
    return MegatronBridge(parent / case, parent / f"like-{case}")


def _by_torch(folder: MegatronFolder) -> dict[str, Tensor]:
    values = {n: torch.empty(x.shape, dtype=x.dtype) for n, x in folder.tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(values, checkpoint_id=str(folder.path), no_dist=True)
    return values


@pytest.mark.parametrize("case", FOLDERS)
def test_every_tensor_is_read_as_by_torch(checkpoints: Path, case: str) -> None:
    folder = MegatronFolder(checkpoints / case)
    expected = _by_torch(folder)
    assert folder.iteration == STEP
    for name, tensor in folder.tensors.items():
        assert torch.equal(tensor.read(), expected[name]), name
        inside = Box(tuple(n // 3 for n in tensor.shape), tuple((n + 1) // 2 for n in tensor.shape))
        assert torch.equal(tensor.read(inside), expected[name][inside.slices]), name


@pytest.mark.parametrize("case", FOLDERS)
def test_logits_are_those_of_megatron_core(checkpoints: Path, case: str) -> None:
    expected = load_file(checkpoints / case / "logits.safetensors")["logits"]
    assert expected.std() > 0.9
    bridge = _read(case, checkpoints).bridge
    # transformers has no names for layers of multi-token prediction.
    for kind in ("gpt",) if case == "latent" else ("gpt", "transformers"):
        with torch.no_grad():
            found = bridge.to_model(kind, dtype=torch.float32).eval()(tokens())
        difference = (getattr(found, "logits", found) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max(), kind  # fp32, sums in another order


def test_a_checkpoint_is_imported_with_the_state_of_adam(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like = str(checkpoints / "like-experts")
    import_(str(checkpoints / "experts"), str(tmp_path / "gpt"), like=like)
    assert f"Adam after {STEP} steps" in capsys.readouterr().out
    source = open_checkpoint(tmp_path / "gpt")
    theirs = _by_torch(MegatronFolder(checkpoints / "experts"))

    def values(name: str) -> Tensor:
        out = torch.empty(source.tensors()[name].shape)
        source.read([(name, Shard((0,) * out.ndim, out))])
        return out

    experts = "decoder.layers.{}mlp.experts.{}linear_fc2.weight"
    state = f"optimizer_states.0.state.model.{experts.format('3.', '')}"
    for key in ("exp_avg", "exp_avg_sq"):
        expected = theirs[f"chained_1.optimizer.state.{key}.{experts.format('', 'experts.')}"][3]
        assert torch.equal(values(f"{state}.{key}"), expected)
    assert values(f"{state}.step") == STEP
    (groups,) = (entry["param_groups"] for entry in source.state()["optimizer_states"])
    assert [group["name"] for group in groups] == ["default", "no_decay"]
    assert "model.decoder.final_layernorm.weight" in groups[1]["params"]
    import_(str(checkpoints / "experts"), str(tmp_path / "hf"), "hf", like=like)
    source = open_checkpoint(tmp_path / "hf")
    name = "optimizer_states.0.state.model.model.layers.3.mlp.experts.down_proj.exp_avg"
    expected = theirs[f"chained_1.optimizer.state.exp_avg.{experts.format('', 'experts.')}"][3]
    assert torch.equal(values(name), expected)


def test_a_checkpoint_becomes_a_folder(checkpoints: Path, tmp_path: Path) -> None:
    export(str(checkpoints / "dense"), str(tmp_path / "hf"), like=str(checkpoints / "like-dense"))
    verify(str(tmp_path / "hf"), "gpt")
    embedding = AutoBridge.from_hf_pretrained(tmp_path / "hf").folder.tensors[
        "model.embed_tokens.weight"
    ]
    theirs = _by_torch(MegatronFolder(checkpoints / "dense"))["embedding.word_embeddings.weight"]
    assert embedding.dtype == torch.bfloat16
    assert torch.equal(embedding.read(), theirs[:VOCABULARY])  # without padding
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    bridge.export_ckpt(checkpoints / "dense", tmp_path / "again", dtype=torch.float32)
    again = load_file(tmp_path / "again/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(again, theirs[:VOCABULARY].float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "unexpected.*decoder.layers.self_attention.linear_qkv.weight"),
        ({"num_hidden_layers": 5}, "are missing .decoder.layers.0.input_layernorm.weight"),
        ({"intermediate_size": 20}, r"linear_fc1.weight has \[48, 16\] instead of \[40, 16\]"),
        ({"vocab_size": 65}, "word_embeddings.weight has .64, 16. instead of .65, 16."),
        ({"tie_word_embeddings": True}, "1 tensors are unexpected .output_layer.weight"),
        ({"attention_bias": True, "mlp_bias": True}, "linear_qkv.bias"),
    ],
)
def test_another_model_is_refused(
    checkpoints: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    like = write_config("dense", tmp_path / "like", **changes)
    with pytest.raises(CheckpointError, match=message):
        MegatronBridge(checkpoints / "dense", like)


def test_without_a_configuration_the_way_out_is_named(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match="--like FOLDER"):
        import_(str(checkpoints / "dense"), "unwritten")
    with pytest.raises(ConfigError, match="Leave like out"):
        import_(str(checkpoints / "like-dense"), "unwritten", like="another")
    with pytest.raises(MissingCheckpointError, match="not found: missing"):
        import_("missing", "unwritten", like="another")


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


def _edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return a damage of the table."""

    def damage(path: Path) -> None:
        table = pickle.loads((path / ".metadata").read_bytes())
        change(table)
        (path / ".metadata").write_bytes(pickle.dumps(table))

    return damage


def _first(table: Any) -> Any:
    return table.state_dict_metadata["output_layer.weight"]


def _place(table: Any) -> Any:
    return next(v for k, v in table.storage_data.items() if k.fqn == "output_layer.weight")


def _replace_part(values: Any) -> Callable[[Path], None]:
    """Return a damage of a tensor's archive, in the same length."""

    def damage(path: Path) -> None:
        place = _place(pickle.loads((path / ".metadata").read_bytes()))
        stream = io.BytesIO()
        torch.save(values, stream)
        content = bytearray((path / place.relative_path).read_bytes())
        end = place.offset + place.length
        content[place.offset : end] = stream.getvalue()[: place.length].rjust(place.length, b"\0")
        (path / place.relative_path).write_bytes(content)

    return damage


def _write(name: str, content: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(content) and None


def _cut(path: Path) -> None:
    place = _place(pickle.loads((path / ".metadata").read_bytes()))
    os.truncate(path / place.relative_path, place.offset + 10)


def _empty_file(path: Path) -> None:
    def change(table: Any) -> None:
        place = _place(table)
        place.relative_path, place.offset, place.length = "empty", 0, 0

    (path / "empty").touch()
    _edit(change)(path)


def _without_dims(table: Any) -> None:
    """Make a tensor of all layers a scalar, in the place of its first part."""
    name = "decoder.layers.self_attention.linear_qkv.weight"
    entry = table.state_dict_metadata[name]
    entry.size = torch.Size([])
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    index = next(key for key in table.storage_data if key.fqn == name)
    table.storage_data[replace(index, offset=torch.Size([]))] = table.storage_data[index]


def _one_part_of_a_scalar(table: Any) -> None:
    entry = _first(table)
    entry.size = torch.Size([])
    del entry.chunks[1:]


def _inflating(path: Path) -> None:
    """Write an archive whose byte order inflates to 64 MiB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as entries:
        with entries.open("archive/byteorder", "w") as entry:
            for _ in range(64):
                entry.write(bytes(1 << 20))
        entries.writestr("archive/data.pkl", b"")
    (path / "inflating").write_bytes(stream.getvalue())

    def change(table: Any) -> None:
        place = _place(table)
        place.relative_path, place.offset = "inflating", 0
        place.length = len(stream.getvalue())

    _edit(change)(path)


def _legacy(path: Path) -> None:
    shutil.rmtree(path)
    (path / "mp_rank_00").mkdir(parents=True)
    (path / "mp_rank_00/model_optim_rng.pt").write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "code in the table": (_edit(lambda t: setattr(t, "planner_data", _Hostile())), "posix.mkdir"),
    "code in a tensor": (_replace_part(_Hostile()), "posix.mkdir"),
    "another tensor": (_replace_part(torch.zeros(31, 16).bfloat16()), r"holds \(31, 16\)"),
    "zeros": (_replace_part(b""), "output_layer.weight is"),
    "a path": (_edit(lambda t: setattr(_place(t), "relative_path", "../a")), "plain file names"),
    "a missing file": (_edit(lambda t: setattr(_place(t), "relative_path", "b")), "b is missing"),
    "a part beyond the end": (_edit(lambda t: setattr(_place(t), "length", 1 << 40)), "ends at"),
    "a cut file": (_cut, "ends at byte"),
    "a compressed part": (
        _edit(lambda t: setattr(_place(t), "transform_descriptors", ["zstd"])), "save it without",
    ),
    "a gap": (_edit(lambda t: _first(t).chunks.pop()), "leave gaps"),
    "parts twice": (_edit(lambda t: _first(t).chunks.append(_first(t).chunks[0])), "overlap"),
    "a negative size": (
        _edit(lambda t: _first(t).chunks.append(
            ChunkStorageMetadata(torch.Size([0, 0]), [-1, 16])  # type: ignore[arg-type]
        )), "no size",
    ),
    "a part of a scalar": (_edit(_one_part_of_a_scalar), "leave gaps in .."),
    "a tensor without dims": (
        _edit(_without_dims), "4 tensors are missing .decoder.layers.0.self_attention.linear_qkv"
    ),
    "an empty file": (_empty_file, "no bytes"),
    "an inflating entry": (_inflating, "byteorder of a tensor has 67,108,864 bytes"),
    "no table": (lambda path: (path / ".metadata").unlink(), "metadata is missing"),
    "an empty table": (_write(".metadata", ""), "EOFError"),
    "no format": (lambda path: (path / "metadata.json").unlink(), "has no metadata.json"),
    "another format": (_write("metadata.json", '{"sharded_backend": "zarr"}'), "'zarr' 1"),
    "no json": (_write("metadata.json", "["), "metadata.json is damaged"),
    "single ranks": (_legacy, "--ckpt-convert-format torch_dist"),
}  # fmt: skip


@pytest.mark.spread(8)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_hostile_checkpoints_are_refused_by_name(
    dense: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = DAMAGES[damage]
    change(dense)
    with pytest.raises(CheckpointError, match=message):
        import_(str(dense), "target", like=str(checkpoints / "like-dense"))
    assert not (tmp_path / "made-by-a-pickle").exists()
    assert not (tmp_path / "target").exists()
    assert [p.name for p in tmp_path.iterdir()] == [ITERATION]  # nothing unfinished is left


def test_the_tracker_names_the_checkpoint(dense: Path) -> None:
    tracker = dense.parent / "latest_checkpointed_iteration.txt"
    for text, message in (("../7", "no iteration"), ("8", "iter_0000008")):
        tracker.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            MegatronFolder(dense.parent)
    tracker.write_text("release\n")
    dense.rename(dense.parent / "release")
    assert MegatronFolder(dense.parent).iteration is None
    with pytest.raises(MissingCheckpointError):
        MegatronFolder(dense)


def test_without_an_iteration_there_is_no_state_of_adam(
    dense: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dense.rename(tmp_path / "moved")
    import_(str(path), str(tmp_path / "gpt"), like=str(checkpoints / "like-dense"))
    assert "since no iteration is in the name, as in iter_0001000" in capsys.readouterr().out


def test_a_checkpoint_of_nemo_is_the_folder_inside_with_a_prefix(
    dense: Path, checkpoints: Path, tmp_path: Path
) -> None:
    """The names that ``MegatronParallel.sharded_state_dict`` of NeMo 2.0 gives."""

    def prefix(key: str) -> str:
        state = re.match(r"(?:.*?optimizer\.state\.\w+\.)?", key)
        assert state is not None
        return f"{state.group()}module.{key[state.end() :]}"

    def rename(table: Any) -> None:
        entries = table.state_dict_metadata
        table.state_dict_metadata = {prefix(key): entry for key, entry in entries.items()}
        places = table.storage_data.items()
        table.storage_data = {replace(k, fqn=prefix(k.fqn)): place for k, place in places}

    expected = MegatronFolder(checkpoints / "dense")
    _edit(rename)(dense)
    (tmp_path / "nemo" / "context").mkdir(parents=True)
    dense.rename(tmp_path / "nemo" / "weights")
    found = MegatronFolder(tmp_path / "nemo")
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor.read(), expected.tensors[name].read()), name
    target = tmp_path / "gpt"
    import_(str(tmp_path / "nemo"), str(target), like=str(checkpoints / "like-dense"))
    assert "state_dict.model.output_layer.weight" in open_checkpoint(target).tensors()


def test_a_tensor_with_other_strides_is_read_by_its_values(dense: Path) -> None:
    values = torch.randn(16, 32).bfloat16().t()
    _replace_part(values)(dense)
    tensor = MegatronFolder(dense).tensors["output_layer.weight"]
    table = pickle.loads((dense / ".metadata").read_bytes())
    start = next(k for k in table.storage_data if k.fqn == "output_layer.weight").offset[0]
    assert torch.equal(tensor.read()[start : start + 32], values)


def test_a_checkpoint_that_changes_is_refused(dense: Path) -> None:
    folder = MegatronFolder(dense)
    for file in dense.glob("*.distcp"):
        file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        folder.tensors["output_layer.weight"].read()
    assert json.loads((dense / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
