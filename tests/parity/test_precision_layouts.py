"""Every mode of data parallelism, with tensor, sequence and pipeline parallelism, in every half
precision; and twice the same.

One process of ``MegatronStrategy`` in the same precision is the measure: it, too, keeps fp32
masters. Ranks that share a sum round their parts of it to half precision before they are added:
2^-8 of an activation in bf16, 2^-11 in fp16, layer after layer and step after step. 2e-2 of the
norm of all gradients is allowed in bf16, an eighth of it in fp16.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.parity.test_fully_sharded import PP, TP, Case, _train

TOLERANCES = {"bf16-mixed": 2e-2, "bf16-true": 2e-2, "16-mixed": 2.5e-3, "16-true": 2.5e-3}
ONE: Case = ("one", {}, {"micro_batch_size": 2}, 1)
CASES: dict[str, Case] = {
    "tp2-dp2": ("tp2-dp2", {}, {TP: 2, "sequence_parallel": False, "micro_batch_size": 2}, 1),
    "sp2-dp2": ("sp2-dp2", {}, {TP: 2, "micro_batch_size": 2}, 1),
    "pp2-dp2": ("pp2-dp2", {}, {PP: 2, "micro_batch_size": 2}, 1),
    "sp2-pp2": ("sp2-pp2", {}, {TP: 2, PP: 2, "micro_batch_size": 2}, 1),
}
MODES = ("ddp", "zero1", "fsdp")


def _train_in(
    names: list[str], precision: str, modes: tuple[str, ...]
) -> dict[tuple[str, str], list[Any]]:
    return {
        (name, mode): _train(4, CASES[name], {}, precision, mode)
        for name in names
        for mode in modes
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("precision", "names", "modes"),
    [
        pytest.param("bf16-true", ["sp2-dp2"], ("zero1",)),
        pytest.param("16-true", ["pp2-dp2"], ("zero1",)),
        *(
            pytest.param(precision, [*CASES], MODES, marks=pytest.mark.slow)
            for precision in TOLERANCES
        ),
    ],
)
def test_half_precision_equals_one_process(
    precision: str, names: list[str], modes: tuple[str, ...]
) -> None:
    [(losses, norms)] = run_ranks(1, _train, 1, ONE, {}, precision, "zero1")
    for rank in run_ranks(4, _train_in, names, precision, modes, timeout_s=300):
        for (name, mode), (own, others) in rank.items():
            assert others == pytest.approx(norms, rel=TOLERANCES[precision]), f"{name} {mode}"
            if name == "sp2-pp2":  # one replica sees the whole batch
                assert own == pytest.approx(losses, rel=TOLERANCES[precision]), f"{name} {mode}"


def _twice(cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[Any]]:
    return {
        (name, mode): [_train(4, CASES[name], {}, "bf16-mixed", mode) for _ in range(2)]
        for name, mode in cases
    }


@pytest.mark.slow  # test_optimizers trains twice as well
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("sp2-dp2", "zero1")], id="some"),
        pytest.param([(name, mode) for name in CASES for mode in MODES], id="all"),
    ],
)
def test_a_second_run_is_bit_equal(cases: list[tuple[str, str]]) -> None:
    for rank in run_ranks(4, _twice, cases, timeout_s=300):
        for case, (first, second) in rank.items():
            assert first == second, case
