"""A budgeted run on a GPU, rehearsed on the CPU: tests that pass, hang and kill their worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_tests, machine
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import budget, bundles, jobs, pool, probe, worker
from benchmarks.gpu.budget import Kept, Workers, spend
from benchmarks.gpu.cases import record_of
from benchmarks.gpu.jobs import Job, Names, Result, order, passed_here, timed
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
    return Workers(
        ("tests", str(tests), "fake"), ("tests", str(cases), "not fake"), 2, PLAIN, PLAIN
    )


@pytest.mark.slow
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
    assert spend(first, KEPT, time.monotonic() + 100, workers) == 4
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
    assert spend(second, KEPT, time.monotonic() + 100, workers) >= 2
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
    found = Names(dict.fromkeys(ordered, 0.0) | {"b.py::bad": 50.0}, {}, {"a.py::new": 300.0})
    jobs_of = timed(ordered, found, last)
    assert [job.seconds for job in jobs_of] == [6.0, 6.0, 50.0, 4.0, 8.0]
    assert [job.limit_s for job in jobs_of] == [120.0, 120.0, 120.0, 120.0, 315.0]
    assert Job("x", 100.0).limit_s == 160.0
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
    assert spend(record, KEPT, time.monotonic() + 100) == 2
    assert "3 workers did not begin: the worker died; its exit code is 1" in capsys.readouterr().out
    found = probe.two_ranks_a_device({})
    assert found.env == {probe.CHOICE: "gloo"}
    assert all("exit codes [" in each["stopped by"] for each in found.said.values())


class _Started:
    """Stands in for a worker: its pipe says nothing, and its jobs never end."""

    def __init__(self, *_: object) -> None:
        self.job: Job | None = None
        self.messages: list[Any] = []
        self.pipe = SimpleNamespace(recv=lambda: self.messages.pop(0))
        self.elapsed_s = 1.0

    def start(self, job: Job) -> None:
        self.job = job

    def kill(self, patience_s: float = 0.0) -> int:
        return 1


def _run(monkeypatch: pytest.MonkeyPatch, jobs_: list[Job], size: int) -> Any:
    """Return the loop of a pool, whose first worker has said which jobs there are."""
    monkeypatch.setattr(pool, "Worker", _Started)
    ended: list[Job] = []
    deadline = time.monotonic() + 1000
    finish = lambda job, result: ended.append(job)  # noqa: E731
    kind = pool.Pool((), size, finish, deadline, deadline, Path("log"), {})
    run: Any = pool._Run(kind, lambda names: jobs_, None)  # type: ignore[arg-type]
    run._hire(1)
    _says(run, run.workers[0], Names({}, {}, {}))
    return run


def _says(run: Any, worker: Any, message: Any) -> None:
    worker.messages.append(message)
    run._hear(worker)


def test_tests_whose_ranks_share_the_gpu_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [Job(f"test_several_ranks.py::test_{n}", 1.0) for n in range(3)]
    others = [Job(f"test_cuda.py::test_{n}", 1.0) for n in range(2)]
    run = _run(monkeypatch, [*shared, *others], size=3)
    first, second, third = run.workers
    for each in (second, third):
        _says(run, each, Names({}, {}, {}))
    assert [worker.job for worker in run.workers] == [shared[0], *others]
    _says(run, second, Result("passed", 1.0))
    assert run.workers == [first, third]  # only the one with the turn has work
    _says(run, first, Result("passed", 1.0))
    assert first.job == shared[1]


def test_jobs_are_left_when_no_worker_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [Job(name, 1.0) for name in "abcdef"]
    run = _run(monkeypatch, waiting, size=2)
    running, starting = run.workers
    for _ in range(3):
        run._replace(starting, "the worker died")
        starting = run.workers[-1]
    assert run.workers == [running] and running.job == waiting[0]
    _says(run, running, Result("passed", 1.0))  # the others do not cost it its work
    with pytest.raises(pool.NoWorkerError, match="3 workers did not begin") as caught:
        run._replace(running, "the worker died")
    assert caught.value.left == waiting[2:]


ORPHANS = """
import os, time
from benchmarks.gpu import worker

if os.fork():
    time.sleep(0.5)
    os._exit(9)  # as if killed
os.setsid()
worker.end_with_parent()
os.fork()  # a rank
time.sleep(600)
"""


def test_a_worker_and_its_ranks_end_with_a_killed_starter() -> None:
    # The output stays open as long as one of them lives.
    found = subprocess.run(
        [sys.executable, "-c", ORPHANS], cwd=machine.ROOT, stdout=subprocess.PIPE, timeout=20
    )
    assert found.returncode == 9


def test_an_odd_result_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(tmp_path / "r.json", machine.describe("x"))
    run = budget._Spending(record, KEPT)
    run.finish_case(Job("step/odd", 1.0), Result("passed", 1.0, "", {(1, 2): 3.0}))
    run.finish_case(Job("step/tensor", 1.0), Result("passed", 1.0, "", {"loss": torch.ones(())}))
    run.finish_test(Job("test_cuda.py::test_a", 1.0), Result("passed", 1.0))
    kept = json.loads(record.path.read_text())
    assert "cannot be recorded: TypeError" in kept["failures"]["step/odd"]
    assert kept["cases"]["step/tensor"]["numbers"] == {"loss": "tensor(1.)"}
    assert "test_cuda.py::test_a" in kept["tests"] and run.num_failed == 1
    assert "failed: step/odd" in capsys.readouterr().out


def test_cases_are_cut_soon_after_their_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[pool.Pool] = []
    monkeypatch.setattr(
        budget._Spending, "through", lambda run, kind, choose: pools.append(kind) or []
    )
    now = time.monotonic()
    spend(RunRecord(tmp_path / "r.json", machine.describe("x")), KEPT, now + 400)
    cases, tests = pools
    assert 200 <= cases.until - now < 201 and cases.deadline == cases.until + 30
    assert tests.until == tests.deadline == now + 400


def test_a_worker_knows_the_time_limits_of_tests(request: pytest.FixtureRequest) -> None:
    def limit_s(*marks: pytest.MarkDecorator) -> float:
        marker = marks[0].mark if marks else None
        config = request.config
        item: Any = SimpleNamespace(get_closest_marker=lambda name: marker, config=config)
        return worker._limit_s(item)

    assert limit_s() == float(request.config.getini("timeout"))
    assert limit_s(pytest.mark.timeout(300)) == 300.0
    assert limit_s(pytest.mark.timeout(timeout=7)) == 7.0


def test_a_page_is_not_made_without_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "gpu_case_step.md").write_text("# GPU benchmarks")
    with pytest.raises(FileNotFoundError, match=r"has no gpu_case_step.json beside it"):
        record_of("step", tmp_path)
    for page in machine.RESULTS.glob("gpu_case_*.md"):
        assert record_of(page.stem.removeprefix("gpu_case_"), machine.RESULTS).entries


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
    cut = tmp_path / "cut.json"
    cut.write_text('{"header": {"schema": 1,')
    for wrong, text in (
        (["--budget", "now"], "'now' is no positive time"),
        (["--continue", str(tmp_path / "none")], "there is no file"),
        (["--continue", str(cut)], "cut.json is no record of a run: "),
        (["--case", "sleep"], "there is no case 'sleep'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)
        assert text in capsys.readouterr().err
    seen: dict[str, Any] = {}

    def spend(record: RunRecord, kept: Kept, deadline: float, workers: Workers) -> int:
        seen.update(workers=workers, record=json.loads(record.path.read_text()))
        seen.update(path=record.path, left=deadline - time.monotonic())
        return 0

    found = probe.Found({probe.CHOICE: "nccl"}, {"as NCCL chooses": {"works": []}})
    monkeypatch.setattr(probe, "two_ranks_a_device", lambda env: found)
    monkeypatch.setattr(command, "spend", spend)
    record = tmp_path / "record.json"
    assert command.main(["--budget", "8m", "--record", str(record)]) == 0
    assert seen["path"] == record and 470 < seen["left"] <= 480
    assert seen["workers"] == Workers(tests_env=found.env)
    assert seen["record"]["probe"] == found.said

    # Bundles that are missing or broken do not end the run.
    for packed in (tmp_path / "none", tmp_path / "broken"):
        assert command.main(["--record", str(record), "--bundles", str(packed)]) == 0
        packed.parent.joinpath("broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "nccl.tar.xz").write_bytes(b"cut")
        assert seen["workers"] == Workers(tests_env=found.env)
        assert seen["record"]["bundles"].startswith("none: ")
        assert f"bundles: {seen['record']['bundles']}" in capsys.readouterr().out

    # Speeds are measured without the settings of ranks that share a GPU.
    env = {bundles.PRELOAD: "libnccl.so.2", "PYTHONPATH": "packages"}
    monkeypatch.setattr(bundles, "unpack", lambda packed, folder: env)
    assert command.main(["--record", str(record), "--bundles", str(tmp_path)]) == 0
    assert seen["workers"].tests_env == {**env, **found.env}
    assert seen["workers"].cases_env == {"PYTHONPATH": "packages"}
