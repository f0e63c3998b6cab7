"""The table of optimizers: what it says, and that a spread of its cells is so.

The optimizers of one layout run one after another in the same processes. fp32, 1e-5 relative: sums
over ranks and micro-batches are taken in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

pytest.importorskip("transformers", "5")

from benchmarks import optimizers
from benchmarks.optimizers import BEGIN, CASES, END, LAYOUTS, PAGE, Reference
from megatron_lightning.errors import ConfigError
from tests.helpers.ranks import run_ranks


def _cells() -> dict[str, dict[str, str]]:
    """Return the table of the docs."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def test_the_page_has_every_cell_and_none_deviates() -> None:
    cells = _cells()
    assert len(cells) >= 20 and cells.keys() <= CASES.keys()
    for row in cells.values():
        assert row.keys() == LAYOUTS.keys()
        assert all(cell.startswith(("equal", "refused")) for cell in row.values())


def _train(names: Sequence[str], layout: str | None) -> list[list[float]]:
    return [optimizers.train(name, layout) for name in names]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("zero1", ["Adadelta", "NAdam", "Rprop", "Adafactor"]),
        ("fsdp", ["RAdam", "ASGD", "Adafactor"]),
        ("tp 2", ["Adamax", "RMSprop", "Adafactor"]),
        ("pp 2", ["Adafactor", "Adagrad"]),
        pytest.param("ddp", [name for name, case in CASES.items() if case.package == "torch"
                             and name not in ("LBFGS", "Muon")], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equal_cells_are_equal(layout: str, names: list[str]) -> None:
    [expected] = run_ranks(1, _train, names, None)
    ranks = run_ranks(2, _train, names, layout)
    for name, losses, *found in zip(names, expected, *ranks, strict=True):
        assert _cells()[name][layout].startswith("equal")
        assert optimizers.difference(found, losses) < 1e-5, name


def _refusal(name: str, layout: str) -> str:
    try:
        optimizers.train(name, layout)
    except ConfigError as error:
        return str(error)
    return "it trained"


@pytest.mark.parametrize("layout", ["zero1", "tp 2"])
def test_refused_cells_are_refused_on_all_ranks(layout: str) -> None:
    for message in run_ranks(2, _refusal, "LBFGS", layout):
        assert message.startswith("configure_optimizers returned LBFGS, which runs the step")
        cell = optimizers.verdict(f"megatron_lightning.errors.ConfigError: {message}")
        assert cell.startswith("refused: ") and _cells()["LBFGS"][layout] == "refused [1]"


def test_cells_of_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Reference([4.0, 3.0], 1e-5)

    def cell(outcome: object) -> str:
        def run(*_: object, limit_s: float) -> object:
            if isinstance(outcome, str):
                raise RuntimeError(outcome)
            return outcome

        monkeypatch.setattr(optimizers, "run", run)
        return optimizers.measure("SGD", "ddp", expected, 1.0)

    error = "Traceback\nmegatron_lightning.errors.ConfigError: "
    assert cell([[4.1, 3.0], [3.9, 3.0]]) == "equal 0e+00"
    assert cell([[4.0, 3.003], [4.0, 3.003]]) == "WRONG 1e-03"
    assert cell([[4.0, math.nan]]) == "WRONG inf"
    assert cell(f"{error}X reads statistics of all parameters") == "refused (group)"
    assert cell(f"{error}X does not run") == "refused: X does not run"
    assert cell(f"{error}Y\n\nRuntimeError: after 2 steps: Y").startswith("WRONG: RuntimeError")
    assert cell("Traceback\nValueError: shapes") == "failed: ValueError: shapes"
    lines = optimizers.table({"A": {"ddp": "equal 1e-08", "pp 2": "refused: Y"}}, ["ddp", "pp 2"])
    assert lines[2:] == ["| A | equal 1e-08 | refused [1] |", "", "1. Y"]
