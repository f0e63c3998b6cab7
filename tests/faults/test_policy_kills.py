"""``kill -9`` of a replica in the middle of a policy's generation, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.policy_job import GENERATIONS, UPDATES
from tests.faults.processes import Ended, run_to_the_end


def _run(folder: Path, moment: str = "never", step: int = 0) -> Ended:
    job = ["-m", "tests.faults.policy_job", str(folder), moment, str(step)]
    return run_to_the_end(job, timeout_s=600)


def _norms(folder: Path, rank: int) -> dict[int, float]:
    """Return the norms by step. Steps behind the newest checkpoint may be there twice."""
    lines = (folder / f"norms-{rank}.jsonl").read_text().splitlines()
    found: dict[int, float] = {}
    for step, norm in map(json.loads, lines):
        assert found.setdefault(step, norm) == norm
    return found


def _rows(folder: Path) -> list[str]:
    [version] = (folder / "rollouts").iterdir()
    return [path.read_text() for path in sorted(version.iterdir())]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_generations_are_sampled_again(tmp_path: Path) -> None:
    """Killed while it samples, and between two updates of a generation: the same rows and norms."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        rows = ({"prompt_ids": [1 + n % 7, n % 5, 3]} for n in range(8 * GENERATIONS))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _run(whole).code == 0
    for moment, step in (("sampling", UPDATES), ("update", 2 * UPDATES + 1)):
        assert _run(killed, moment, step).code != 0
    ended = _run(killed)
    assert ended.code == 0, ended.output
    assert len(_norms(whole, 0)) == GENERATIONS * UPDATES
    assert [_norms(killed, rank) for rank in (0, 1)] == [_norms(whole, rank) for rank in (0, 1)]
    assert _rows(killed) == _rows(whole) and len(_rows(whole)) == GENERATIONS
