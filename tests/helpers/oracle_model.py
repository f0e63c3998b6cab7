"""megatron-core's recorded runs (``tests/oracles/train_runs.json``): their model, with weights and
data by formula."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.sharding import named_shard_specs

ORACLES = Path(__file__).parent.parent / "oracles"
NUM_STEPS = 4
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 1.0


@lru_cache(maxsize=1)
def runs() -> list[dict[str, Any]]:
    """Return the recorded runs: ``args``, ``world``, ``loss_gradnorm`` of each step, …"""
    recorded: list[dict[str, Any]] = json.loads((ORACLES / "train_runs.json").read_text())["facts"][
        "runs"
    ]
    return recorded


def config_of(args: dict[str, Any]) -> TransformerConfig:
    """Return the configuration of a recorded run; ``moe`` there is the number of experts."""
    experts = (
        MoEConfig(
            num_experts=args["moe"],
            router_topk=args["topk"],
            aux_loss_coeff=args["aux"],
            z_loss_coeff=args["z"] or None,
            token_dispatcher_type=args["disp"],
        )
        if args["moe"]
        else None
    )
    return TransformerConfig(
        num_layers=args["layers"],
        hidden_size=args["hidden"],
        num_attention_heads=args["heads"],
        num_query_groups=args["groups"],
        ffn_hidden_size=args["ffn"],
        vocab_size=args["vocab"],
        max_sequence_length=args["seq"],
        share_embeddings_and_output_weights=args["tie"],
        moe=experts,
    )


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the whole initial value of the parameter with this global name: norms one, the rest by
    formula."""
    if "layernorm" in name:
        return torch.ones(shape)
    if ".experts." in name:  # stacked here, recorded one by one
        return torch.stack([_draw(expert_name(name, e), shape[1:]) for e in range(shape[0])])
    return _draw(name, shape)


def expert_name(name: str, expert: int, parent: str = "experts") -> str:
    """Return the recorded name of one expert's part of a stacked parameter."""
    return name.replace(".mlp.experts.", f".mlp.experts.{parent}.{expert}.")


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    h = int(hashlib.md5(name.encode()).hexdigest()[:8], 16) % 10007
    k = np.arange(int(np.prod(shape)), dtype=np.float64)
    values = 0.05 * np.sin(k * 0.7391 + h) * np.cos(k * 0.0137 + 0.1 * h)
    return torch.from_numpy(values.astype(np.float32)).view(shape)


def fill_model(model: nn.Module) -> None:
    """Give this rank's part of a ``GPTModel`` its recorded initial values."""
    specs = named_shard_specs(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = specs[name]
            parameter.copy_(spec.shard(fill(spec.tied_to or name, spec.global_shape)))


def build(args: dict[str, Any]) -> GPTModel:
    """Return the whole model of a run, filled."""
    model = GPTModel(config_of(args))
    fill_model(model)
    return model


def data(
    args: dict[str, Any], step: int, micro_batch: int, *, dp_rank: int = 0, dp_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [mbs, s] of one micro-batch of one data-parallel rank."""
    first = step * args["gbs"] + (micro_batch * dp_size + dp_rank) * args["mbs"]
    i = torch.arange(args["seq"] + 1)
    samples = [
        (i * i * 7 + s * 31 + i * (s % 5 + 1)) % args["vocab"]
        for s in range(first, first + args["mbs"])
    ]
    batch = torch.stack(samples)
    return batch[:, :-1], batch[:, 1:]
