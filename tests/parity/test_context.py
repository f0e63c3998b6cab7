"""Training on ranks that share each sequence equals training on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import ContextOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, MICRO, PP, TP, VPP, fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 4, 16, 30
MIXED = ContextOptions(cp_comm_type=["p2p", "a2a", "all_gather", "a2a"])
LEVELS = ContextOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])
MIXED_LEVELS = ContextOptions(
    cp_comm_type=["a2a+p2p", "p2p", "all_gather", "a2a+p2p"],
    hierarchical_context_parallel_sizes=[2, 2],
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {CP: 2}),
    "cp4": (4, {CP: 4}),
    "cp2-gather": (2, {CP: 2, "context_options": ContextOptions(cp_comm_type="all_gather")}),
    "cp2-a2a": (2, {CP: 2, "context_options": ContextOptions(cp_comm_type="a2a")}),
    "cp2-tp2-a2a": (4, {CP: 2, TP: 2, "context_options": ContextOptions(cp_comm_type="a2a")}),
    "cp2-pp2-gather": (
        4,
        {CP: 2, PP: 2, MICRO: 1, "context_options": ContextOptions(cp_comm_type="all_gather")},
    ),
    "cp4-levels": (4, {CP: 4, "context_options": LEVELS}),
    "cp4-tp2-levels": (8, {CP: 4, TP: 2, "context_options": LEVELS}),
    "cp4-pp2-levels": (8, {CP: 4, PP: 2, MICRO: 1, "context_options": LEVELS}),
    "cp2-mixed": (2, {CP: 2, "context_options": MIXED}),
    "cp4-mixed": (4, {CP: 4, "context_options": MIXED_LEVELS}),
    "cp2-pp2-mixed": (4, {CP: 2, PP: 2, MICRO: 1, "context_options": MIXED}),
    "cp2-pp2-vpp2-mixed": (4, {CP: 2, PP: 2, VPP: 2, MICRO: 1, "context_options": MIXED}),
    "cp2-micro": (2, {CP: 2, MICRO: 1}),
    "cp2-dp2": (4, {CP: 2}),
    "cp2-ddp2": (4, {CP: 2, "data_parallel": "ddp"}),
    "cp2-fsdp2": (4, {CP: 2, "data_parallel": "fsdp"}),
    "cp2-tp2": (4, {CP: 2, TP: 2}),
    "cp2-tp2-no-sp": (4, {CP: 2, TP: 2, "sequence_parallel": False}),
    "cp2-pp2": (4, {CP: 2, PP: 2, MICRO: 1}),
    "cp2-pp2-vpp2": (4, {CP: 2, PP: 2, VPP: 2, MICRO: 1}),
    "cp2-pp2-zb-h1": (4, {CP: 2, PP: 2, MICRO: 1, "pipeline_schedule": "zb-h1"}),
    "cp2-tp2-pp2": (8, {CP: 2, TP: 2, PP: 2, MICRO: 1}),
    "cp2-recompute": (2, {CP: 2, "recompute": RECOMPUTE["uniform"]}),
    "cp2-pp2-recompute": (
        4,
        {CP: 2, PP: 2, MICRO: 1, "pipeline_schedule": "zb-h1", "recompute": RECOMPUTE["selective"]},
    ),
    "cp8": (8, {CP: 8}),
}
MODELS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_query_groups": 2},
    "window": {
        "window_size": (5, 0), "window_attn_skip_freq": 2, "window_rotary_base": 300.0,
        "no_rope_freq": [0, 0, 0, 1],
    },
    "caps and sinks": {
        "attn_logit_softcapping": 1.5, "softmax_type": "learnable", "window_size": (5, 0),
        "window_attn_skip_freq": 2, "window_rotary_base": 300.0, "no_rope_freq": [0, 0, 0, 1],
        "final_logit_softcapping": 2.0, "init_method_std": 0.5,
    },
    "learned": {"position_embedding_type": "learned_absolute"},
}  # fmt: skip
SPREAD = {
    "mha": ["cp2", "cp2-pp2", "cp4-mixed"],
    "gqa": [
        "cp4",
        "cp2-tp2",
        "cp2-a2a",
        "cp2-gather",
        "cp2-recompute",
        "cp4-levels",
        "cp2-pp2-vpp2-mixed",
    ],
    "caps and sinks": ["cp2-a2a", "cp2-gather"],  # of the usual run: the middle
    "window": ["cp2"],
    "learned": ["cp2-dp2"],
}


def _config(model: str) -> TransformerConfig:
    return tiny_config(
        num_layers=4,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        **{"init_method_std": 0.1} | MODELS[model],
    )


def _rows(masked: bool) -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:].clone()} for t in text]
    if masked:
        for number, row in enumerate(rows):
            row["labels"][number % 5 :: 3] = -100
    return rows


def _train(model: str, masked: bool, options: dict[str, Any] | None, replicas: int) -> Any:
    loader = DataLoader(_rows(masked), batch_size=BATCH // replicas)
    # AdamW amplifies the last bits of small gradients in the first steps: at 1e-2 to 2e-5.
    module = GPTLightningModule(_config(model), learning_rate=1e-3)
    run = fit(options, module, loader, loader, steps=STEPS, val_check_interval=STEPS)
    logged = {name: run.logged[name] for name in ("train_loss", "val_loss")}
    return run.losses, run.norms, logged


def _train_all(model: str, masked: bool, cases: list[Any]) -> list[Any]:
    return [_train(model, masked, *case) for case in cases]


@cache
def _one(model: str, masked: bool) -> Any:
    return run_ranks(1, _train, model, masked, None, 1)[0]


def _cases() -> list[Any]:
    spread = [(name, layouts, name != "gqa", ()) for name, layouts in SPREAD.items()]
    everything = [
        (name, list(LAYOUTS), masked, pytest.mark.slow)
        for name in MODELS
        for masked in (False, True)
    ]
    return [
        pytest.param(
            name,
            layouts,
            masked,
            id=f"{name}{'-masked' if masked else ''}{'-all' if marks else ''}",
            marks=marks,
        )
        for name, layouts, masked, marks in (*spread, *everything)
    ]


@pytest.mark.spread(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "layouts", "masked"), _cases())
def test_training_equals_one_process(model: str, layouts: list[str], masked: bool) -> None:
    """Losses, gradient norms and logged means; fp32, sums in another order: 1e-5."""
    losses, norms, logged = _one(model, masked)
    for world in (2, 4, 8):
        chosen = [name for name in layouts if LAYOUTS[name][0] == world]
        cases = []
        for name in chosen:
            options = LAYOUTS[name][1]
            size = options.get(TP, 1) * options.get(PP, 1) * options[CP]
            cases.append((options, world // size))
        ranks = run_ranks(world, _train_all, model, masked, cases, timeout_s=380) if cases else []
        for index, name in enumerate(chosen):
            replicas = cases[index][1]
            for rank in ranks:
                found = rank[index]
                assert found[1] == pytest.approx(norms, rel=1e-5), name
                if replicas == 1:
                    assert found[0] == pytest.approx(losses, rel=1e-5), name
                    assert found[2] == pytest.approx(logged, rel=1e-5), name
                else:
                    assert found[2]["val_loss"] == pytest.approx(logged["val_loss"], rel=1e-5), name


def _part(options: dict[str, Any] | None, steps: int, start: str | None, end: str) -> list[float]:
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=steps, callbacks=[record])
    module = GPTLightningModule(_config("gqa"), learning_rate=1e-3)
    fit.fit(module, DataLoader(_rows(masked=True), batch_size=BATCH), ckpt_path=start)
    fit.save_checkpoint(end)
    return record.losses


@pytest.mark.slow  # test_resume has other layouts; these ranks hold whole parameters
def test_a_checkpoint_resumes_on_another_layout(tmp_path: Path) -> None:
    expected = run_ranks(1, _part, None, STEPS, None, str(tmp_path / "whole.ckpt"))[0]
    middle, last = str(tmp_path / "middle.ckpt"), str(tmp_path / "last.ckpt")
    first = run_ranks(2, _part, {CP: 2}, 2, None, middle)[0]
    then = run_ranks(2, _part, {TP: 2}, 3, middle, last)[0]
    back = run_ranks(4, _part, {CP: 2, TP: 2}, STEPS, last, str(tmp_path / "end.ckpt"))[0]
    assert [*first, *then, *back] == pytest.approx(expected, rel=1e-5)
