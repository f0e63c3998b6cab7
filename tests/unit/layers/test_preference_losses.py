"""Losses of preferences and divergences, against trl and torch."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.divergence import (
    divergence,
    jensen_shannon,
    top_divergence,
    top_logits,
)
from megatron_lightning.layers.losses.loss import ALONE, Vocabulary
from megatron_lightning.layers.losses.preference_loss import AnswerScores, PreferenceLoss

BETA, GAMMA = 0.3, 0.7


def _answers() -> tuple[AnswerScores, Tensor]:
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 20, (6, 2), generator=draws).double()
    log_probs = -tokens * torch.rand((6, 2), generator=draws, dtype=torch.float64)
    reference = log_probs + torch.randn((6, 2), generator=draws, dtype=torch.float64)
    return AnswerScores(log_probs.requires_grad_(), tokens), reference


def _of_dpo_trainer(name: str, answers: AnswerScores, reference: Tensor) -> Tensor:
    """Return the mean loss of trl's DPO trainer, whose model returns these log-probabilities."""
    dpo = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError)
    length = int(answers.num_tokens.max())
    counts = answers.num_tokens.t().flatten()
    mask = (torch.arange(length + 1) <= counts[:, None]).long()
    mask[:, 0] = 0  # the first token is never predicted
    sums = answers.log_probs.t().flatten()
    shifted = mask[:, 1:]
    each = shifted * (sums / counts)[:, None]
    model = SimpleNamespace(
        log_probs=each, entropy=each * 0, mean_logits=each * 0, is_top1=shifted.bool()
    )
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, beta=BETA, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[name],
        loss_weights=[1.0], use_weighting=False, aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1],
    }  # fmt: skip
    return dpo.DPOTrainer._compute_loss(trainer, lambda **_: model, inputs, False)


def _of_others(name: str, answers: AnswerScores, _: Tensor) -> Tensor:
    chosen, rejected = answers.means.unbind(1)
    settings: Any = {"beta": BETA, "label_smoothing": 0.0, "alpha": 0.0, "simpo_gamma": GAMMA}
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), loss_type="simpo", **settings
    )
    if name == "simpo":
        cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer", exc_type=ImportError)
        losses, *_ = cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)
        return losses.mean()
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer", exc_type=ImportError)
    # trl computes in fp32 here
    ratio, *_ = orpo.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    return (-chosen - ratio).mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "oracle", "tolerance"),
    [
        ("sigmoid", _of_dpo_trainer, 1e-12),
        ("ipo", _of_dpo_trainer, 1e-12),
        ("simpo", _of_others, 1e-12),
        ("orpo", _of_others, 1e-6),
    ],
)
def test_losses_and_gradients_are_those_of_trl(name: Any, oracle: Any, tolerance: float) -> None:
    pytest.importorskip("trl")
    answers, reference = _answers()
    function = PreferenceLoss(name=name, beta=BETA, gamma=GAMMA)
    ours = function(answers, reference if function.needs_reference else None).mean()
    theirs = oracle(name, answers, reference)
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    gradients = [torch.autograd.grad(loss, answers.log_probs)[0] for loss in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=10 * tolerance, atol=tolerance)


def test_label_smoothing_is_the_loss_of_a_swapped_pair() -> None:
    answers, reference = _answers()
    plain = PreferenceLoss(beta=BETA)(answers, reference)
    swapped = AnswerScores(answers.log_probs.flip(1), answers.num_tokens.flip(1))
    other = PreferenceLoss(beta=BETA)(swapped, reference.flip(1))
    smooth = PreferenceLoss(beta=BETA, label_smoothing=0.2)(answers, reference)
    assert torch.allclose(smooth, 0.8 * plain + 0.2 * other)


def test_orpo_is_finite_for_sure_and_for_impossible_answers() -> None:
    log_probs = torch.tensor([[0.0, -1e4], [-1e-9, -90.0]], requires_grad=True)
    loss = PreferenceLoss(name="orpo")(AnswerScores(log_probs, torch.ones(2, 2))).sum()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "kto"}, "see UnpairedLoss"),
        ({"name": "hinge"}, "must be one of sigmoid, ipo, orpo, simpo"),
        ({"beta": 0.0}, "must be positive"),
        ({"name": "ipo", "label_smoothing": 0.1}, "for the loss sigmoid alone"),
    ],
)
def test_wrong_losses_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreferenceLoss(**options)


@pytest.mark.parametrize("kind", ["forward", "reverse", "top"])
def test_divergences_are_those_of_torch(kind: Any) -> None:
    """Both are computed in fp64; only the order of the sums differs."""
    draws = torch.Generator().manual_seed(1)
    student, teacher = 3 * torch.randn((2, 2, 5, 17), generator=draws, dtype=torch.float64)
    student.requires_grad_()
    vocabulary, temperature = Vocabulary(ALONE, 17), 1.7
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    if kind == "top":
        top = top_logits(teacher, vocabulary, 4)
        ours = top_divergence(student, top, vocabulary, temperature=temperature)
        values, ids = (teacher / temperature).topk(4)
        log_q, log_p = log_q.gather(-1, ids), values.log_softmax(-1)
    else:
        ours = divergence(student, teacher, vocabulary, direction=kind, temperature=temperature)
    first, second = (log_p, log_q) if kind == "reverse" else (log_q, log_p)
    theirs = F.kl_div(first, second, reduction="none", log_target=True).sum(-1) * temperature**2
    assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13)
    weights = torch.rand((2, 5), generator=draws, dtype=torch.float64)
    own, other = (torch.autograd.grad((x * weights).sum(), student)[0] for x in (ours, theirs))
    assert torch.allclose(own, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jensen_shannon_is_that_of_trl(beta: float) -> None:
    """A temperature multiplies nothing, and an entry that the teacher excludes counts 0."""
    source = Path(pytest.importorskip("trl").__file__).parent / "experimental/gkd/gkd_trainer.py"
    [method] = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "generalized_jsd_loss"
    ]
    method.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module(body=[method], type_ignores=[]), str(source), "exec"), scope)
    draws = torch.Generator().manual_seed(1)
    student, teacher = 3 * torch.randn((2, 2, 5, 17), generator=draws, dtype=torch.float64)
    student.requires_grad_()
    vocabulary = Vocabulary(ALONE, 17)
    ours = jensen_shannon(student, teacher, vocabulary, beta=beta, temperature=1.7).sum()
    theirs = scope["generalized_jsd_loss"](
        student, teacher, beta=beta, temperature=1.7, reduction="sum"
    )
    assert torch.allclose(ours, theirs, rtol=1e-12)
    own, other = (torch.autograd.grad(x, student)[0] for x in (ours, theirs))
    assert torch.allclose(own, other, rtol=1e-12, atol=1e-13)
    teacher[..., 3] = float("-inf")
    loss = jensen_shannon(student, teacher, vocabulary, beta=beta).sum()
    assert beta == 1.0 or torch.autograd.grad(loss, student)[0].isfinite().all()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("distance", [1e-2, 1.0, 200.0])
def test_jensen_shannon_in_fp32(beta: float, distance: float) -> None:
    """Close to fp64 for models that agree, and for those far apart."""
    draws = torch.Generator().manual_seed(2)
    teacher, noise = torch.randn((2, 6, 50), generator=draws)
    student = (teacher + distance * noise).requires_grad_()
    out, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        own = student.to(dtype)
        value = jensen_shannon(own, teacher.to(dtype), Vocabulary(ALONE, 50), beta=beta)
        out.append(value.double())
        gradients.append(torch.autograd.grad(value.sum(), student)[0])
    assert torch.allclose(*out, rtol=1e-5, atol=1e-8)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


def test_a_student_like_its_teacher_has_no_divergence() -> None:
    logits = torch.randn(3, 11)
    mixed = jensen_shannon(logits, logits.clone(), Vocabulary(ALONE, 11), beta=0.3)
    assert mixed.abs().max() == 0.0
    for direction in ("forward", "reverse"):
        out = divergence(logits, logits.clone(), Vocabulary(ALONE, 11), direction=direction)  # type: ignore[arg-type]
        assert out.abs().max() < 1e-6
