"""Each kind of fault once on every launcher and layout: no job hangs, and each ends as if nothing
had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.forty import Case, cases, run_case


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: "-".join(map(str, case)))
def test_a_job_goes_on_after_a_fault(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)


def test_there_are_forty_faults_and_every_rank_is_killed() -> None:
    all_cases = list(cases())
    assert len(all_cases) == 40
    assert {case.rank for case in all_cases if case.kind == "kill"} == {0, 1, 2, 3}
    assert {case.signal_or_kind for case in all_cases} >= {"sigterm", "sigusr1"}
