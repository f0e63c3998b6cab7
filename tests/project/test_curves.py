"""Curves beside one another: their contract, their differences, and the page that prints them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", "5")

from benchmarks import curves, curves_megatron, curves_page, curves_tuning
from benchmarks.curves import PLANS, Contract
from megatron_lightning.optim.lr_schedules import LRSchedule, ScheduledLR

SMALL = Contract(steps=6, warmup_steps=2, num_layers=2, hidden_size=32, ffn_hidden_size=64)


def test_the_page_prints_the_kept_curves() -> None:
    records = curves.kept(Contract())
    assert {"one", "tp2-sp"} <= set(records)
    page = curves_page.PAGE.read_text()
    assert "\n".join(curves_page.tables(records, Contract())) in page
    assert curves_page.PICTURE.read_text() == curves_page.picture(records)
    assert (curves.FOLDER / "curves.csv").read_text() == curves_page.csv(records)


def test_differences_are_averaged_and_counted() -> None:
    one = [2.0] * 8
    other = [2.0, 2.0 + 1e-6, 2.1, 1.9, 2.0, 2.0, 2.2, 2.2]
    found = curves_page.distance(other, one, window=2)
    assert (found.first, found.equal_steps, found.at) == (0.0, 2, 8)
    assert (found.single, found.averaged) == pytest.approx((0.1, 0.1))
    assert curves_page.distance(one, one, window=2).equal_steps == 8
    assert curves_page.averages([1.0, 3.0, 5.0], window=2) == [2.0]


def test_data_are_rows_of_a_chain_that_can_be_learned() -> None:
    tokens = curves.token_rows(SMALL)
    assert tokens.shape == (48, 65) and tokens.max() < 1024
    assert torch.equal(tokens, curves.token_rows(SMALL))
    many = curves.token_rows(Contract(steps=100, vocab_size=16, successors=3))
    follows = {int(a): set() for a in range(16)}  # type: ignore[var-annotated]
    for row in many.tolist():
        for a, b in itertools.pairwise(row):
            follows[a].add(b)
    assert max(map(len, follows.values())) == 3


def test_the_contract_of_the_schedule_is_that_of_transformers() -> None:
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    rates: list[list[float]] = []
    for ours in (True, False):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
        schedule: Any = (
            ScheduledLR(optimizer, LRSchedule(lr_decay_steps=50, lr_warmup_steps=5, min_lr=1e-4))
            if ours
            else get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 50, min_lr=1e-4)
        )
        rates.append([])
        for _ in range(50):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    assert rates[0][0] == 0.0


def test_fine_tuning_has_a_contract_and_labels_of_its_own() -> None:
    full, lora = (curves.contract_of(PLANS[f"trl-{kind}"], Contract()) for kind in ("full", "lora"))
    assert (full.steps, full.warmup_steps, full.peak_lr) == (300, 30, 1e-3)
    assert (lora.steps, lora.peak_lr) == (300, 1e-2)
    assert curves.contract_of(PLANS["one"], Contract()) == Contract()
    assert curves_tuning.labels_of(torch.arange(1, 6)).tolist() == [-100, -100, 3, 4, 5]
    long, short = (_record(Contract(), [1.0] * steps) for steps in (3, 2))
    table = curves_page.csv({"one": long, "trl-full": short}).splitlines()
    assert table[0] == "step,one,trl-full" and table[-1] == "3,1,"


def test_megatron_core_begins_with_the_weights_of_the_folder(tmp_path: Path) -> None:
    curves.make_folder(SMALL, tmp_path)
    llama = load_file(tmp_path / "model.safetensors")
    weights = curves_megatron.weights_of(str(tmp_path), SMALL)
    assert sum(w.numel() for w in weights.values()) == sum(w.numel() for w in llama.values())
    qkv = weights["decoder.layers.1.self_attention.linear_qkv.weight"]
    heads = qkv.view(SMALL.num_heads, 3, -1, SMALL.hidden_size)
    for place, name in enumerate("qkv"):
        rows = llama[f"model.layers.1.self_attn.{name}_proj.weight"]
        assert torch.equal(heads[:, place].flatten(0, 1), rows)


def _record(contract: Contract, losses: list[float]) -> dict[str, Any]:
    return {
        "header": curves.machine.describe("x"), "contract": curves._plain(contract),
        "losses": losses, "processor_seconds": 1.0,
    }  # fmt: skip


def test_the_page_speaks_of_kept_curves_alone_and_compares_their_versions() -> None:
    def words(*names: str) -> str:
        return "\n".join(curves_page.tables({name: records[name] for name in names}, Contract()))

    records = {
        name: _record(Contract(), [1.0] * 50) for name in ("one", "rounded", "zero1", "trl-full")
    }
    assert "`rounded` is one process" in words("one", "rounded")
    assert "`rounded` is one" not in (few := words("one", "zero1", "trl-full"))
    assert "SFTTrainer`" not in few and "Versions of single" not in few
    records["zero1"]["header"]["versions"] |= {"torch": "9.9", "peft": "0.1"}
    records["zero1"]["header"]["commit"] = "another"
    of_both = words("one", "zero1")
    assert "Versions of single curves: torch 9.9, peft 0.1 (zero1)." in of_both
    assert "Commits of other curves: another (zero1)." in of_both
    del records["rounded"]["header"]["versions"]["numpy"]
    assert "numpy missing (rounded)" in words("one", "rounded")


def test_bounds_hold_for_both_runs_of_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {"one": [1.0] * 50, "zero1": [1.0] * 50}
    monkeypatch.setattr(curves, "measure", lambda name, c: _record(c, losses[name]))
    arguments = ["one", "zero1", "--results", str(tmp_path)]
    assert curves.main(arguments, Contract()) == 0
    losses["zero1"] = [1.0] * 49 + [1.5]
    assert curves.main(["zero1", "--again", "--results", str(tmp_path)], Contract()) == 0
    losses["zero1"] = [9.0] * 50
    assert curves.main(["zero1", "--again", "--results", str(tmp_path)], Contract()) == 0
    records = curves.kept(Contract(), tmp_path)
    assert records["zero1"]["losses"][-1] == 1.0  # the first run stays
    words = "\n".join(curves_page.tables(records, Contract()))
    assert "1 curve, equal to the curve beside to 1e-5 for 49 steps, to 5.0e-01 in" in words
    assert "Run twice: zero1. The bounds above hold for both runs, which differ at most" in words
    assert "by 5.0e-01 on the same machine (zero1)." in words


def test_runs_are_compared_with_runs_of_the_same_machine() -> None:
    """Processors round differently; without such a run with all runs."""
    records = [_record(Contract(), [1.0] * 50) | {"again": _record(Contract(), [2.0] * 50)}] * 2
    records = [json.loads(json.dumps(record)) for record in records]
    for record in records:
        record["again"]["header"]["machine"] = "another"
    assert [one == other for one, other in curves_page.pairs(*records)] == [True, True]
    records[1]["header"]["machine"] = records[1]["again"]["header"]["machine"] = "a third"
    assert len(curves_page.pairs(*records)) == 4


def test_a_run_goes_on_curve_by_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, contract: Contract) -> dict[str, Any]:
        if name == "zero1":
            raise RuntimeError("a rank died")
        return _record(contract, [1.0])

    monkeypatch.setattr(curves, "measure", measure)
    arguments = ["one", "zero1", "--results", str(tmp_path)]
    assert curves.main(arguments, SMALL) == 1
    assert "zero1: failed: a rank died" in capsys.readouterr().out
    (tmp_path / "zero1.json").write_text(json.dumps(_record(Contract(), [1.0])))
    assert curves.main(arguments, SMALL) == 1  # a record of another contract is none
    assert "one: measured before" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        curves.main(["two"])
    with pytest.raises(ValueError, match="keeps no curve of this contract"):
        curves_page.write_all(tmp_path, Contract(seed=5))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANS if name != "tp2-pp2"])
def test_a_short_curve_is_that_beside_it(name: str) -> None:
    needed = {"megatron": ("megatron.core",), "torchtitan": ("torchtitan",)}
    for package in needed.get(name, ("trl", "datasets") if PLANS[name].tuning else ()):
        pytest.importorskip(package)
    contract = Contract(**{**vars(SMALL), "num_layers": 4})
    record = curves.measure(name, contract)
    beside = PLANS[name].beside or name
    expected = curves.measure(beside, contract)["losses"]
    # bf16 rounds products of other shapes elsewhere.
    bound = 2e-3 if "bf16" in name else 1e-5
    assert record["losses"] == pytest.approx(expected, rel=bound)
    assert curves_page.distance(record["losses"], expected, window=2).averaged < bound
