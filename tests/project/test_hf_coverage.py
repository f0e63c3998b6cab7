"""The coverage program says what equals one process, what is refused and why, and what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5")

from benchmarks import hf_coverage
from benchmarks.hf_coverage import OTHERS, read_table, write_table
from benchmarks.hf_families import Family
from benchmarks.hf_training import Reference, Trained, compare, verdict


def test_an_error_of_ours_is_a_refusal() -> None:
    ours = "Traceback\n  File\nmegatron_lightning.errors.ConfigError: 3 heads. Set 1."
    assert verdict(ours) == "refused: 3 heads. Set 1."
    assert verdict("Traceback\nRuntimeError: shape") == "failed: RuntimeError: shape"


def trained(losses: list[float], weight: float) -> Trained:
    return Trained(losses, {"w": torch.tensor([weight])})


REFERENCE = Reference(None, {"w": torch.tensor([1.0])}, trained([4.0, 3.0], 1.1))


def test_different_losses_are_wrong() -> None:
    assert compare(trained([4.0, 3.0], 1.1), REFERENCE, lambda: REFERENCE.trained) == "equal"
    found = compare(trained([4.0, 3.1], 1.1), REFERENCE, lambda: REFERENCE.trained)
    assert found == "wrong: losses differ by 3.3e-02"
    nothing = trained([4.0, float("nan")], 1.1)
    assert compare(nothing, REFERENCE, lambda: REFERENCE.trained).startswith("wrong")
    other = Trained([4.0, 3.0], {})
    assert compare(other, REFERENCE, lambda: REFERENCE.trained) == "wrong: 1 names differ"


def test_a_weight_that_moved_elsewhere_is_wrong() -> None:
    """Losses of a few steps hide a wrong gradient of a small parameter."""
    found = compare(trained([4.0, 3.0], 1.05), REFERENCE, lambda: REFERENCE.trained)
    assert found.startswith("wrong: w is off by 4.5e-01 of its update")


def test_differences_that_a_rounding_makes_too_say_nothing() -> None:
    def rounded() -> Trained:
        return trained([4.0, 3.01], 1.09)

    assert compare(trained([4.0, 3.02], 1.11), REFERENCE, rounded).startswith("sensitive: losses")
    assert compare(trained([4.0, 3.5], 1.11), REFERENCE, rounded).startswith("wrong: losses")
    assert compare(trained([4.1, 3.02], 1.11), REFERENCE, rounded).startswith("wrong: losses")


def test_the_table_counts_and_explains(tmp_path: Path) -> None:
    rows = {
        "a": {"plain": "trained", "tp2": "equal", "sp": "on", "load": "equal"},
        "b": {"plain": "trained", "tp2": "refused: 3 heads. Set 1."},
        "c": {"plain": "not built: ValueError"},
    }
    write_table(rows, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| tp2 | 1 | 1 | 0 | 0 | 0 | 2 |" in page
    assert "| family | tp2 | sp | load |" in page
    assert "| a | equal | on | equal |" in page and "| b | refused [1] |" in page
    assert "sequence parallelism in 1 of 2 families" in page
    assert "1. 3 heads. Set 1." in page
    assert "configuration: c." in page
    assert "*ways*" not in page  # columns that nobody measured are not announced
    (tmp_path / "page.md").write_text(
        f"{page}\n{OTHERS}\n\n| family | tp2 |\n|---|---|\n| d | equal |\n\n1. other\n"
    )
    assert read_table(tmp_path / "page.md") == {
        "a": {"tp2": "equal", "sp": "on", "load": "equal"},
        "b": {"tp2": "refused: 3 heads. Set 1.", "sp": "", "load": ""},
    }


def test_a_reason_of_several_families_is_one_note(tmp_path: Path) -> None:
    rows = {
        name: {"plain": "trained", "sp": f"off: {model} has experts"}
        for name, model in (("mixtral", "MixtralForCausalLM"), ("olmoe", "OlmoeForCausalLM"))
    }
    write_table(rows, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| mixtral | off [1] |" in page and "| olmoe | off [1] |" in page
    assert "1. the model has experts" in page and "2." not in page.partition("1. ")[2]


@pytest.mark.slow
def test_a_family_is_measured_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        hf_coverage.hf_families, "families", lambda: [Family("llama", "LlamaForCausalLM")]
    )
    work, table = tmp_path / "work.jsonl", tmp_path / "page.md"
    arguments = ["hf_coverage", "--work", str(work), "--table", str(table), "--layouts", "tp2"]
    monkeypatch.setattr(sys, "argv", arguments)
    hf_coverage.main()
    assert "'tp2': 'equal', 'sp': 'on'" in capsys.readouterr().out
    hf_coverage.main()
    assert "'tp2'" not in capsys.readouterr().out
    assert len(work.read_text().splitlines()) == 1
