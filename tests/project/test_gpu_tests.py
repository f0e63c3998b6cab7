"""The record of the tests for GPUs: what a report says, and what the support matrix says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests
from benchmarks.gpu_tests import Outcome, add, cell, read_record, read_report
from tests.gpu.conftest import facts_of_machine

FACTS = {"gpu": "NVIDIA H200", "date": "2026-11-27", "torch": "2.11.0"}
TEST = "test_models.py::test_steps"


def _case(name: str, inner: str = "", *, facts: bool = True) -> str:
    properties = "".join(f'<property name="{k}" value="{v}"/>' for k, v in FACTS.items())
    block = f"<properties>{properties}</properties>" if facts else ""
    return f'<testcase classname="tests.gpu.test_models" name="{name}">{block}{inner}</testcase>'


def _report(folder: Path, *cases: str) -> Path:
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_a_report_becomes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    cases = [
        _case("test_steps[a]"),
        _case("test_steps[b]", "<skipped/>"),
        _case("test_other", "<failure/>"),
        _case("test_leaks"),
        _case("test_leaks", "<error/>"),
        '<testcase classname="tests.unit.layers.test_norm" name="test_norm"/>',
    ]
    add(read_report(_report(tmp_path, *cases)), path)
    found = {name.partition("::")[2]: each.outcome for name, each in read_record(path).items()}
    assert found == {
        "test_leaks": "failed",
        "test_other": "failed",
        "test_steps[a]": "passed",
        "test_steps[b]": "skipped",
    }
    # A later run replaces what it has run, and leaves what it has skipped.
    later = [_case("test_steps[a]", "<skipped/>"), _case("test_other")]
    record = add(read_report(_report(tmp_path, *later)), path)
    assert record[f"{TEST}[a]"].outcome == record["test_models.py::test_other"].outcome == "passed"
    assert cell(TEST, record) == f"passed on NVIDIA H200, 2026-11-27: `{TEST}`"
    assert cell(f"{TEST}[b]", record) == f"written, not yet run: `{TEST}[b]`"


def test_a_report_names_its_gpu(tmp_path: Path) -> None:
    report = _report(tmp_path, _case("test_steps", facts=False))
    with pytest.raises(ValueError, match=r"does not say on which GPU .*test_steps ran. Set --gpu"):
        read_report(report)
    assert read_report(report, FACTS) == {TEST: Outcome("passed", **FACTS)}


def test_a_cell_counts_failing_cases() -> None:
    passed, failed = (Outcome(outcome, **FACTS) for outcome in ("passed", "failed"))
    record = {f"{TEST}[a]": passed, f"{TEST}[b]": failed, f"{TEST}_of_another": passed}
    assert cell(TEST, record).startswith("passed on NVIDIA H200, 2026-11-27 (1 of 2 cases): ")
    assert cell(TEST, {f"{TEST}[a]": failed}).startswith("failed on NVIDIA H200")
    assert cell(f"{TEST}[a]", record).startswith("passed on NVIDIA H200")
    assert cell("test_models.py::test_none", record).startswith("written, not yet run: ")
    assert cell(None, record) == "written, not yet run"


def test_the_record_names_tests_that_exist() -> None:
    for name in read_record():
        path, _, test = name.partition("::")
        text = (gpu_tests.machine.ROOT / "tests" / "gpu" / path).read_text()
        assert f"def {test.partition('[')[0]}(" in text, name


def test_facts_of_a_report_can_be_sent_by_xdist(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no subclass of str, such as torch's version."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    facts = facts_of_machine()
    assert [name for name, _ in facts] == ["gpu", "date", "torch"]
    assert all(type(part) is str for fact in facts for part in fact)
