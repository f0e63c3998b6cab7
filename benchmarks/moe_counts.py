"""Bytes that a layer of experts sends and keeps, counted on real ranks and compared with theory.

In fp32, per rank and step (forward and backward), with r rows that its tokens are routed to, n rows
that its experts receive, E experts, h hidden and f width (SwiGLU):

    handed to the network   alltoall  2 (r + n) h 4 + 8 E      rows to their experts and back, and
                                                               their gradients; numbers of rows
    live at the peak        M + n (6 f + h + 2) 4              M: what does not depend on n. Of a
                                                               received row are kept input, gate
                                                               and up, activation, and its place
                                                               (8 bytes); in backward come the
                                                               gradients of activation, gate and up

The peak holds where f is well above h, as in Mixtral. Choices are made up, so that a share of all
tokens goes to one expert of rank 0, as first choice.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.live_bytes import NetworkBytes
from benchmarks.ranks import run
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize

PEAK_TOLERANCE = 0.01
NUM_RANKS = 2
SHARES = (0.0, 0.5, 0.9)
"""Shares of the tokens that choose the same expert."""


class Counted(NamedTuple):
    """Counts of one rank in one forward and backward."""

    routed: int
    """Rows of its tokens."""
    received: int
    """Rows that its experts compute."""
    sent_bytes: int
    """Bytes handed to the network."""
    peak_bytes: int
    """Most bytes of live tensors at once."""


def expected_sent_bytes(found: Counted, config: TransformerConfig) -> int:
    """Return the bytes that a rank hands to the network."""
    rows = 2 * (found.routed + found.received) * config.hidden_size * 4
    return rows + 8 * _moe(config).num_experts


def expected_peak_bytes(found: Counted, balanced: Counted, config: TransformerConfig) -> int:
    """Return the peak of a rank whose experts receive other rows than in ``balanced``."""
    row = 4 * (6 * config.expert_ffn_size + config.hidden_size + 2)
    return balanced.peak_bytes + (found.received - balanced.received) * row


def count(config: TransformerConfig, num_tokens: int) -> dict[float, list[Counted]]:
    """Run forward and backward of one layer on two ranks; return every rank's counts by the share
    of the tokens that choose the same expert.
    """
    ranks = run(NUM_RANKS, _count_all, replace(config, num_layers=1), num_tokens, limit_s=300.0)
    return {share: [rank[index] for rank in ranks] for index, share in enumerate(SHARES)}


def choices(num_tokens: int, moe: MoEConfig, share: float) -> Tensor:
    """Return experts [t, k] that are used equally, but for a share of the tokens, whose first
    choice is expert 0.
    """
    places = torch.arange(num_tokens * moe.router_topk).view(num_tokens, -1)
    chosen = places % moe.num_experts
    crowd = int(share * num_tokens)
    # Their other choices are of the experts from 1 on.
    chosen[:crowd] = 1 + places[:crowd] % (moe.num_experts - 1)
    chosen[:crowd, 0] = 0
    return chosen


def _moe(config: TransformerConfig) -> MoEConfig:
    if config.moe is None:
        raise ValueError("the configuration has no experts")
    return config.moe


def _count_all(config: TransformerConfig, num_tokens: int) -> list[Counted]:
    context = ParallelContext(ParallelLayout(expert_model_parallel_size=NUM_RANKS))
    model = GPTModel(config)
    parallelize(model, context, model.sharding_plan())
    layer: Any = model.decoder.layers["0"].mlp
    _count(layer, config, num_tokens, 0.0)
    gc.collect()
    return [_count(layer, config, num_tokens, share) for share in SHARES]


def _count(layer: MoELayer, config: TransformerConfig, num_tokens: int, share: float) -> Counted:
    received: list[int] = []
    layer.router.choose = lambda scores, moe: choices(len(scores), moe, share)
    handle = layer.experts.register_forward_pre_hook(
        lambda _, inputs: received.append(len(inputs[0]))
    )
    layer.zero_grad()
    tokens = torch.randn(num_tokens, 1, config.hidden_size, requires_grad=True)
    with NetworkBytes() as watch:
        watch.see(tokens, *layer.parameters())
        layer(tokens).backward(torch.ones_like(tokens))
    handle.remove()
    routed = num_tokens * _moe(config).router_topk
    return Counted(routed, received[0], sum(watch.sent.values()), watch.peak_bytes)
