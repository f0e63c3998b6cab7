"""Every kind of optimizer on every kind of layout trains as on one device, clipping included.

The optimizers of one layout run one after another in the same processes. fp32, 1e-5 relative: sums
over ranks and micro-batches are taken in another order. Muon orthogonalises in bf16
(``tests/distributed/test_muon.py``), which moves a loss by 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer, RMSprop
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.layouts import fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer


class _Normalized(SGD):
    """A step by the norm of all gradients of a group, where the group asks for it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if group["normalized"] and moved:
                norm = torch.stack([p.grad.norm() for p in moved]).norm()
                for p in moved:
                    p.grad.div_(norm)
        super().step()
        return loss


STEPS, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 3, 8, 16, 50
CONFIG = tiny_config(hidden_size=16, num_query_groups=2, ffn_hidden_size=24, vocab_size=VOCABULARY)


def _muon(model: nn.Module) -> Optimizer:
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    matrices = [p for name, p in named if p.dim() == 2 and "decoder" in name]
    others = [p for name, p in named if not (p.dim() == 2 and "decoder" in name)]
    return ChainedOptimizer(Muon(matrices, lr=0.02), AdamW(others, lr=3e-3))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    norms = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": norms, "weight_decay": 0.0, "lr": 1e-3},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw-fused": lambda model: AdamW(_groups(model), lr=3e-3, fused=True),
    "adamw-foreach": lambda model: AdamW(_groups(model), lr=3e-3, foreach=True, amsgrad=True),
    "sgd": lambda model: SGD(_groups(model), lr=0.1, momentum=0.9),
    "rmsprop": lambda model: RMSprop(_groups(model), lr=1e-3, centered=True),
    "adagrad": lambda model: Adagrad(_groups(model), lr=1e-2),
    "muon": _muon,
}


class _Module(GPTLightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__(CONFIG)
        self.kind = optimizer

    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        return OPTIMIZERS[self.kind](self)


def _samples() -> list[dict[str, Tensor]]:
    text = torch.randint(
        0,
        VOCABULARY,
        (STEPS * GLOBAL_BATCH, SEQUENCE + 1),
        generator=torch.Generator().manual_seed(3),
    )
    return [{"tokens": t[:-1], "labels": t[1:]} for t in text]


def _train(options: dict[str, Any], num_replicas: int, twice: bool) -> dict[str, list[list[float]]]:
    results = {}
    for name in OPTIMIZERS:
        for attempt in range(2 if twice and name in ("adamw-fused", "muon") else 1):
            loader = DataLoader(_samples(), batch_size=GLOBAL_BATCH // num_replicas)
            run = fit(options, _Module(name), loader, steps=STEPS, gradient_clip_val=0.5)
            assert attempt == 0 or results[name] == [run.losses, run.norms]  # to the bit
            results[name] = [run.losses, run.norms]
    return results


TP, PP, SP, MODE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "data_parallel",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {TP: 2, "micro_batch_size": 2}, id="tp2-sp"),
        pytest.param(4, {TP: 2, "micro_batch_size": 2}, id="tp2-sp-dp2-zero1"),
        pytest.param(4, {PP: 2, "micro_batch_size": 2}, id="pp2-dp2-zero1"),
        pytest.param(2, {MODE: "ddp"}, id="dp2-ddp"),
        pytest.param(2, {TP: 2, SP: False}, id="tp2"),
        pytest.param(4, {TP: 2, SP: False, MODE: "ddp"}, id="tp2-dp2-ddp"),
        pytest.param(4, {PP: 2, MODE: "ddp", "micro_batch_size": 1}, id="pp2-dp2-ddp"),
        pytest.param(4, {}, id="dp4-zero1"),
        pytest.param(
            8,
            {TP: 2, PP: 2, "micro_batch_size": 1},
            id="tp2-sp-pp2-dp2-zero1",
        ),
    ],
)
def test_optimizers_equal_one_device(ranks: int, options: dict[str, Any]) -> None:
    replicas = ranks // (options.get(TP, 1) * options.get(PP, 1))
    expected = run_ranks(1, _train, {}, 1, False)[0]
    for result in run_ranks(ranks, _train, options, replicas, TP in options, timeout_s=100):
        for name, (losses, norms) in result.items():
            tolerance = 1e-3 if name == "muon" else 1e-5
            assert norms == pytest.approx(expected[name][1], rel=tolerance), name
            if replicas == 1:
                assert losses == pytest.approx(expected[name][0], rel=tolerance), name


class _NormalizedHead(_Module):
    """One group of an optimizer reads its norm: that of the head, which one pipeline rank has."""

    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        head = [p for name, p in self.named_parameters() if "output_layer" in name]
        others = [p for name, p in self.named_parameters() if "output_layer" not in name]
        groups = [{"params": head, "normalized": True}, {"params": others, "normalized": False}]
        optimizer = _Normalized([{"params": []}], lr=0.1)
        optimizer.param_groups.clear()
        for group in groups:
            optimizer.add_param_group(group)
        return optimizer


def _refusal(options: dict[str, Any]) -> tuple[str, int]:
    fit = trainer(MegatronStrategy(**options), max_steps=1)
    try:
        fit.fit(_NormalizedHead(""), DataLoader(_samples(), batch_size=GLOBAL_BATCH))
    except ConfigError as error:
        return str(error), fit.global_step
    return "it trained", fit.global_step


def test_all_ranks_refuse_what_one_pipeline_rank_finds() -> None:
    first, *others = run_ranks(2, _refusal, {PP: 2, "micro_batch_size": 2})
    assert first[0].startswith("_Normalized reads statistics of all parameters of a group, and pip")
    assert [first] * len(others) == others and first[1] == 0
