"""Files made to do harm, with right checksums: whatever a load could meet is refused with a clear
error, and nothing runs."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.callbacks import LocalCopyCheckpoint
from megatron_lightning.checkpoint import (
    TensorShards,
    consolidate,
    is_committed,
    load_sharded,
    open_checkpoint,
    read_full,
)
from megatron_lightning.checkpoint.format.naming import OWN, name_optimizer_state
from megatron_lightning.checkpoint.format.structure import check_progress
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.local_copies.local import Pointer
from megatron_lightning.checkpoint.tools.pruning import find_prunable
from megatron_lightning.checkpoint.tools.verification import verify
from megatron_lightning.checkpoint.writing.saving import save_sharded
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError
from megatron_lightning.inference.commands.load import read_config
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.shards.spec import Shard
from megatron_lightning.strategies import ShardedCheckpointIO
from tests.helpers import squashed_layer  # noqa: F401  # imported, and so known by name
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import ONE, Layout, run

NAME = "state_dict.weight"


class _Harm:
    """Runs something when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _makes(folder: Path) -> _Harm:
    return _Harm(os.mkdir, str(folder / "ran"))


def _save(path: Path, state: dict[str, Any] | None = None) -> None:
    weight = torch.arange(48.0).reshape(8, 6)
    halves = [Shard((0, 0), weight[:4]), Shard((4, 0), weight[4:])]
    save_sharded(
        path,
        [TensorShards(NAME, (8, 6), weight.dtype, halves)],
        {"epoch": 1} if state is None else state,
    )


def _load(path: Path) -> None:
    source = open_checkpoint(path)
    load_sharded(
        source,
        [
            TensorShards.full(n, torch.zeros(t.shape, dtype=t.dtype))
            for n, t in source.tensors().items()
        ],
    )
    source.state()


def _write_manifest(path: Path, body: str) -> None:
    """Write a manifest with a right checksum; ``body`` is its text without one."""
    (path / "manifest.json").write_text(f'{body[:-1]},"checksum":{zlib.crc32(body.encode())}}}')


def _body(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    return body


def _text(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _forge_state(path: Path, content: bytes) -> None:
    body = _body(path)
    (path / body["state"]["file"]).write_bytes(content)
    body["files"][body["state"]["file"]], body["state"]["checksum"] = (
        len(content),
        zlib.crc32(content),
    )
    _write_manifest(path, _text(body))


def _saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# The manifest


def _shard(body: dict[str, Any], entry: int, value: Any, number: int = 0) -> None:
    body["tensors"][NAME]["shards"][number][entry] = value


def _crumble(body: dict[str, Any]) -> None:
    """Add a tensor of many dims and parts: comparing their corners would take hours."""
    shape = [2] * 11 + [4]
    parts = [[0, 0, [*map(int, f"{i // 4:011b}"), i % 4], [1] * 12, [0]] for i in range(8192)]
    body["tensors"]["x"] = {"shape": shape, "dtype": "int8", "shards": parts}


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "climbs": (lambda b: b["files"].update({"../outside": 4}), "leads out"),
    "climbs-on-windows": (lambda b: b["files"].update({"..\\outside": 4}), "leads out"),
    "absolute": (lambda b: b["files"].update({"/etc/passwd": 4}), "leads out"),
    "is-the-folder": (lambda b: b["files"].update({".": 4}), "leads out"),
    "ends-early": (lambda b: b["files"].update({"a\0b": 4}), "leads out"),
    "state-elsewhere": (lambda b: b["state"].update(file="/etc/passwd"), "not among the files"),
    "state-no-name": (lambda b: b["state"].update(file=["a"]), "malformed"),
    "huge-file": (
        lambda b: b["files"].update({b["state"]["file"]: 1 << 62}),
        "and the manifest says",
    ),
    "negative-size": (lambda b: b["files"].update({b["state"]["file"]: -1}), "malformed"),
    "fraction": (lambda b: b["files"].update({b["state"]["file"]: 4.5}), "malformed"),
    "truth": (lambda b: b["files"].update({b["state"]["file"]: True}), "malformed"),
    "file-that-is-not-there": (lambda b: b["files"].update({"tensors.x": 0}), "no such file"),
    "start-negative": (lambda b: _shard(b, 1, -8), "malformed"),
    "start-beyond": (lambda b: _shard(b, 1, 1 << 62), "not inside"),
    "offset-negative": (lambda b: _shard(b, 2, [-1, 0]), "malformed"),
    "extent-negative": (lambda b: _shard(b, 3, [-4, 6]), "malformed"),
    "extent-zero": (lambda b: _shard(b, 3, [0, 6]), "not inside shape"),
    "extent-huge": (lambda b: _shard(b, 3, [1 << 70, 6]), "not inside shape"),
    "one-dim-less": (lambda b: _shard(b, 3, [4]), "not inside shape"),
    "overlap-and-gap": (lambda b: _shard(b, 2, [2, 0], number=1), "exactly once"),
    "twice-the-same": (lambda b: _shard(b, 2, [0, 0], number=1), "exactly once"),
    "bytes-of-another": (
        lambda b: _shard(b, 1, b["tensors"][NAME]["shards"][0][1] + 4, number=1),
        "two tensors",
    ),
    "shape-huge": (
        lambda b: b["tensors"].update(
            x={"shape": [1 << 40, 1 << 40, 0], "dtype": "int8", "shards": []}
        ),
        "larger",
    ),
    "many-dims": (
        lambda b: b["tensors"].update(x={"shape": [1] * 60, "dtype": "int8", "shards": []}),
        "60 dims",
    ),
    "crumbs": (_crumble, "8192 shards, split in 12 dims, are too many"),
    "shape-is-text": (lambda b: b["tensors"][NAME].update(shape="86"), "malformed"),
    "dtype-is-code": (lambda b: b["tensors"][NAME].update(dtype="load"), "unknown dtype"),
    "dtype-is-a-list": (lambda b: b["tensors"][NAME].update(dtype=["float32"]), "malformed"),
    "checksum-missing": (lambda b: _shard(b, 4, []), "number of checksums"),
    "tensors-is-a-list": (lambda b: b.update(tensors=[]), "malformed"),
    "info-is-a-list": (lambda b: b.update(info=[]), "info is not an object"),
    "no-files": (lambda b: b.update(files={}), "malformed"),
    "other-block": (lambda b: b.update(block_bytes=1), "version 1"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    change, message = MANIFESTS[name]
    _save(tmp_path / "a")
    body = _body(tmp_path / "a")
    change(body)
    _write_manifest(tmp_path / "a", _text(body))
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path / "a")


def _twice(text: str, place: str, entry: str) -> str:
    return text.replace(place, f"{place}{entry},", 1)


TEXTS: dict[str, tuple[Callable[[str], str], str]] = {
    "tensor-twice": (lambda t: _twice(t, '"tensors":{', f'"{NAME}":5'), "in one object twice"),
    "file-twice": (
        lambda t: _twice(t, '"files":{', t[t.index('"tensors.') :].split(",")[0]),
        "in one object twice",
    ),
    "tensors-twice": (lambda t: _twice(t, "{", '"tensors":{}'), "in one object twice"),
    "deep": (lambda t: f'{t[:-1]},"x":{"[" * 200_000}{"]" * 200_000}}}', "damaged"),
    "deep-info": (
        lambda t: t.replace(
            '"info":{', '"info":{"x":' + '{"x":' * 50_000 + "1" + "}" * 50_000 + ",", 1
        ),
        "damaged",
    ),
    "long-number": (lambda t: t.replace('"version":1', '"version":1' + "0" * 10_000), "damaged"),
    "a-list": (lambda t: f"[{t}]", "damaged|not a megatron_lightning"),
    "nothing": (lambda t: "{}", "damaged"),
    "not-utf8": (lambda t: t.replace("weight", "\udcff", 1), "damaged"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_json_that_means_two_things_or_too_much_is_refused(name: str, tmp_path: Path) -> None:
    change, message = TEXTS[name]
    _save(tmp_path / "a")
    body = change(_text(_body(tmp_path / "a")))
    content = body.encode(errors="surrogateescape")
    (tmp_path / "a" / "manifest.json").write_bytes(
        content[:-1] + b',"checksum":%d}' % zlib.crc32(content)
    )
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path / "a")


def test_a_manifest_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    os.truncate(tmp_path / "a" / "manifest.json", 1 << 40)  # sparse: it takes no room on the disk
    for read in (_load, verify):
        with pytest.raises(CheckpointError, match="it is no manifest"):
            read(tmp_path / "a")


@pytest.mark.parametrize("kind", ["manifest", "state", "tensors"])
@pytest.mark.parametrize("make", ["link", "pipe"])
def test_links_and_pipes_in_place_of_files_are_refused(
    kind: str, make: str, tmp_path: Path
) -> None:
    """A link could lead out of the directory; opening a pipe would hang."""
    _save(tmp_path / "a")
    file = next((tmp_path / "a").glob(f"{kind}.*"))
    outside = shutil.move(file, tmp_path / "outside")
    file.symlink_to(outside) if make == "link" else os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"links are not followed|no manifest\.json"):
        _load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"links are not followed|no manifest\.json"):
        read_full(tmp_path / "a")


# Pickles

PLACES: dict[str, Callable[[Any], Any]] = {
    "everything": lambda harm: harm,
    "a key": lambda harm: {harm: 1},
    "hyper-parameters": lambda harm: {"hyper_parameters": {"lr": harm}},
    "class of hyper-parameters": lambda harm: {"hparams_type": harm},
    "random states": lambda harm: {OWN: {"random_states": {0: [torch.zeros(1), harm]}}},
    "loaders": lambda harm: {OWN: {"loaders": {0: harm}}},
    "callbacks": lambda harm: {"callbacks": {"ModelCheckpoint": {"best_k_models": harm}}},
    "loops": lambda harm: {"loops": {"fit_loop": harm}},
    "schedulers": lambda harm: {"lr_schedulers": [harm]},
    "parameter groups": lambda harm: {
        "optimizer_states": [{"state": {}, "param_groups": [{"params": [], "lr": harm}]}]
    },
    "optimizer state": lambda harm: {
        "optimizer_states": [{"state": {"w": {"step": harm}}, "param_groups": []}]
    },
    "weights": lambda harm: {"state_dict": {"weight": harm}},
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_a_state_or_a_plain_file_runs(place: str, tmp_path: Path) -> None:
    _save(tmp_path / "a")
    harms = [
        _makes(tmp_path),
        _Harm(builtins.eval, "1"),
        _Harm(torch.load, "x"),
        _Harm(builtins.getattr, "x", "upper"),
    ]
    for harm in harms:
        for content in (_saved(PLACES[place](harm)), pickle.dumps(PLACES[place](harm), protocol=2)):
            _forge_state(tmp_path / "a", content)
            (tmp_path / "plain.ckpt").write_bytes(content)
            with pytest.raises(CheckpointError, match="would run code"):
                open_checkpoint(tmp_path / "a").state()
            for use in (read_full, lambda path: consolidate(path, tmp_path / "whole.ckpt")):
                with pytest.raises(CheckpointError, match="would run code"):
                    use(tmp_path / "a")
            with pytest.raises(CheckpointError, match="would run code"):
                open_checkpoint(tmp_path / "plain.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a", "plain.ckpt"]


def _inflated(content: bytes) -> bytes:
    """Return the archive with its entries compressed, and one of zeros that is much larger than the
    file."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr(f"{old.namelist()[0].partition('/')[0]}/data/99", bytes(1 << 26))
    return buffer.getvalue()


def test_an_archive_that_grows_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    content = _inflated(_saved({"epoch": 1, "x": torch.zeros(100)}))
    assert len(content) < 1 << 18
    _forge_state(tmp_path / "a", content)
    (tmp_path / "plain.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="are compressed"):
        _load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="are compressed"):
        open_checkpoint(tmp_path / "plain.ckpt")


FORMS: dict[str, tuple[Any, str]] = {
    "list": ([1], "a checkpoint is a dict"),
    "numbered-keys": ({1: 2}, "the key 1 should be a str"),
    "loops": ({"loops": 5}, r"\['loops'\] should be a Mapping and is a int"),
    "optimizers": ({"optimizer_states": {"state": {}}}, r"\['optimizer_states'\] should be a list"),
    "optimizer": ({"optimizer_states": [5]}, r"optimizer_states\[0\] should be a Mapping"),
    "groups": (
        {"optimizer_states": [{"state": {}}]},
        r"\['param_groups'\] should be a list and is missing",
    ),
    "group": (
        {"optimizer_states": [{"state": {}, "param_groups": [{}]}]},
        r"\['params'\] should be a list and is missing",
    ),
    "state": (
        {"optimizer_states": [{"state": {"w": 1}, "param_groups": []}]},
        r"\['state'\]\['w'\] should be a Mapping",
    ),
    "own": ({OWN: 5}, "should be a Mapping and is a int"),
    "own-samples": (
        {OWN: {"consumed_samples": "5"}},
        r"\['consumed_samples'\] should be a int and is a str",
    ),
    "hparams": ({"hyper_parameters": [1]}, r"\['hyper_parameters'\] should be a Mapping"),
    **{
        f"instantiator-{key}-{number}": (
            {key: {"_instantiator": named}},
            rf"names .* as the function that makes the module \({key}\['_instantiator'\]\)",
        )
        for number, (key, named) in enumerate(
            [
                ("hyper_parameters", "builtins.print"),
                ("hyper_parameters", ["os", "system"]),
                ("hyper_parameters", "lightning.pytorch.cli.instantiate_module.x"),
                ("datamodule_hyper_parameters", "os.system"),
                ("hparams", "os.system"),  # as Lightning 0.7 named them
                ("module_arguments", "os.system"),
            ]
        )
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_another_form_is_refused(form: str, tmp_path: Path) -> None:
    state, message = FORMS[form]
    _save(tmp_path / "a")
    _forge_state(tmp_path / "a", _saved(state))
    torch.save(state, tmp_path / "plain.ckpt")
    for use in (_load, read_full, lambda path: open_checkpoint(tmp_path / "plain.ckpt")):
        with pytest.raises(CheckpointError, match=message):
            use(tmp_path / "a")


@pytest.mark.parametrize("known", [False, True])
def test_a_kind_of_layer_in_a_checkpoint_imports_nothing(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may lie beside a downloaded folder, where commands find modules of a user."""
    (tmp_path / "lying.py").write_text("open('ran', 'w').close()\nclass Kind: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    kind = "tests.helpers.squashed_layer.Squashed" if known else "lying.Kind"
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, layer_pattern=["dense"]
    ).to_dict()
    _save(tmp_path / "a")
    settings = {"config": {**config, "layer_pattern": [kind]}}
    _forge_state(tmp_path / "a", _saved({"hyper_parameters": settings}))
    if known:
        assert read_config(tmp_path / "a").layer_pattern == (kind,)
    else:
        for use in (read_config, lambda _: GPTLightningModule(**settings)):
            with pytest.raises(CheckpointError, match=r"'lying\.Kind' as a kind of layer.*import "):
                use(tmp_path / "a")
    assert not (tmp_path / "ran").exists()


def test_progress_that_is_missing_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"\['consumed_samples'\] should be a int and is missing"
    ):
        check_progress({})


@pytest.mark.parametrize("numbers", [[0, 7], [0, -1], [0, 0], ["w", "v"]])
def test_parameters_that_are_not_numbered_are_refused(numbers: list[Any]) -> None:
    with pytest.raises(CheckpointError, match="does not number its 2 parameters"):
        name_optimizer_state({"state": {}, "param_groups": [{"params": numbers}]}, ["a", "b"])


# Through the Trainer and the tools


def _resume_from(layout: Layout, folder: str) -> list[str]:
    errors = []
    for path in (f"{folder}/plain.ckpt", f"{folder}/a"):
        for call in ("fit", "validate", "test", "predict"):
            fit = layout.trainer(folder, max_steps=1)
            try:
                getattr(fit, call)(ToyModule(), datamodule=ToyData(), ckpt_path=path)
            except CheckpointError as error:
                errors.append(str(error))
    try:
        trainer(plugins=[ShardedCheckpointIO()]).fit(
            ToyModule(), datamodule=ToyData(), ckpt_path=f"{folder}/plain.ckpt"
        )
    except pickle.UnpicklingError as error:
        errors.append(str(error))
    return errors


def test_a_trainer_runs_nothing_of_its_ckpt_path(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    content = _saved({"epoch": 0, "global_step": 0, "hyper_parameters": {"lr": _makes(tmp_path)}})
    _forge_state(tmp_path / "a", content)
    (tmp_path / "plain.ckpt").write_bytes(content)
    (errors,) = run(ONE, _resume_from, tmp_path)
    assert len(errors) == 9 and all("would run code" in error for error in errors[:8]), errors
    assert "Weights only load failed" in errors[8]
    assert not (tmp_path / "ran").exists()


def test_plain_files_from_anywhere_are_read_as_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning itself trusts files from the web."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "lightning.fabric.plugins.io.torch_io.pl_load",
        lambda path, **options: asked.append(options) or {},
    )
    plugin = ShardedCheckpointIO()
    monkeypatch.setattr(
        "lightning.fabric.plugins.io.torch_io.get_filesystem", lambda path: pytest.MonkeyPatch
    )
    monkeypatch.setattr(pytest.MonkeyPatch, "exists", lambda path: True, raising=False)
    for chosen in (None, True, False):
        plugin.load_checkpoint("https://example.org/x.ckpt", weights_only=chosen)
    assert [options["weights_only"] for options in asked] == [True, True, False]


POINTER: dict[str, Any] = {
    "folder": "x",
    "ranks_per_node": 1,
    "num_ranks": 1,
    "step": 1,
    "layout": {},
    "copies": [],
}
POINTERS = [
    {},
    {**POINTER, "folder": 5},
    {**POINTER, "more": 1},
    {**POINTER, "copies": ["../x"]},
    {**POINTER, "copies": [1]},
]


@pytest.mark.parametrize("content", POINTERS)
def test_a_pointer_that_lies_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "local.ckpt"
    path.write_text(json.dumps({"format": "megatron_lightning local copies", **content}))
    with pytest.raises(CheckpointError, match="is a pointer to local copies and is damaged"):
        Pointer.read(str(path))


def _copies(layout: Layout, folder: str, harm: bool) -> str:
    callback = LocalCopyCheckpoint(folder=f"{folder}/node", every_n_train_steps=1, dirpath=folder)
    fit = layout.trainer(folder, max_steps=1, callbacks=[callback], enable_checkpointing=True)
    if not harm:
        fit.fit(ToyModule(), datamodule=ToyData())
        return ""
    (part,) = Path(folder, "node").glob("step-*/rank-00000")
    _forge_state(part, _saved({"tensors": {"w": ([1], "load")}, "boxes": {}, "state": {}}))
    try:
        fit.fit(ToyModule(), datamodule=ToyData(), ckpt_path=f"{folder}/local.ckpt")
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_local_copy_that_lies_is_refused(tmp_path: Path) -> None:
    run(ONE, _copies, tmp_path, False)
    (error,) = run(ONE, _copies, tmp_path, True)
    assert "unknown dtype 'load'" in error


def test_pruning_deletes_nothing_that_a_hostile_state_names(tmp_path: Path) -> None:
    for step in (1, 2):
        _save(
            tmp_path / "run" / f"{step}.ckpt",
            {"callbacks": {"x": {"best_model_path": 5, "best_k_models": {"../../y": 1}}}},
        )
    _save(tmp_path / "y")
    found = find_prunable(tmp_path / "run", keep_last=1, min_age_s=0)
    assert [Path(entry.path).name for entry in found] == ["1.ckpt"] and is_committed(tmp_path / "y")
