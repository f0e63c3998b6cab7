"""The usual run and the slices of a week run every test once, skip nothing without a reason, and
leave a record."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import slices
from benchmarks.outcomes import read_record
from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems

TESTS = Path(__file__).parents[1]


@dataclass(eq=False)
class _Item:
    nodeid: str
    markers: list[Any] = field(default_factory=list)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.markers if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.markers.append(mark.mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


def _items() -> list[_Item]:
    spread = [_Item(f"a.py::spread[{case}]", [pytest.mark.spread(2).mark]) for case in range(9)]
    slow = [_Item(f"b.py::slow[{case}]", [pytest.mark.slow.mark]) for case in range(12)]
    return [*spread, *slow, _Item("c.py::usual")]


def _chosen(is_slow: bool, part: str | None = None) -> list[str]:
    """Return the tests that a run has, as ``-m`` and ``--slice`` choose them."""
    items = _items()
    hook = pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: part), items)
    next(hook)
    items[:] = [item for item in items if item.is_slow == is_slow]
    with pytest.raises(StopIteration):
        next(hook)
    return [item.nodeid for item in items]


def test_usual_run_and_slices_have_every_test_once() -> None:
    usual = _chosen(False)
    slices = [_chosen(True, f"{day}/7") for day in range(7)]
    assert usual == ["a.py::spread[2]", "a.py::spread[6]", "c.py::usual"]
    assert {len(chosen) for chosen in slices} == {2, 3}
    assert sorted(sum(slices, usual)) == sorted(item.nodeid for item in _items())


def _report(folder: Path) -> Path:
    facts = {"commit": "abc", "date": "2026-11-29", "torch": "2.13.0"}
    properties = "".join(f'<property name="{k}" value="{v}"/>' for k, v in facts.items())
    cases = {
        'classname="tests.parity.test_a" name="test_b[tp2]"': "",
        'classname="tests.parity.test_a" name="test_b[tp3]"': "<failure/>",
        'classname="tests.unit.test_c" name="test_d"': '<skipped message="no Slurm: squeue"/>',
        'classname="tests.unit.test_c" name="test_e"': '<skipped type="pytest.xfail"/>',
        'classname="" name="tests.unit.test_f"': (
            '<skipped message="collection skipped">'
            "('/x/test_f.py', 3, \"Skipped: could not import 'ray': No module\")</skipped>"
        ),
    }
    path = folder / "report.xml"
    cases['time="1"'] = ""  # cut off while it ran
    text = "".join(
        f"<testcase {name}><properties>{properties}</properties>{inner}</testcase>"
        for name, inner in cases.items()
    )
    path.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return path


def test_a_skip_without_a_reason_fails_a_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, listed, own = str(_report(tmp_path)), tmp_path / "skips.yaml", slices.reasons
    monkeypatch.setattr(slices, "reasons", lambda: own(listed))
    slurm = "- {tests: unit/test_c, says: no Slurm, why: the machine has none}\n"
    listed.write_text(slurm)
    assert slices.main([report]) == 1
    printed = capsys.readouterr().out
    assert "unit/test_c.py: 1 skipped, no Slurm: squeue: the machine has none" in printed
    without = "could not import 'ray': No module: NO REASON IN tests/skips.yaml"
    assert f"unit/test_f.py: 1 skipped, {without}" in printed
    listed.write_text(slurm + "- {tests: unit/test_f, says: \"'ray'\", why: not wanted}\n")
    assert slices.main([report]) == 0


def test_the_record_keeps_what_the_matrix_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, record = _report(tmp_path), tmp_path / "slices.json"
    record.write_text(
        '{"parity/test_a.py::test_gone": {"outcome": "passed", "date": "", "torch": ""}}'
    )
    passed, failed = (f"parity/test_a.py::test_b[{case}]" for case in ("tp2", "tp3"))
    monkeypatch.setattr(slices, "RECORD", record)
    monkeypatch.setattr(slices, "named_tests", lambda: [passed, failed, "unit/test_c.py::test_d"])
    slices.main([str(report), "--keep"])
    kept = read_record(record)
    assert {test: each.outcome for test, each in kept.items()} == {
        passed: "passed",
        failed: "failed",
    }
    assert slices.word(passed, kept) == "tested" and slices.word(failed, kept) == "failed"
    assert slices.word("unit/test_c.py::test_d", kept) == "written"
    assert slices.place([passed, failed], kept) == "2026-11-29 at abc"
    report.write_text(report.read_text().replace('value="abc"', 'value="abc-modified"'))
    with pytest.raises(ValueError, match=r"ran on abc-modified, and a record names commits"):
        slices.main([str(report), "--keep"])


def test_listed_skips_are_of_tests_that_exist() -> None:
    files = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]
    for reason in slices.reasons():
        assert any(re.match(reason.tests, file) for file in files), reason
        assert reason.says and reason.why


def test_a_report_names_commit_and_date() -> None:
    items = [SimpleNamespace(user_properties=[])]
    options = {"xmlpath": "report.xml"}
    session: Any = SimpleNamespace(config=SimpleNamespace(getoption=options.get), items=items)
    pytest_collection_finish(session)
    assert [name for name, _ in items[0].user_properties] == ["commit", "date", "torch"]
    assert all(type(value) is str for _, value in items[0].user_properties)
