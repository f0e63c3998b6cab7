"""Preference training and distillation on every layout equal torch on one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5")


from megatron_lightning.models import awaited_losses, token_outputs
from megatron_lightning.modules import DPOModule, HuggingFaceModule
from megatron_lightning.peft import save_adapters
from megatron_lightning.peft.commands import import_
from tests.helpers.adapted import adapted_llama
from tests.helpers.layouts import PP, TP, VPP
from tests.helpers.preferences import (
    batches,
    distill_alone,
    make_folders,
    train_alone,
    train_by_distillation,
    train_by_preferences,
    train_from_adapters,
)
from tests.helpers.ranks import run_ranks

MICRO, CP, DATA = "micro_batch_size", "context_parallel_size", "data_parallel"
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "micro": (1, 1, {MICRO: 1}),
    "tp": (2, 1, {TP: 2}),
    "pp": (2, 1, {PP: 2, VPP: 2, MICRO: 1}),
    "pp-one-stage-a-model": (2, 1, {PP: 2, MICRO: 1}),
    "zbv": (2, 1, {PP: 2, VPP: 2, MICRO: 1, "pipeline_schedule": "zbv"}),
    "cp": (2, 1, {CP: 2}),
    "zero1": (2, 2, {}),
    "fsdp": (2, 2, {DATA: "fsdp"}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, VPP: 2, MICRO: 2}),
    "tp-fsdp": (4, 2, {TP: 2, DATA: "fsdp"}),
}
_USUAL = [("gpt", "model", "pp"), ("llama", "adapters", "tp"), ("gpt", "scores", "cp")]
_ALL = [
    (kind, reference, layout)
    for kind in ("gpt", "llama")
    for reference in ("model", "adapters", "scores")
    for layout in LAYOUTS
    if (kind, layout) != ("llama", "cp") and (kind, reference) != ("gpt", "adapters")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folders(str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The teacher's vocabulary is longer, so that ranks hold other entries of it."""
    return make_folders(str(tmp_path_factory.mktemp("padded")), vocab_size=144)


@lru_cache(maxsize=4)
def _alone(adapters: bool) -> tuple[list[float], list[float]]:
    return train_alone("adapters" if adapters else "full")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("kind", "reference", "layout"),
    [pytest.param(*case, marks=() if case in _USUAL else pytest.mark.slow) for case in _ALL],
)
def test_dpo_equals_torch(folder: str, kind: str, reference: str, layout: str) -> None:
    world, data, options = LAYOUTS[layout]
    losses, norms = _alone(reference == "adapters")
    ranks = run_ranks(
        world, train_by_preferences, folder, kind, reference, options, data, timeout_s=150
    )
    own = [sum(rank[0][step] for rank in ranks) / world for step in range(len(losses))]
    # The model is its reference: ln 2, and gradients that are not zero.
    assert own[0] == pytest.approx(math.log(2), rel=1e-6)
    # fp32, sums in another order; SGD does not amplify them.
    assert own == pytest.approx(losses, rel=1e-6)
    for _, own_norms, metrics in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)
        assert metrics["rewards_margin"] == pytest.approx(
            metrics["rewards_chosen"] - metrics["rewards_rejected"], abs=1e-5
        )


def _losses_of_gpt(options: Any, data: int, folder: str) -> Any:
    return train_by_preferences(folder, "gpt", "adapters", options, data)[:2]


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_adapters_of_a_gpt_have_equal_references_on_every_layout(folder: str, layout: str) -> None:
    """Adapters of a ``GPTModel`` begin otherwise than those of a Llama."""
    [(losses, norms)] = run_ranks(1, _losses_of_gpt, None, 1, folder)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _losses_of_gpt, options, data, folder, timeout_s=150)
    own = [sum(rank[0][step] for rank in ranks) / world for step in range(len(losses))]
    assert own == pytest.approx(losses, rel=1e-6)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=3e-6)


_BEGUN = {
    ("tp", "pp", "first"): (),
    ("one", "one", "base"): (),
    ("one", "fsdp", "first"): pytest.mark.slow,
    ("zero1", "tp-pp", "first"): pytest.mark.slow,
    ("pp", "tp", "base"): pytest.mark.slow,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "resumed", "reference"),
    [pytest.param(*case, marks=marks) for case, marks in _BEGUN.items()],
)
def test_a_training_that_begins_from_adapters_compares_with_their_first_values(
    folder: str, tmp_path: Path, layout: str, resumed: str, reference: str
) -> None:
    """Also after a resume on another layout, whose checkpoint holds the first values."""
    losses, _ = train_alone(reference)
    save_adapters(adapted_llama(zero=False), tmp_path / "adapter")
    import_(str(tmp_path / "adapter"), str(tmp_path / "begun.ckpt"), base=folder)
    kind, start, own = (
        "adapters" if reference == "first" else "base",
        str(tmp_path / "begun.ckpt"),
        [],
    )
    for name, steps in ((layout, 2), (resumed, len(losses))):
        world, data, options = LAYOUTS[name]
        body = partial(train_from_adapters, steps=steps, data=data)
        ranks = run_ranks(world, body, folder, "llama", kind, start, options, timeout_s=150)
        count = len(ranks[0][0])
        own += [sum(rank[0][step] for rank in ranks) / world for step in range(count)]
        start = ranks[0][1]
    assert own == pytest.approx(losses, rel=2e-6)
    assert (own[0] == pytest.approx(math.log(2), rel=1e-6)) == (reference == "first")


DIVERGENCES: Mapping[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "reverse": {"kind": "reverse", "temperature": 2.0},
    "top_k": {"kind": "top_k", "k": 8, "label_weight": 0.3},
    "jsd": {"kind": "jsd", "beta": 0.3, "temperature": 2.0},
}
_DISTILLED = [
    (student, kind, layout)
    for student in ("gpt", "llama")
    for kind in DIVERGENCES
    for layout in LAYOUTS
    if (student, layout) != ("llama", "cp")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "kind", "layout"),
    [
        pytest.param(
            *case,
            marks=()
            if case in [("llama", "forward", "tp"), ("gpt", "top_k", "pp")]
            else pytest.mark.slow,
        )
        for case in _DISTILLED
    ],
)
def test_distillation_equals_torch(padded: str, student: str, kind: str, layout: str) -> None:
    """The teacher is of another family and size, and pads its vocabulary."""
    of_loss = DIVERGENCES[kind]
    losses, norms = distill_alone(of_loss, 144)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(
        world, train_by_distillation, padded, student, of_loss, options, data, timeout_s=150
    )
    own = [sum(rank[0][step] for rank in ranks) / world for step in range(len(losses))]
    # Data ranks have other numbers of trained tokens; their losses are weighed in the gradient.
    assert own == pytest.approx(losses, rel=1e-6 if data == 1 else 0.05)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


def test_logits_of_all_tokens_do_not_exist(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of untouched models are computed in chunks, and equal those of all logits."""
    losses, gradients = [], []
    for chunked in (True, False):
        with monkeypatch.context() as patch:
            if chunked:
                patch.setattr(token_outputs, "token_logits", None)
            else:
                patch.setattr(awaited_losses, "begin_awaiting", lambda *_: None)
            module = DPOModule(HuggingFaceModule(folder), loss="orpo")
            module.configure_model()
            losses.append(module._loss(batches()[0])[0])
            losses[-1].backward()
            gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
