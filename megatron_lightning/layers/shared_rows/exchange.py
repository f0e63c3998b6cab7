"""Linear attention and convolutions of ``transformers``, by the functions that they call.

Modules of linear attention call a few functions by name, which kernels may replace. Here the names
mean functions of ranks that share rows:

    convolution     a few tokens before each of the rank's segments come from other ranks
    delta rules,    tokens are exchanged for heads, the function runs over full rows for the rank's
    scans           share of the heads, and heads are exchanged for tokens

Shapes: ``b`` batch, ``s`` tokens of a row, ``c`` ranks, ``n`` heads, ``d`` features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.shared_rows.mixers import (
    Arguments,
    SharedMixer,
    SharingRanks,
    full_rows,
)
from megatron_lightning.layers.shared_rows.other_names import globals_of, names_of
from megatron_lightning.layers.state_space.exchange import (
    heads_to_part,
    parts_to_heads,
    repeated_heads,
    share_of,
)
from megatron_lightning.layers.state_space.segments import Segments


def _convolve(  # noqa: PLR0917 (called by transformers)
    ranks: SharingRanks,
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Convolve a rank's tokens x [b, channels, s / c] causally with weights [channels, width]."""
    _settings(others)
    segments, before = Segments(ranks.group, ranks.deal), weight.shape[-1] - 1
    mine = segments.fold(x.permute(2, 0, 1))
    rows = torch.cat([segments.tokens_before(mine, before), mine]) if before else mine
    out = function(rows.permute(1, 2, 0), weight, bias, activation=activation)[..., before:]
    return segments.unfold(out.permute(2, 0, 1)).permute(1, 2, 0)


def _delta_rule(
    ranks: SharingRanks,
    function: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return outputs [b, s / c, n, d] of queries and keys [b, s / c, g, d], values [b, s / c, n,
    d], decays [b, s / c, n] or [b, s / c, n, d], and betas [b, s / c, n].
    """
    settings = _settings(others)
    heads, ratio = value.shape[2], value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(ratio, 2) if ratio > 1 else x for x in (query, key))
    tensors = (query, key, value, g, beta)
    full = _to_heads(tensors, (heads,) * len(tensors), ranks)
    out, _ = function(*full[:3], g=full[3], beta=full[4], **settings)
    return _to_tokens(out, heads, ranks), None


def _scan(  # noqa: PLR0917 (called by transformers)
    ranks: SharingRanks,
    function: Callable[..., Tensor],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Scan of Mamba-2: inputs [b, s / c, n, d], steps [b, s / c, n], and ``b``, ``c`` [b, s / c,
    groups, states]. Groups that the ranks do not divide are repeated.
    """
    settings = _settings(others)
    heads, groups = x.shape[2], b.shape[2]
    copies = lcm(groups, ranks.group.size) // groups
    if heads % (groups * copies):
        copies = heads // groups
    b, c = (repeated_heads(y, groups, copies, 2) for y in (b, c))
    counts = (heads, heads, b.shape[2], b.shape[2])
    x, dt, b, c = _to_heads((x, dt, b, c), counts, ranks)
    own = [None if p is None else share_of(p, ranks.group) for p in (a, D, dt_bias)]
    out = function(x, dt, own[0], b, c, D=own[1], dt_bias=own[2], **settings)
    return _to_tokens(out, heads, ranks)


def _selective_scan(  # noqa: PLR0917 (called by transformers)
    ranks: SharingRanks,
    function: Callable[..., Tensor],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Scan of Mamba-1: inputs, steps and gates [b, channels, s / c], ``b`` and ``c`` [b, states, s
    / c], which all channels share and every rank gets in full.
    """
    settings = _settings(others)
    channels = x.shape[1]
    gates = [] if z is None else [z]
    # Channels are heads of one feature.
    mine = [y.transpose(1, 2) for y in (x, dt, *gates)]
    own = [y.transpose(1, 2) for y in _to_heads(mine, (channels,) * len(mine), ranks)]
    b, c = (full_rows(y, ranks.group, 2, ranks.deal) for y in (b, c))
    of_channels = [None if p is None else share_of(p, ranks.group) for p in (a, D, delta_bias)]
    a_share, d_share, bias = of_channels
    gate = own[2] if gates else None
    out = function(*own[:2], a_share, b, c, D=d_share, z=gate, delta_bias=bias, **settings)
    return _to_tokens(out.transpose(1, 2), channels, ranks).transpose(1, 2)


def _to_heads(tensors: Sequence[Tensor], heads: Sequence[int], ranks: SharingRanks) -> list[Tensor]:
    """Map a rank's tokens [b, s / c, n, ...] of every head to all tokens [b, s, n / c, ...] of the
    rank's heads. A collective.

    Raises:
        ShardingError: If the heads do not divide over the ranks.
    """
    group = ranks.group
    if undivided := [n for n in heads if n % group.size]:
        raise ShardingError(f"{undivided[0]} heads do not divide over {group.size} ranks.")
    parts = parts_to_heads([x.transpose(0, 1).flatten(2) for x in tensors], group, ranks.deal)
    return [
        torch.unflatten(part.transpose(0, 1), 2, (n // group.size, *x.shape[3:])).to(x.dtype)
        if x.dim() > 3
        else part.transpose(0, 1).to(x.dtype)
        for part, x, n in zip(parts, tensors, heads, strict=True)
    ]


def _to_tokens(full: Tensor, heads: int, ranks: SharingRanks) -> Tensor:
    """Map all tokens [b, s, n / c, ...] of the rank's heads to the rank's tokens [b, s / c, n,
    ...] of every head. A collective.
    """
    sequence = full.transpose(0, 1).flatten(2).contiguous()
    part = heads_to_part(sequence, ranks.group, ranks.deal).transpose(0, 1)
    return part if full.dim() == 3 else torch.unflatten(part, 2, (heads, *full.shape[3:]))


_STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states",
           "return_last_state")  # fmt: skip
_DOCUMENTS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return further arguments of a function, without those for states and documents.

    Raises:
        ConfigError: If one of these, or a gate, is given.
    """
    left_out = (*_STATES, *_DOCUMENTS, "z")
    for name in left_out:
        if given.get(name) is not None and given[name] is not False:
            raise ConfigError(
                f"linear attention was called with {name}, and ranks that share rows begin every "
                "row anew. Leave it out, or set context_parallel_size to 1."
            )
    return {name: value for name, value in given.items() if name not in left_out}


def _nothing(*_: Any, **__: Any) -> None:
    """Return None, as fused kernels of a whole module do where they are not installed."""


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolve,
        "chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "chunk_kda": _delta_rule,
        "mamba2_chunk_scan": _scan,
        "mamba_chunk_scan_combined": _scan,
        "mamba_selective_scan": _selective_scan,
        "selective_scan_fn": _selective_scan,
    }
)
"""End of a function's name -> the function on a rank's part."""
_FUSED = ("mamba_inner_fn", "split_conv1d_scan_combined")


@dataclass
class ExchangedMixer(SharedMixer):
    """Linear attention or convolution whose functions reach the tokens of other ranks."""

    kind = "exchange"
    divides = True

    @classmethod
    def suits(cls, module: nn.Module, arguments: Arguments) -> bool:
        """Return whether the module, or one in it, calls a known function."""
        names = [name for child in module.modules() for name in names_of(child)]
        return any(name.endswith(tuple(_FUNCTIONS)) for name in names)

    def other_names(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the functions of ranks."""
        others: dict[str, Any] = {}
        for child in module.modules():
            for name in names_of(child):
                if name.endswith(_FUSED):
                    others[name] = _nothing
                for end, function in _FUNCTIONS.items():
                    if name.endswith(end):
                        others[name] = partial(function, self.ranks, globals_of(child)[name])
        return others

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's part of the outputs."""
        args, kwargs = self.split_full((args, kwargs))
        return forward(*args, **kwargs)
