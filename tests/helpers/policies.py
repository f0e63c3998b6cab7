"""Rows of a policy, and training on them on any layout and by plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig, PipelineOptions
from megatron_lightning.layers.losses.policy_loss import PolicyLoss
from megatron_lightning.modules import GPTLightningModule, PolicyModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import VOCABULARY, adapted_llama, llama
from tests.helpers.layouts import tiny_config
from tests.helpers.preferences import SGDOptions, template
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, LENGTH, PROMPT = 6, 8, 16, 4
EXPERTS = tiny_config(vocab_size=VOCABULARY, moe=MoEConfig(num_experts=4))
CASES: Mapping[str, dict[str, Any]] = {
    "dapo": {
        "temperature": 0.7,
        "top_entropy_quantile": 0.6,
        "importance_sampling_correction": "token_mask",
        "importance_sampling_clip_max": 1.2,
    },
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "temperature": 0.8,
        "beta": 0.5,
        "importance_sampling_correction": "sequence_truncate",
        "importance_sampling_clip_max": 1.2,
    },
    "vespo": {"loss_type": "vespo", "mask_truncated_completions": True},
    "adapters": {"loss_type": "dr_grpo", "max_completion_length": 3, "beta": 0.5},
}


def make_rows() -> list[dict[str, Tensor]]:
    """Return rows of uneven lengths, some with a tool's tokens in the middle, one without an
    answer, and scores beside those of the model."""
    draws = torch.Generator().manual_seed(3)
    rows = []
    for number in range(STEPS * BATCH):
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=draws)
        labels = tokens[1:].clone()
        labels[: PROMPT - 1] = labels[PROMPT + number * 5 % 11 :] = -100
        if number % 3 == 0:
            labels[5:7] = -100
        if number % BATCH == 2:
            labels[:] = -100
        noise = 0.3 * torch.randn((2, LENGTH), generator=draws)
        old, given = noise - 4.9
        rows.append(
            {
                "tokens": tokens[:-1],
                "labels": labels,
                "old_logprobs": old,
                "logprobs": given,
                "advantages": torch.randn((), generator=draws),
                "truncated": torch.tensor(number % 5 == 0),
            }
        )
    return rows


ROWS = make_rows()


class Policy(SGDOptions, PolicyModule):
    """A policy by SGD, which does not hide the scale of a loss as Adam does."""


def make_policy(case: str, kind: str, folder: str) -> Policy:
    """Return a policy: "gpt" or "llama" from the same folder, or a "moe" with experts."""
    if kind == "moe":
        return Policy(GPTLightningModule(EXPERTS), **CASES[case])
    return Policy(template(kind, folder, adapters=case == "adapters"), **CASES[case])


def train_policy(
    folder: str, case: str, kind: str, options: dict[str, Any] | None, data: int, runs: int = 1
) -> tuple[list[float], list[float], dict[str, float]]:
    """Train on the ranks of this process's group; return losses, norms and metrics. ``runs``:
    batches of an update."""
    record = Losses()
    explicit = {"pipeline_options": PipelineOptions(explicit_steps=True)}
    strategy: Any = "auto" if options is None else MegatronStrategy(**{**explicit, **options})
    fit = trainer(
        strategy,
        max_steps=STEPS,
        callbacks=[record],
        accumulate_grad_batches=runs,
        # The powers of vespo amplify the last digits of fp32.
        precision="64-true" if case == "vespo" else "32-true",
    )
    rows: Any = ROWS
    loader = DataLoader(rows, batch_size=BATCH // data // runs)
    fit.fit(make_policy(case, kind, folder), loader)
    return record.losses, record.norms, {k: float(v) for k, v in fit.callback_metrics.items()}


def policy_alone(case: str) -> tuple[list[float], list[float]]:
    """Train a Llama with torch alone: losses and norms."""
    options = dict(CASES[case])
    policy = adapted_llama(zero=True) if case == "adapters" else llama()
    reference, trained = llama(), [p for p in policy.parameters() if p.requires_grad]
    temperature, share = options.pop("temperature", 1.0), options.pop("top_entropy_quantile", 1.0)
    masks = options.pop("mask_truncated_completions", False)
    loss, optimizer = PolicyLoss(**options), torch.optim.SGD(trained, lr=0.05)
    losses, norms = [], []
    for at in range(0, len(ROWS), BATCH):
        batch = {
            name: torch.stack([row[name] for row in ROWS[at : at + BATCH]]) for name in ROWS[0]
        }
        labels = batch["labels"]
        if masks:
            labels = labels.masked_fill(batch["truncated"][:, None], -100)
        mask = batch["mask"] = labels != -100
        log_p = (policy(batch["tokens"]).logits / temperature).log_softmax(-1)
        index = labels.clamp(min=0)[..., None]
        with torch.no_grad():
            before = (reference(batch["tokens"]).logits / temperature).log_softmax(-1)
            batch["ref_logprobs"] = before.gather(-1, index)[..., 0]
            entropies = -(log_p.exp() * log_p).sum(-1)
            if share < 1:
                batch["trains"] = entropies >= torch.quantile(entropies[mask], 1 - share)
        total, weight = loss(log_p.gather(-1, index)[..., 0], batch)
        optimizer.zero_grad()
        (total / weight).backward()
        losses.append((total / weight).item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained]).item())
        optimizer.step()
    return losses, norms
