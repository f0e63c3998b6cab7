"""Sharded checkpoints over several ranks: any layout to any layout, failing and killed ranks."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.checkpoint import (
    TensorShards,
    is_committed,
    load_sharded,
    open_checkpoint,
    read_full,
    replicas,
    save_sharded,
)
from megatron_lightning.checkpoint.reading import loading
from megatron_lightning.checkpoint.reading.source import DirectorySource
from megatron_lightning.checkpoint.writing import saving
from megatron_lightning.errors import CheckpointError
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardSpec
from megatron_lightning.parallel.shards.spec import is_writer
from tests.helpers.ranks import run_ranks

# name -> (global shape, dim that is split over tp or None, blocks)
_PARAMETERS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "embed.weight": ((16, 6), 0, 1),
    "fc1.weight": ((24, 6), 0, 2),
    "fc2.weight": ((6, 12), 1, 1),
    "experts": ((3, 8, 5), 1, 1),
    "norm.weight": ((7,), None, 1),
}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "dp3": (3, {}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def _value(name: str, shape: tuple[int, ...], version: int) -> Tensor:
    seed = 1000 * version + sum(map(ord, name))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _expected(version: int) -> dict[str, Tensor]:
    values = {"state_dict.scale": torch.tensor(version)}
    for name, (shape, _, _) in _PARAMETERS.items():
        for full in (f"state_dict.{name}", f"optimizer_states.0.state.{name}.exp_avg"):
            values[full] = _value(full, shape, version)
    return values


def _shards(context: ParallelContext, version: int | None) -> Iterator[TensorShards]:
    """Yield what this rank holds: parameters by tensor rank, moments as flat halves over the data
    ranks (zero-1)."""
    yield TensorShards.full(
        "state_dict.scale", torch.tensor(version or 0), writes=context.rank == 0
    )
    for i, (name, (shape, dim, blocks)) in enumerate(_PARAMETERS.items()):
        if i % context.pp.size != context.pp.rank:
            continue
        spec = ShardSpec.replicated(shape)
        if dim is not None:
            spec = ShardSpec.split(
                shape, dim=dim, size=context.tp.size, rank=context.tp.rank, blocks=blocks
            )
        full, moment = f"state_dict.{name}", f"optimizer_states.0.state.{name}.exp_avg"
        local = (
            spec.shard(_value(full, shape, version)) if version else torch.zeros(spec.local_shape)
        )
        yield TensorShards.local(
            full, spec, local, writes=is_writer(spec, context), replicas=context.dp_cp
        )
        local = (
            spec.shard(_value(moment, shape, version)) if version else torch.zeros(spec.local_shape)
        )
        flat = local.reshape(-1)
        part = -(-flat.numel() // context.dp.size)
        start = context.dp.rank * part
        writes = is_writer(spec, context)
        yield TensorShards.flat(
            moment, spec, flat[start : start + part].clone(), start, writes=writes
        )


def _state(version: int) -> dict[str, Any]:
    return {
        "version": version,
        "optimizer_states": [
            {"state": {}, "param_groups": [{"lr": 0.1, "params": list(_PARAMETERS)}]}
        ],
    }


def _save(path: str, layout: dict[str, Any], version: int) -> None:
    context = ParallelContext(ParallelLayout(**layout))
    state = _state(version) if context.rank == 0 else {}
    save_sharded(path, _shards(context, version), state, group=context.axis("world"))


def _load_matches(path: str, layout: dict[str, Any], version: int) -> bool:
    context = ParallelContext(ParallelLayout(**layout))
    source = open_checkpoint(path, group=context.axis("world"))
    shards = list(_shards(context, None))
    report = load_sharded(source, shards, group=context.axis("world"))
    expected = _expected(version)
    exact = all(
        torch.equal(
            view,
            expected[s.name][
                tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))
            ],
        )
        for s in shards
        for offset, view in s.shards
    )
    return exact and report == ((), ()) and source.state() == _state(version)


_PAIRS = [
    pytest.param(
        a,
        b,
        marks=[]
        if (a, b) in {("tp2-dp2", "tp2-pp2"), ("tp2-pp2", "tp4"), ("single", "tp2-dp2")}
        else pytest.mark.slow,
    )
    for a in _LAYOUTS
    for b in _LAYOUTS
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("saved", "loaded"), _PAIRS)
def test_any_layout_to_any_layout(tmp_path: Path, saved: str, loaded: str) -> None:
    path = str(tmp_path / "a.ckpt")
    size, layout = _LAYOUTS[saved]
    run_ranks(size, _save, path, layout, 5)
    full = read_full(path)  # one process, torch's own optimizer form
    moments = full["optimizer_states"][0]["state"]
    found = {f"state_dict.{name}": tensor for name, tensor in full["state_dict"].items()}
    found |= {
        f"optimizer_states.0.state.{name}.exp_avg": moments[i]["exp_avg"]
        for i, name in enumerate(_PARAMETERS)
    }
    assert found.keys() == _expected(5).keys() and all(
        torch.equal(found[name], full) for name, full in _expected(5).items()
    )
    size, layout = _LAYOUTS[loaded]
    assert run_ranks(size, _load_matches, path, layout, 5) == [True] * size


# Failures


def _expect_error(step: Callable[[], object]) -> str:
    try:
        step()
    except CheckpointError as error:
        return str(error)
    return "no error"


def _save_with_a_raising_rank(path: str) -> str:
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=2))

    def shards() -> Iterator[TensorShards]:
        yield from _shards(context, 2)
        if context.rank == 1:
            raise ValueError("boom")

    return _expect_error(lambda: save_sharded(path, shards(), {}, group=context.axis("world")))


def test_a_rank_that_raises_while_saving_raises_everywhere(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, _save, path, _LAYOUTS["tp2"][1], 1)
    errors = run_ranks(2, _save_with_a_raising_rank, path)
    assert all("failed on 1 rank(s): rank 1: ValueError: boom" in error for error in errors), errors
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert run_ranks(1, _load_matches, path, {}, 1) == [True]


def _save_with_hidden_faults(path: str, fault: str) -> str:
    context = ParallelContext(ParallelLayout())
    first = context.rank == 0
    shards = [
        TensorShards.full(
            "w", torch.ones(4 if fault != "shape" or first else 3), writes=first or fault != "state"
        )
    ]
    state = {"f": print} if fault == "state" and first else {}
    return _expect_error(lambda: save_sharded(path, shards, state, group=context.axis("world")))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twice", "exactly once"),
        ("shape", "w has shape (4,)"),
        ("state", "checkpoint['f'] is a builtins.builtin"),
    ],
)
def test_faults_that_only_the_first_rank_sees_raise_everywhere(
    tmp_path: Path, fault: str, message: str
) -> None:
    errors = run_ranks(2, _save_with_hidden_faults, str(tmp_path / "a"), fault)
    assert all(message in error for error in errors), errors
    assert os.listdir(tmp_path) == []


def _load_expecting_error(path: str, layout: dict[str, Any]) -> str:
    context = ParallelContext(ParallelLayout(**layout))
    group = context.axis("world")

    def load() -> None:
        source = open_checkpoint(path, group=group)
        shards = list(_shards(context, None))
        if context.rank == 1:
            shards.append(TensorShards.full("state_dict.more", torch.zeros(1)))
        load_sharded(source, shards, group=group)

    return _expect_error(load)


def test_what_one_rank_cannot_load_raises_everywhere(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, _save, path, _LAYOUTS["tp2"][1], 1)
    errors = run_ranks(2, _load_expecting_error, path, _LAYOUTS["tp2"][1])
    assert all("state_dict.more" in error for error in errors), errors
    errors = run_ranks(2, _load_expecting_error, str(tmp_path / "b"), {})
    assert all("Checkpoint file not found" in error for error in errors), errors


# Kills


def _save_and_be_killed(path: str) -> None:
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=2))

    def shards() -> Iterator[TensorShards]:
        for count, entry in enumerate(_shards(context, 2)):
            if count == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield entry

    save_sharded(path, shards(), {"version": 2}, group=context.axis("world"))


def test_a_rank_killed_while_saving_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, _save, path, _LAYOUTS["tp2"][1], 1)
    with pytest.raises(AssertionError, match="rank 1: died with exit code -9"):
        run_ranks(2, _save_and_be_killed, path)
    assert run_ranks(1, _load_matches, path, {}, 1) == [True]
    run_ranks(2, _save, path, _LAYOUTS["tp2"][1], 3)
    assert run_ranks(1, _load_matches, path, {}, 3) == [True]
    assert os.listdir(tmp_path) == ["a.ckpt"]  # the next save cleans up


_SYSCALLS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")


def _killed_at(call: int, path: str, version: int) -> bool:
    """Save in a child that is killed before its ``call``-th change of the file system; return
    whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return replacement

        # Python 3.10's paths keep these functions to themselves.
        paths = getattr(pathlib, "_NormalAccessor", None)
        for name in _SYSCALLS:
            setattr(os, name, deadly(getattr(os, name)))
            if hasattr(paths, name):
                setattr(paths, name, staticmethod(getattr(os, name)))
        try:
            _save(path, {}, version)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"the save failed before call {call}")
    return False


def _kill_everywhere(folder: str, overwrite: bool) -> list[tuple[int, ...]]:
    """Kill a save before each of its changes in turn; return the versions found after each."""
    found: list[tuple[int, ...]] = []
    call = 0
    killed = True
    while killed:
        call += 1
        path = f"{folder}/{call}/a.ckpt"
        if overwrite:
            _save(path, {}, 1)
        killed = _killed_at(call, path, 2)
        versions = tuple(v for v in (1, 2) if is_committed(path) and _load_matches(path, {}, v))
        _save(path, {}, 3)
        if not _load_matches(path, {}, 3) or os.listdir(f"{folder}/{call}") != ["a.ckpt"]:
            raise RuntimeError(f"the next save after a kill at change {call} did not recover")
        found.append(versions)
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_before_every_change_of_the_file_system(tmp_path: Path, overwrite: bool) -> None:
    found = run_ranks(1, _kill_everywhere, str(tmp_path), overwrite)[0]
    before, after = ((1,) if overwrite else ()), (2,)
    assert len(found) > 8 and found[0] == before and found[-1] == after
    switch = found.index(after)
    # The old one, then the new one, nothing between.
    assert found == [before] * switch + [after] * (len(found) - switch)


# Replicas share the work


def _shared_work(path: str) -> tuple[int, int, bool]:
    """Return the bytes that this rank wrote and read of tensors that four ranks hold, and whether
    they came back exact."""
    context = ParallelContext(ParallelLayout())
    group, written, read = context.axis("world"), [], []
    generator = torch.Generator().manual_seed(1)
    values = {
        f"w{i}": torch.rand(shape, generator=generator)
        for i, shape in enumerate([(64, 7), (1, 90, 3), (4096,), (2, 2), ()])
    }
    values["transposed"] = torch.rand(30, 20, generator=generator).t()  # not contiguous

    def shards(tensors: dict[str, Tensor]) -> list[TensorShards]:
        return [
            TensorShards.full(name, tensor, replicas=context.dp_cp)
            for name, tensor in tensors.items()
        ]

    def counted(
        original: Callable[..., Any], record: list[int], position: int
    ) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            named = list(args[position])
            record.extend(shard.data.nbytes for _, shard in named)
            return original(*args[:position], named, *args[position + 1 :], **kwargs)

        return replacement

    with (
        mock.patch.object(replicas, "MIN_SPLIT_BYTES", 64),
        mock.patch.object(loading, "MIN_SPLIT_BYTES", 64),
    ):
        with mock.patch.object(saving, "write_shards", counted(saving.write_shards, written, 2)):
            save_sharded(path, shards(values), {}, group=group)
        loaded = {name: torch.zeros(tensor.shape) for name, tensor in values.items()}
        loaded["transposed"] = torch.zeros(30, 20).t()
        source = open_checkpoint(path, group=group)
        with mock.patch.object(DirectorySource, "read", counted(DirectorySource.read, read, 1)):
            load_sharded(source, shards(loaded), group=group)
    return (
        sum(written),
        sum(read),
        all(torch.equal(loaded[name], tensor) for name, tensor in values.items()),
    )


def test_replicas_share_writing_and_reading(tmp_path: Path) -> None:
    ranks = run_ranks(4, _shared_work, str(tmp_path / "a"))
    assert all(exact for _, _, exact in ranks)
    total = 4 * (64 * 7 + 270 + 4096 + 4 + 1 + 600)
    small = 4 * (4 + 1)  # written by one rank, read by all
    assert sum(written for written, _, _ in ranks) == total
    assert sum(read for _, read, _ in ranks) == total + 3 * small
    for written, read, _ in ranks:
        assert 0.2 < written / total < 0.3 and 0.2 < read / total < 0.3
    assert run_ranks(1, _shared_work, str(tmp_path / "b")) == [(total, total, True)]
