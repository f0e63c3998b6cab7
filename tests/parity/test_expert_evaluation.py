"""Evaluation and generation of models with experts equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import ExpertLoadMonitor
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, SP, TP, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

VOCABULARY, SEQUENCE, SAMPLES = 30, 8, 12
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {EP: 2}),
    "tp2-ep2-etp1": (2, {TP: 2, EP: 2, ETP: 1}),
    "tp2 without sp": (2, {TP: 2, SP: False}),
    "ep2-cp2": (2, {EP: 2, CP: 2}),
    "ep2-tp2": (4, {EP: 2, TP: 2}),
    "ep2-tp2 without sp": (4, {EP: 2, TP: 2, ETP: 1, SP: False}),
    "ep2-pp2": (4, {EP: 2, PP: 2, MICRO: 1}),
    "ep2-etp2": (4, {EP: 2, ETP: 2}),
    "ep2-fsdp": (4, {EP: 2, "data_parallel": "fsdp"}),
}


class _Module(GPTLightningModule):
    """Returns logits with the numbers of the samples."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return batch["id"], self(batch["tokens"])


def _config(dispatcher: str) -> TransformerConfig:
    return tiny_config(
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        init_method_std=0.3,
        ffn_hidden_size=48,
        moe=MoEConfig(
            num_experts=4,
            router_topk=2,
            aux_loss_coeff=0.02,
            input_jitter_eps=0.1,
            shared_expert_intermediate_size=24,
            shared_expert_gate=True,
            token_dispatcher_type=dispatcher,
        ),
    )


def _samples() -> Any:
    """Return rows of which some tokens do not count."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
    mask = (torch.rand(SAMPLES, SEQUENCE, generator=generator) < 0.7).float()
    return [
        {"tokens": row[:-1], "labels": row[1:], "loss_mask": mask[i], "id": torch.tensor(i)}
        for i, row in enumerate(text)
    ]


def _evaluate(dispatcher: str, options: dict[str, Any] | None, batch_size: int) -> Any:
    """Return the losses and the tokens of every expert, of validation and test, and logits by
    sample."""
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    run = trainer(strategy, callbacks=[ExpertLoadMonitor()])
    module = _Module(_config(dispatcher))
    loader = DataLoader(_samples(), batch_size=batch_size)
    [validated] = run.validate(module, loader, verbose=False)
    [tested] = run.test(module, loader, verbose=False)
    predicted = run.predict(module, loader)
    logits = {
        int(number): rows.numpy()
        for numbers, batch in predicted or []
        for number, rows in zip(numbers, batch, strict=True)
    }
    numbers = [
        value
        for metrics in (validated, tested)
        for name, value in sorted(metrics.items())
        if name.endswith("_loss") or "tokens_per_expert" in name
    ]
    return numbers, logits


def _evaluate_all(dispatcher: str, cases: list[Any]) -> list[Any]:
    return [_evaluate(dispatcher, *case) for case in cases]


@cache
def _one(dispatcher: str) -> Any:
    return run_ranks(1, _evaluate, dispatcher, None, 8)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_equals_one_process(world: int, dispatcher: str) -> None:
    """Losses over all unmasked tokens, and logits; fp32, sums in another order: 1e-5. The last
    batches are smaller than the others.
    """
    cases = {name: options for name, (size, options) in LAYOUTS.items() if size == world}
    arguments = []
    for options in cases.values():
        sizes = options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1)
        arguments.append((options, 8 * sizes // world))
    ranks = run_ranks(world, _evaluate_all, dispatcher, arguments)
    losses, logits = _one(dispatcher)
    assert len(logits) == SAMPLES
    for index, name in enumerate(cases):
        for rank in ranks:
            assert rank[index][0] == pytest.approx(losses, rel=1e-5), name
        found = {number: row for rank in ranks for number, row in rank[index][1].items()}
        assert found.keys() == logits.keys(), name
        for number, row in found.items():
            assert row == pytest.approx(logits[number], rel=1e-5, abs=1e-5), name
