"""Style of a ``transformers`` model around blocks with sequence-sharded activations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.parallel_linear import RowParallelLinear
from megatron_lightning.layers.styles.regions import FULL_SEQUENCE, sees_full_sequence
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.sharding import ShardingPlan

_LENGTH = "_padded_from"
"""Attribute of a module during a call with padded rows: the length of the rows before."""
_DIM = 1
"""Dim of the sequence in the arguments and in the output."""
_WAY_OUT = "or set sequence_parallel=False."


@dataclass(frozen=True)
class SequenceRegion:
    """The base model of a causal language model, whose blocks see sequence shards under sequence
    parallelism.

    Calls that ranks cannot share equally are handled here. With gradients, rows are padded at the
    end to a multiple of the ranks, and the output is cut: no token of a causal model sees the
    padding. Without gradients (a step of ``generate`` has a single token) the blocks see full
    sequences.
    """

    splits = False

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Watch the lengths of the calls."""
        if plan.is_sequence_parallel(context):
            hook = _Enter(context.tp.size, context.cp.size)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(_Leave(), always_call=True)
        return module


# Hooks are objects, not closures, so that modules can be copied and pickled.


@dataclass(frozen=True)
class _Enter:
    ranks: int
    """Ranks that share the blocks' activations."""
    sharers: int
    """Ranks with parts of the same sequences (context parallelism)."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        _end(module)  # a pipeline leaves calls without the hook behind them
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return None
        wants_states = arguments.get("output_hidden_states")
        if wants_states is None:
            wants_states = getattr(module.config, "output_hidden_states", False)
        extra = -tokens.shape[_DIM] % self.ranks
        if not extra and not wants_states:
            return None
        name = type(module).__name__
        # Without gradients nothing is saved, so full sequences on every rank cost little: no
        # padding is needed.
        if not torch.is_grad_enabled():
            _check_engines(module, name)
            _set_full(module, full=True)
            return None
        if wants_states:
            raise ConfigError(
                f"{name} was asked for hidden states with gradients, and each of {self.ranks} "
                "tensor-parallel ranks has them for its part of the sequence. Set "
                "output_hidden_states to False, or sequence_parallel of MegatronStrategy to False."
            )
        if self.sharers > 1:
            raise ConfigError(
                f"{name} was called with {tokens.shape[_DIM]} tokens a row on a context-parallel "
                f"rank, which {self.ranks} tensor-parallel ranks cannot share equally. Pad the "
                f"rows to a multiple of {self.ranks * self.sharers} (twice as much with "
                f"load-balanced halves), {_WAY_OUT}"
            )
        # Padding at the end is invisible to earlier tokens of a causal model. The outputs are cut
        # to the length again.
        vars(module)[_LENGTH] = tokens.shape[_DIM]
        padded = {
            key: _padded(key, x, tokens.shape[_DIM], extra, name) for key, x in arguments.items()
        }
        return (), {**padded, "use_cache": False}


@dataclass(frozen=True)
class _Leave:
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        length = _end(module)
        if length is None or output is None:  # no output: the call has raised
            return None
        if isinstance(output, tuple):
            return (output[0].narrow(_DIM, 0, length), *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"].narrow(_DIM, 0, length)
        return output


def _end(module: nn.Module) -> int | None:
    """End a call. Return the length of the rows, if they were padded."""
    if sees_full_sequence(module):
        _set_full(module, full=False)
    length: int | None = vars(module).pop(_LENGTH, None)
    return length


def _set_full(root: nn.Module, *, full: bool) -> None:
    """Switch the modules of a region between full sequences and shards."""
    for module in root.modules():
        if full:
            vars(module)[FULL_SEQUENCE] = True
        else:
            vars(module).pop(FULL_SEQUENCE, None)
        if isinstance(module, RowParallelLinear):
            module.sequence_parallel = not full


def _check_engines(root: nn.Module, name: str) -> None:
    """Check that no layer of another library sums outputs."""
    if any(isinstance(m, RowParallelLinear) and m.engine is not None for m in root.modules()):
        raise ConfigError(
            f"{name} was called with rows that its tensor-parallel ranks cannot share equally, and "
            f"Transformer Engine's layers take equal shards only. Pad the rows, {_WAY_OUT}"
        )


def _padded(key: str, value: Any, length: int, extra: int, name: str) -> Any:
    """Return an argument of a call with rows that are ``extra`` tokens longer."""
    if isinstance(value, Tensor):
        last = value[..., -1:]
        if key in ("position_ids", "cache_position") and value.shape[-1] == length:
            more = torch.arange(1, extra + 1, device=value.device, dtype=value.dtype)
            return torch.cat([value, last + more], -1)
        if key in ("input_ids", "attention_mask") and value.ndim == _DIM + 1:
            # A mask that hides nothing keeps the faster kernel.
            return torch.cat([value, torch.ones_like(last).expand(-1, extra)], _DIM)
        if key == "inputs_embeds":
            return torch.cat([value, value[:, :1].detach().expand(-1, extra, -1)], _DIM)
        if length not in value.shape[_DIM:]:
            return value
    elif not (isinstance(value, Mapping) and value) and key != "past_key_values":
        return value
    elif value is None:
        return None
    raise ConfigError(
        f"{name} was called with {key} for rows of {length} tokens, which tensor-parallel ranks "
        f"cannot share equally, and {key} cannot be padded. Pad the rows to a multiple of the "
        f"ranks, {_WAY_OUT}"
    )
