"""A budgeted run on a GPU, rehearsed on the CPU: tests that pass, hang and kill their worker."""

from __future__ import annotations

import struct
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_tests, machine
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import budget, bundles, fatbins, jobs, pool, probe
from benchmarks.gpu.budget import Kept, Workers, spend
from benchmarks.gpu.jobs import Job, order, passed_here, timed
from benchmarks.gpu.record import RunRecord
from benchmarks.gpu_tests import Outcome
from megatron_lightning.cards.header import read_record
from tests.helpers.ranks import run_ranks

FAKES = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.fake

def test_passes():
    with open("{folder}/ran", "a") as file:
        file.write("x")

def test_fails():
    raise ValueError("a wrong sum")

@pytest.mark.parametrize("n", [1])
def test_hangs(n):
    if {hangs}:
        time.sleep(600)

def test_dies():
    if {hangs}:
        os._exit(3)

def test_is_skipped():
    pytest.skip("no such kernel")
"""
SLOW = """
def test_slow():
    pathlib.Path("{folder}/started").touch()
    time.sleep(600)
"""
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Environment of workers that begin in half the time."""
KEPT = Kept({"test_fakes.py::test_passes": Outcome("passed", "2026-11-01", "2")}, {})


def _workers(folder: Path, source: str, **values: Any) -> Workers:
    tests, cases = folder / "tests", folder / "cases"
    for each in (tests, cases):
        each.mkdir(exist_ok=True)
    (tests / "test_fakes.py").write_text(source.format(folder=folder, **values))
    (tests / "test_broken.py").write_text("import no_such_module")
    (cases / "test_case.py").write_text("def test_speed(): pass")
    return Workers(("tests", str(tests), "fake"), ("tests", str(cases), "not fake"), num_tests=2)


@pytest.mark.timeout(300)
def test_a_run_survives_a_hang_and_a_crash_and_goes_on_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    header = {**machine.describe("x"), "gpu": "a fake", "commit": "c1"}
    monkeypatch.setattr(jobs, "HANG_S", 1.0)
    monkeypatch.setattr(jobs, "TEST_S", 0.1)
    monkeypatch.setattr(budget, "CASES_PART", 0.0)  # no case fits before the tests
    first = RunRecord(tmp_path / "first.json", header)
    workers = _workers(tmp_path, FAKES, hangs=True)
    assert spend(first, KEPT, time.monotonic() + 100, PLAIN, workers) == 4
    record = read_record(first.path)
    found = {name: each["outcome"] for name, each in record["tests"].items()}
    assert found == {
        "test_broken.py": "failed",
        "test_fakes.py::test_dies": "failed",
        "test_fakes.py::test_fails": "failed",
        "test_fakes.py::test_hangs[1]": "failed",
        "test_fakes.py::test_is_skipped": "skipped",
        "test_fakes.py::test_passes": "passed",
    }
    said = record["failures"]
    assert "no_such_module" in said["test_broken.py"]
    assert "a wrong sum" in said["test_fakes.py::test_fails"]
    assert "the worker died; its exit code is 3" in said["test_fakes.py::test_dies"]
    assert "no result within 1 s" in said["test_fakes.py::test_hangs[1]"]
    assert record["tests"]["test_fakes.py::test_passes"]["commit"] == "c1"
    printed = capfd.readouterr().out
    assert printed.index("test_passes") < printed.index("passed: test_case.py::test_speed")

    # Another run goes on, and is cut while a test runs.
    second = RunRecord(tmp_path / "second.json", header, first.path)
    workers = _workers(tmp_path, FAKES + SLOW, hangs=False)

    def cut() -> float:
        ended = (tmp_path / "started").exists() and len(retried & passed(second)) == 2
        return time.monotonic() + 1000.0 * ended

    retried = {"test_fakes.py::test_dies", "test_fakes.py::test_hangs[1]"}
    monkeypatch.setattr(jobs, "HANG_S", 300.0)
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=cut))
    assert spend(second, KEPT, time.monotonic() + 100, PLAIN, workers) >= 2
    assert "test_slow: left for the next run" in capfd.readouterr().out
    assert passed(second) == {*retried, "test_fakes.py::test_passes"}
    assert (tmp_path / "ran").read_text() == "x"  # passed before
    assert "test_fakes.py::test_dies" not in second.failures
    # Both are merged.
    for path in (first.path, second.path):
        gpu_tests.merge(path, tmp_path)
    merged = gpu_tests.read_record(tmp_path / "gpu_tests.json")
    assert merged["test_fakes.py::test_hangs[1]"].outcome == "passed"


def passed(record: RunRecord) -> set[str]:
    return {name for name, each in record.tests.items() if each.outcome == "passed"}


def test_jobs_are_ordered_by_worth_and_timed() -> None:
    last = {
        "a.py::old": Outcome("passed", "2026-11-01", "2", seconds=4.0),
        "a.py::new": Outcome("passed", "2026-11-20", "2", seconds=8.0),
        "b.py::bad": Outcome("failed", "2026-11-20", "2"),
        "b.py::skipped": Outcome("skipped", "2026-11-20", "2"),
    }
    names = [*reversed(last), "a.py::never"]
    ordered = ["b.py::skipped", "a.py::never", "b.py::bad", "a.py::old", "a.py::new"]
    assert order(names, last) == ordered
    estimates = dict.fromkeys(ordered, 0.0) | {"b.py::bad": 50.0}
    assert [job.seconds for job in timed(ordered, estimates, last)] == [6.0, 6.0, 50.0, 4.0, 8.0]
    assert (Job("x", 1.0).limit_s, Job("x", 100.0).limit_s) == (120.0, 400.0)
    assert [jobs.seconds(text) for text in ("8m", "450s", "90", "1.5m")] == [480, 450, 90, 90]
    with pytest.raises(ValueError, match=r"'8h' is no positive time. Set one such as 8m"):
        jobs.seconds("8h")
    here = {"commit": "c", "gpu": "g"}
    assert passed_here(Outcome("passed", "", "", commit="c", gpu="g"), here)
    assert not passed_here(Outcome("passed", "", "", commit="d", gpu="g"), here)


def test_workers_that_cannot_begin_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool.sys, "executable", "false")
    record = RunRecord(tmp_path / "r.json", machine.describe("x"))
    assert spend(record, KEPT, time.monotonic() + 100, {}) == 2
    assert "3 workers did not begin: the worker died; its exit code is 1" in capsys.readouterr().out
    found = probe.two_ranks_a_device({})
    assert found.env == {probe.CHOICE: "gloo"}
    assert all("exit codes [" in each["stopped by"] for each in found.said.values())


def _exchange() -> list[str]:
    return probe.exchange(torch.device("cpu"))


def test_the_probe_tries_each_collective() -> None:
    assert run_ranks(2, _exchange) == [[*probe.WORKS]] * 2


def test_the_command_checks_its_options_and_probes_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "describe", lambda: {"date": "2026-11-29T10:00:00"})
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for wrong, text in (
        (["--budget", "now"], "'now' is no positive time"),
        (["--continue", str(tmp_path / "none")], "there is no file"),
        (["--bundles", str(tmp_path)], "has none. Run benchmarks.gpu.bundles"),
        (["--case", "sleep"], "there is no case 'sleep'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)
        assert text in capsys.readouterr().err
    seen: dict[str, Any] = {}

    def spend(record: RunRecord, kept: Kept, deadline: float, env: dict[str, str]) -> int:
        seen.update(env=env, path=record.path, left=deadline - time.monotonic())
        return 0

    found = probe.Found({probe.CHOICE: "nccl"}, {"as NCCL chooses": {"works": []}})
    monkeypatch.setattr(probe, "two_ranks_a_device", lambda env: found)
    monkeypatch.setattr(command, "spend", spend)
    record = tmp_path / "record.json"
    assert command.main(["--budget", "8m", "--record", str(record)]) == 0
    assert seen["env"] == found.env and seen["path"] == record and 470 < seen["left"] <= 480


def _library(path: Path, sections: dict[str, bytes]) -> None:
    """Write an ELF file with sections."""
    sections = {**sections, ".shstrtab": b"\0".join([b"", *map(str.encode, sections), b""])}
    sections[".shstrtab"] += b".shstrtab\0"
    names, body, headers = sections[".shstrtab"], bytearray(64), bytearray()
    for name, content in sections.items():
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack("<IIQQQQ", offset, 1, 0, 0, len(body), len(content)) + bytes(24)
        body += content
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(sections), len(sections) - 1)
    path.write_bytes(body + headers)


def _container(*codes: tuple[int, bytes]) -> bytes:
    entries = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32)
        + code
        for arch, code in codes
    )  # fmt: skip
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_gpu_code_of_other_architectures_is_blanked(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    sections = {
        ".nv_fatbin": _container((90, b"A" * 8), (80, b"B" * 8)) + bytes(8)
        + _container((100, b"C" * 8)),
        "__nv_relfatbin": _container((90, b"D" * 8)),
        ".debug_info": b"E" * 8,
        ".text": b"F" * 8,
    }  # fmt: skip
    _library(path, sections)
    expected = path.read_bytes()
    for letter in (b"B", b"C", b"D", b"E"):
        expected = expected.replace(8 * letter, bytes(8))
    assert fatbins.prune(path, {90}) == fatbins.Counts(kept=8, blanked=24, debug=8)
    assert path.read_bytes() == expected
    with pytest.raises(ValueError, match=r"has no GPU code for sm_120. Keep another"):
        fatbins.prune(path, {120})


def test_bundles_are_packed_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(arguments: list[str], folder: Path) -> None:
        name = next(each for each in arguments if "==" in each).partition("==")[0]
        library = folder / "lib.so"
        _library(library, {".nv_fatbin": _container((90, b"A"), (80, b"B"))})
        inner = "nvidia/nccl/lib/libnccl.so.2" if "nccl" in name else f"{name}/lib.so"
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
            wheel.write(library, inner)
            wheel.writestr("transformer_engine/jax/big.py", "unused")
        library.unlink()

    extension = tmp_path / "extension.so"
    extension.write_bytes(b"compiled")
    monkeypatch.setattr(bundles, "download", download)
    sizes = bundles.build(tmp_path / "packed", extension)
    assert set(sizes) == {"nccl", "transformer_engine"} and all(sizes.values())
    monkeypatch.setenv("PYTHONPATH", "/before")
    env = bundles.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert Path(env["LD_PRELOAD"].split(":")[0]).is_file()
    engine = Path(env["PYTHONPATH"].removesuffix(":/before"))
    assert next(engine.glob("transformer_engine_torch*.so")).read_bytes() == b"compiled"
    assert not [*engine.rglob("jax")]
    monkeypatch.setattr(bundles, "LIMIT_BYTES", 10)
    with pytest.raises(ValueError, match=r"the bundles have \d+ bytes, more than 10"):
        bundles.build(tmp_path / "packed", None)
    with pytest.raises(FileNotFoundError, match=r"has no bundles. Run python -m benchmarks.gpu"):
        bundles.unpack(tmp_path / "none", tmp_path)
