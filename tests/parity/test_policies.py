"""The training of policies on every layout equals torch on one process, by SGD."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("transformers", "5")

from megatron_lightning.errors import ConfigError
from tests.helpers.layouts import CP, EP, MICRO, PP, TP, VPP
from tests.helpers.policies import CASES, policy_alone, train_policy
from tests.helpers.preferences import make_folders
from tests.helpers.ranks import run_ranks

DATA, RUNS = "data_parallel", "runs"
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "micro": (1, 1, {MICRO: 3}),
    "tp": (2, 1, {TP: 2}),
    "pp": (2, 1, {PP: 2, MICRO: 2}),
    "vpp": (2, 1, {PP: 2, VPP: 2, MICRO: 2}),
    "cp": (2, 1, {CP: 2, MICRO: 4}),
    "zero1": (2, 2, {MICRO: 2}),
    "fsdp": (2, 2, {DATA: "fsdp"}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, VPP: 2, MICRO: 2}),
    "pp-cp": (4, 1, {PP: 2, CP: 2, MICRO: 2}),
    "cp-zero1": (4, 2, {CP: 2}),
}
_USUAL = [("dapo", "gpt", "cp"), ("gspo", "llama", "pp")]
_ALL = [
    (case, kind, layout)
    for case in CASES
    for kind in ("gpt", "llama")
    for layout in LAYOUTS
    if not (kind == "llama" and "cp" in layout) and (case, kind) != ("adapters", "gpt")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folders(str(tmp_path_factory.mktemp("models")))


_alone = lru_cache(maxsize=8)(policy_alone)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("case", "kind", "layout"),
    [pytest.param(*one, marks=() if one in _USUAL else pytest.mark.slow) for one in _ALL],
)
def test_policies_equal_torch(folder: str, case: str, kind: str, layout: str) -> None:
    """Rows of a context rank count once, micro-batches have other numbers of tokens, and one has
    none; all forwards have the temperature."""
    losses, norms = _alone(case)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, train_policy, folder, case, kind, options, data, timeout_s=200)
    for own, own_norms, metrics in ranks:
        # fp32, sums in another order; SGD does not amplify them.
        assert own_norms == pytest.approx(norms, rel=1e-5)
        # Replicas weigh their own means by their own tokens.
        assert own == pytest.approx(losses, rel=1e-5) or data > 1
        assert metrics["entropy"] > 1.0
        assert metrics["sampler_difference_max"] > metrics["sampler_difference"]


@pytest.mark.parametrize("case", ["dapo", "vespo"])
def test_accumulated_batches_are_one_update(folder: str, case: str) -> None:
    if CASES[case].get("top_entropy_quantile"):
        with pytest.raises(ConfigError, match="Set accumulate_grad_batches to 1"):
            train_policy(folder, case, "gpt", {}, 1, 2)
        return
    _, norms = _alone(case)
    _, own, _ = train_policy(folder, case, "gpt", {}, 1, 2)
    assert own == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("ep", "tp", "pp", "zero1")]
)
def test_policies_with_experts(layout: str) -> None:
    _, norms, _ = train_policy("", "gspo", "moe", None, 1)
    world, data, options = {**LAYOUTS, "ep": (2, 2, {EP: 2})}[layout]
    for _, own, _ in run_ranks(
        world, train_policy, "", "gspo", "moe", options, data, timeout_s=200
    ):
        assert own == pytest.approx(norms, rel=1e-5)
