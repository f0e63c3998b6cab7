"""Our attention as an attention implementation for models of ``transformers``.

Their attention modules look a function up by the name in their configuration
(https://huggingface.co/docs/transformers/attention_interface). Ours calls a :class:`CoreAttention`
that is put into the attention module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.known_functions import attention_functions, is_known
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.optional import require

NAME = "megatron_lightning"
_CORE = "core_attention"
_UNSUPPORTED = ("softcap", "s_aux")
"""Arguments of attention that change the scores."""


def looks_attention_up(module: nn.Module) -> bool:
    """Return whether a module is attention of ``transformers`` with a function looked up by
    name.
    """
    return hasattr(module, "is_causal") and hasattr(
        getattr(module, "config", None), "_attn_implementation"
    )


def without_masks(config: Any) -> None:
    """Have models of a configuration make no masks: visibility follows from positions."""
    require("transformers", "an attention module of transformers")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    config._attn_implementation = NAME


def put_core(module: nn.Module) -> CoreAttention:
    """Put our attention into an attention module of ``transformers``, and return the new module.

    All attention modules of the model share a configuration, so every attention module needs ours.

    Raises:
        ConfigError: If the module's own function may be another one than softmax attention.
    """
    require("transformers", "an attention module of transformers")
    for setting, function in attention_functions(module.config):
        if not is_known(function):
            raise ConfigError(
                f"{type(module).__name__} has {setting}, which transformers has not written or has "
                "no mask function for, and a row ContextAttention() puts softmax attention over "
                "all ranks in its place. Set attn_implementation to sdpa, write GatheredTokens() "
                "in the row, or set context_parallel_size to 1."
            )
    dropout: Any = getattr(module, "attention_dropout", 0.0)
    core = CoreAttention(float(getattr(dropout, "p", dropout)))
    module.add_module(_CORE, core)
    without_masks(module.config)
    return core


def _attend(  # noqa: PLR0917 (called by transformers)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Map queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, s, n, d]."""
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise ConfigError(
            f"{type(module).__name__} asks for attention with "
            f"{unsupported[0] if unsupported else 'a mask of its own'}, which cannot be combined "
            "with context_parallel_size above 1. Leave it out, or set context_parallel_size to 1."
        )
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} was called with {key.shape[2]} keys for {query.shape[2]} "
            "queries: a cache cannot be combined with context_parallel_size above 1. Generate text "
            "with a model of its own."
        )
    sequence = SequenceInfo(
        causal=bool(module.is_causal if is_causal is None else is_causal),
        window=None if sliding_window is None else sliding_window - 1,
        documents=documents,
    )
    # transformers' order of dims to ours, [s, b, n, d], and back.
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out: Tensor = module.get_submodule(_CORE)(q, k, v, sequence, scaling)
    return out.view(*out.shape[:2], query.shape[1], -1).transpose(0, 1), None


def _no_mask(
    *,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    mask_function: Any = None,
    **_: Any,
) -> Tensor | None:
    """Return no mask: visibility follows from positions.

    Raises:
        ConfigError: If the model or the batch asks for more.
    """
    # transformers' sign of a custom mask function, and of blocks that see themselves
    if use_vmap or _sees_more(mask_function):
        raise ConfigError(
            "the model combines its causal mask with one of its own, which cannot be combined with "
            "context_parallel_size above 1. Set it to 1."
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            "attention_mask hides positions, and ranks that share sequences take no mask. Pad rows "
            "at their ends and leave the mask out: no token sees the padding behind it, and labels "
            "of -100 keep it out of the loss."
        )
    return None


def _sees_more(mask_function: Any) -> bool:
    """Return whether a mask function of ``transformers`` is, or has in it, a union of others."""
    if getattr(mask_function, "__qualname__", "").startswith("or_masks."):
        return True
    cells = getattr(mask_function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    inner = [y for x in values for y in (x if isinstance(x, tuple) else (x,))]
    return any(_sees_more(one) for one in inner if callable(one))
