"""FaultInjector: each fault happens once, on its rank and step, and the run says what it met."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.callbacks import Fault, FaultInjector
from megatron_lightning.callbacks.rehearsal.faults import disk_fault
from megatron_lightning.errors import ConfigError, NonFiniteError
from megatron_lightning.file_names import INJECTED_FAULTS
from tests.helpers.layouts import LAYOUTS
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import DP2, ONE, PP2, TP2_TOY, Layout, layouts, run


def _run(layout: Layout, folder: str, fault: Fault) -> tuple[str, int, float]:
    """Return the error, the steps done and the seconds of a run."""
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    fit = trainer(
        layout.strategy(non_finite="raise"),
        default_root_dir=folder,
        callbacks=[FaultInjector([fault]), saves],
        max_steps=3,
        enable_checkpointing=True,
    )
    error, began = "", time.monotonic()
    try:
        fit.fit(ToyModule(), datamodule=layout.data_module(), ckpt_path="last")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, fit.global_step, time.monotonic() - began


def _each_kind(layout: Layout, folder: str) -> dict[str, Any]:
    kinds: tuple[Any, ...] = ("exception", "nan", "full_disk", "slow")
    last = layout.ranks - 1
    found = {}
    for kind in kinds:
        fault = Fault(kind=kind, step=1, rank=last, seconds=0.5)
        runs = [_run(layout, f"{folder}/{kind}", fault) for _ in range(1 if kind == "slow" else 2)]
        found[kind] = runs
    return found


@pytest.mark.slow
@layouts(ONE)
def test_each_fault_happens_once(layout: Layout, tmp_path: Path) -> None:
    (found,) = run(layout, _each_kind, tmp_path)
    errors = {
        "exception": "InjectedFault: a fault of FaultInjector",
        "nan": "NonFiniteError",
        "full_disk": "No space left on device",
    }
    for kind, text in errors.items():
        (error, steps, _), again = found[kind]
        assert text in error and steps in {1, 2}, (kind, error, steps)
        assert again[0] == "" and again[1] == 3, (kind, again)
        notes = [json.loads(line) for line in (tmp_path / kind / INJECTED_FAULTS).open()]
        assert [(note["kind"], note["rank"], note["step"]) for note in notes] == [(kind, 0, 1)]
    (slow,) = found["slow"]
    assert slow[0] == "" and slow[2] > 0.5


def _gradient(layout: Layout, folder: str) -> tuple[str, int, float]:
    return _run(layout, folder, Fault(kind="nan", step=1, rank=layout.ranks - 1))


@pytest.mark.spread(1)
@layouts(TP2_TOY, PP2, DP2, LAYOUTS["fsdp2"])
def test_a_gradient_that_is_no_number_ends_every_rank(layout: Layout, tmp_path: Path) -> None:
    for error, steps, _ in run(layout, _gradient, tmp_path):
        assert NonFiniteError.__name__ in error and steps == 1, (error, steps)


def test_steps_and_ranks_are_drawn_alike() -> None:
    fault = Fault(kind="kill", step=(10, 20))
    drawn = [fault.drawn(random.Random(f"{seed}/0"), 64) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(10 <= one.first_step <= 20 and one.rank in range(64) for one in drawn)
    assert Fault(kind="kill", step=1, rank="all").hits(7)


def test_a_disk_stands_still_until_the_fault_ends(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with disk_fault("full_disk"), pytest.raises(OSError, match="No space left") as full:
        os.write(descriptor, b"byte")
    assert full.value.errno == errno.ENOSPC
    with suppress(OSError), disk_fault("full_disk"):
        os.replace(tmp_path / "file", tmp_path / "other")
    assert os.write(descriptor, b"byte") == 4 and (tmp_path / "file").exists()
    os.close(descriptor)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_disk_is_sound_after_faults_that_overlap(
    order: tuple[int, int], tmp_path: Path
) -> None:
    real, faults = os.write, [ExitStack(), ExitStack()]
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    for fault in faults:
        fault.enter_context(disk_fault("full_disk"))
    try:
        faults[order[0]].close()
        with pytest.raises(OSError, match="No space left"):
            os.write(descriptor, b"byte")
        faults[order[1]].close()
        assert os.write is real and os.write(descriptor, b"byte") == 4
    finally:
        os.write = real
        os.close(descriptor)


def test_a_rank_without_a_trained_parameter_has_no_gradient_to_spoil(tmp_path: Path) -> None:
    frozen = ToyModule()
    frozen.requires_grad_(False)
    injector = FaultInjector([Fault(kind="nan", step=0, rank=0)], folder=tmp_path)
    fit = trainer(max_steps=1)
    injector.on_train_start(fit, frozen)
    with pytest.raises(ConfigError, match="the fault nan is due on rank 0, and none of its param"):
        injector.on_train_batch_start(fit, frozen, None, 0)
    assert not (tmp_path / INJECTED_FAULTS).exists()


def test_the_page_is_read_as_yaml() -> None:
    page = Path(__file__).parents[3] / "docs" / "rehearsal.md"
    block = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[pl.Callback])
    read = parser.instantiate_classes(parser.parse_object(yaml.safe_load(block)["trainer"]))
    _, watch, injector = read.callbacks
    assert watch.sections == {"save": timedelta(minutes=2)}
    assert injector.faults[1] == Fault(kind="hang", step=(30, 40))


def test_faults_that_cannot_happen_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kind is 'fire'; it must be one of \('exception'"):
        Fault(kind="fire", step=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"step of the fault kill is \(5, 2\)"):
        Fault(kind="kill", step=(5, 2))
    with pytest.raises(ConfigError, match=r"num_steps=0 and seconds=5.0: nothing would happen"):
        Fault(kind="slow", step=1, num_steps=0)
    with pytest.raises(ConfigError, match=r"rank of the fault kill is 8, and the job has 4 ranks"):
        Fault(kind="kill", step=1, rank=8).drawn(random.Random(0), 4)
    with pytest.raises(ConfigError, match="faults is empty"):
        FaultInjector([])
