"""Pairs of answers, and training by them on any layout and by plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_lightning.modules import (
    DistillationModule,
    DPOModule,
    GPTLightningModule,
    HuggingFaceModule,
)
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import CONFIG, VOCABULARY, adapted_llama, llama
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, LENGTH = 3, 4, 16
RATE = 0.05


def make_pairs(count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Return samples with answers of various lengths behind a common prompt."""
    draws = torch.Generator().manual_seed(3)
    samples = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=draws)
        tokens[1, :5] = tokens[0, :5]
        sample: dict[str, Tensor] = {"pair": torch.tensor(number)}
        for side, row in zip(("chosen", "rejected"), tokens, strict=True):
            end = 9 + (number * 3 + len(side)) % 8
            labels = row[1:].clone()
            labels[:4] = labels[end:] = -100
            sample |= {side: row[:-1].clone(), f"{side}_labels": labels}
        samples.append(sample)
    return samples


PAIRS = make_pairs()


def log_probs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [b, 2] and numbers of tokens of the answers, by torch alone."""
    sums, counts = [], []
    for side in ("chosen", "rejected"):
        labels = batch[f"{side}_labels"]
        picked = model(batch[side]).logits.log_softmax(-1)
        picked = picked.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        sums.append((picked * (labels != -100)).sum(-1))
        counts.append((labels != -100).sum(-1))
    return torch.stack(sums, 1), torch.stack(counts, 1)


def batches() -> list[dict[str, Tensor]]:
    """Return the batches of the training on one process."""
    return [
        {name: torch.stack([sample[name] for sample in chunk]) for name in chunk[0]}
        for chunk in (PAIRS[at : at + BATCH] for at in range(0, len(PAIRS), BATCH))
    ]


def train_alone(kind: str) -> tuple[list[float], list[float]]:
    """Train a Llama by DPO with torch alone: losses and norms. ``kind``: "full", "adapters", or of
    filled adapters "first" (with the reference at their first values) or "base" (without them)."""
    pairs: dict[str, Any] = {
        "full": (llama, llama),
        "adapters": (lambda: adapted_llama(zero=True), llama),
        "first": (lambda: adapted_llama(zero=False), lambda: adapted_llama(zero=False)),
        "base": (lambda: adapted_llama(zero=False), llama),
    }
    policy, reference = (make() for make in pairs[kind])
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    losses, norms = [], []
    for batch in batches():
        with torch.no_grad():
            before, _ = log_probs(reference, batch)
        ratios = log_probs(policy, batch)[0] - before
        loss = -F.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained]).item())
        optimizer.step()
    return losses, norms


class SGDOptions:
    """Mix-in: SGD in the place of AdamW, which would amplify rounding."""

    def configure_optimizers(self: Any) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD([{"params": trained}], lr=RATE)


class Preferred(SGDOptions, DPOModule):
    """DPO by SGD."""


class Distilled(SGDOptions, DistillationModule):
    """Distillation by SGD."""


def template(kind: str, folder: str, *, adapters: bool) -> Any:
    """Return the module of a model: "gpt" or "llama", both from the same folder."""
    peft = LoRA() if adapters else None
    if kind == "gpt":
        return GPTLightningModule(CONFIG, init_from_hf=folder, peft=peft)
    return HuggingFaceModule(folder, peft=peft)


def scored() -> list[dict[str, Tensor]]:
    """Return the pairs with scores of the reference."""
    model = llama()
    with torch.no_grad():
        scores = [log_probs(model, {k: v[None] for k, v in pair.items()})[0][0] for pair in PAIRS]
    return [{**pair, "scores": own} for pair, own in zip(PAIRS, scores, strict=True)]


def train_by_distillation(
    folder: str, kind: str, of_loss: dict[str, Any], options: dict[str, Any] | None, data: int
) -> tuple[list[float], list[float]]:
    """Train a student by a teacher of another size; return losses and norms."""
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=STEPS, callbacks=[record])
    student = template(kind, folder, adapters=False)
    module = Distilled(student, HuggingFaceModule(f"{folder}/teacher"), **of_loss)
    rows: Any = [{"tokens": pair["chosen"], "labels": pair["chosen_labels"]} for pair in PAIRS]
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data))
    return record.losses, record.norms


def train_by_preferences(
    folder: str, kind: str, reference: str, options: dict[str, Any] | None, data: int
) -> tuple[list[float], list[float], dict[str, float]]:
    """Train on the ranks of this process's group; return losses, norms and metrics."""
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=STEPS, callbacks=[record])
    module = Preferred(
        template(kind, folder, adapters=reference == "adapters"), reference=reference
    )
    rows: Any = scored() if reference == "scores" else PAIRS
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data))
    return record.losses, record.norms, {k: float(v) for k, v in fit.callback_metrics.items()}


def train_from_adapters(
    folder: str,
    kind: str,
    reference: str,
    start: str,
    options: dict[str, Any],
    *,
    steps: int = STEPS,
    data: int = 1,
) -> tuple[list[float], str]:
    """Train from a checkpoint with adapters; return losses and the path of a new checkpoint."""
    record = Losses()
    fit = trainer(MegatronStrategy(**options), max_steps=steps, callbacks=[record])
    module = Preferred(template(kind, folder, adapters=True), reference=reference)
    rows: Any = PAIRS
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data), ckpt_path=start)
    path = f"{folder}/{reference}-{steps}.ckpt"
    fit.save_checkpoint(path)
    return record.losses, path


def make_folders(folder: str, *, vocab_size: int = VOCABULARY) -> str:
    """Write a Llama and, inside of its folder, a larger teacher; return the path."""
    llama().save_pretrained(folder)
    teacher(vocab_size).save_pretrained(f"{folder}/teacher")
    return folder


def teacher(vocab_size: int = VOCABULARY) -> Any:
    """Return a model of another family, width and depth; its vocabulary may be padded."""
    torch.manual_seed(5)
    config = Qwen3Config(
        hidden_size=96,
        intermediate_size=128,
        vocab_size=vocab_size,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config)


def divergence_alone(
    student: Tensor, theirs: Tensor, kind: str, temperature: float, k: int
) -> Tensor:
    """Return the divergence of every token by torch's ``kl_div``."""
    log_q = (student / temperature).log_softmax(-1)
    if kind == "top_k":
        values, ids = (theirs / temperature).topk(k, -1)
        out = F.kl_div(
            log_q.gather(-1, ids), values.log_softmax(-1), reduction="none", log_target=True
        )
        return out.sum(-1) * temperature**2
    log_p = (theirs / temperature).log_softmax(-1)
    if kind == "jsd":
        p, q = log_p.exp(), log_q.exp()
        log_m = (0.3 * p + 0.7 * q).log()
        return (0.3 * p * (log_p - log_m) + 0.7 * q * (log_q - log_m)).sum(-1)
    first, second = (log_q, log_p) if kind == "forward" else (log_p, log_q)
    out = F.kl_div(first, second, reduction="none", log_target=True)
    return out.sum(-1) * temperature**2


def distill_alone(
    of_loss: dict[str, Any], vocab_size: int = VOCABULARY
) -> tuple[list[float], list[float]]:
    """Train a Llama by the teacher with torch alone: losses and norms."""
    student, theirs = llama(), teacher(vocab_size)
    optimizer = torch.optim.SGD(student.parameters(), lr=RATE)
    losses, norms = [], []
    for batch in batches():
        labels = batch["chosen_labels"]
        with torch.no_grad():
            given = theirs(batch["chosen"]).logits[..., :VOCABULARY]
        own = student(batch["chosen"]).logits
        weight = of_loss.get("label_weight", 0.0)
        temperature, k = of_loss.get("temperature", 1.0), of_loss.get("k", 64)
        values = divergence_alone(own, given, of_loss["kind"], temperature, k)
        hard = F.cross_entropy(own.flatten(0, 1), labels.flatten(), reduction="none")
        each = (1 - weight) * values + weight * hard.view_as(labels)
        counted = labels != -100
        loss = (each * counted).sum() / counted.sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in student.parameters()]).item())
        optimizer.step()
    return losses, norms
