"""Attention of ``transformers`` by our own attention over the ranks.

A module of ``transformers`` looks its attention function up by name. Here it finds ours, with
sinks, capped scores and windows, and with every ``cp_comm_type``. A mask is not read: the proof
shows that causality and the window say the same, and with images each mask is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.self_attention import with_equal_heads
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.attention.transformers_attention import (
    looks_attention_up,
    without_masks,
)
from megatron_lightning.layers.context.backends import ContextBackend
from megatron_lightning.layers.shared_rows.conditions import has_reach
from megatron_lightning.layers.shared_rows.mixers import (
    Arguments,
    MixerSlot,
    SharedMixer,
    SharingRanks,
)
from megatron_lightning.layers.shared_rows.other_names import names_of
from megatron_lightning.layers.shared_rows.places import changed
from megatron_lightning.parallel.documents import Documents

_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_CACHE, _MASK, _POSITIONS = "past_key_values", "attention_mask", "position_ids"
_DOCUMENTS = "documents"
_WITHOUT_EFFECT = frozenset({
    "dropout", "position_ids", "use_cache", "cache_position", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch",
})  # fmt: skip
"""Arguments that reach the function, and change nothing in it."""


@dataclass
class RingMixer(SharedMixer):
    """Attention of the rank's queries to the keys of all ranks, which pass by."""

    kind = "ring"
    divides = True
    _has_window: bool = True
    """Whether the module has a window that probes made small."""

    @classmethod
    def suits(cls, module: nn.Module, arguments: Arguments) -> bool:
        """Return whether the module, or one in it, looks its attention function up."""
        return any(_FUNCTIONS in names_of(child) for child in module.modules())

    def other_names(self, module: nn.Module) -> Mapping[str, Any]:
        """Return our function in place of all functions."""
        attention = self.ranks.attention
        return {} if attention is None else {_FUNCTIONS: RingFunctions(attention, self.ranks)}

    def bind(self, module: nn.Module, slot: MixerSlot | None = None) -> MixerSlot:
        """Have the module's calls get and return the rank's part."""
        self._has_window = has_reach(module)
        return super().bind(module, slot)

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's part of the outputs.

        Raises:
            ConfigError: If a mask says more than causality.
        """
        documents = self._documents(kwargs)
        args, kwargs = self.split_full((args, kwargs))
        masks: list[Tensor] = []

        def without_mask(place: str, tensor: Tensor) -> Any:
            if place not in self.arguments.inputs.masks and not place.endswith(f"['{_MASK}']"):
                return tensor
            if self.ranks.takes_media and tensor.ndim == 4:
                masks.append(tensor)
            if not self._has_window and not documents:
                self._check_mask(tensor)
            return None

        args, kwargs = changed((args, kwargs), without_mask)
        if _CACHE in kwargs:
            kwargs[_CACHE] = None
        self.ranks.left_out = tuple(masks)  # attention knows its window
        try:
            return forward(*args, **kwargs, **documents)
        finally:
            self.ranks.left_out = ()

    def _check_mask(self, mask: Tensor) -> None:
        """Check that the last token sees the first one. A window of an unknown name may be longer
        than a probed row, in which it hides nothing.

        Raises:
            ConfigError: If it does not.
        """
        if mask.ndim != 4:
            return
        known = self.ranks.masks
        if mask not in known:  # read from the device once for all modules
            known[mask] = bool(_is_seen(mask[:, :, -1, 0]).all())
        if not known[mask]:
            raise ConfigError(
                f"a mask hides the first of {mask.shape[-1]} tokens from the last one, and the "
                "short row in which ranks of context_parallel_size looked for what mixes tokens "
                "has shown no window. Name the attribute that holds its length sliding_window, set "
                'ContextOptions(mixers={"**": "rows"}), or set context_parallel_size to 1.'
            )

    def _documents(self, kwargs: Mapping[str, Any]) -> dict[str, Documents]:
        """Return the documents of full rows, as an argument that reaches our function. No argument:
        every row is one document.
        """
        positions = kwargs.get(_POSITIONS)
        if positions is None or f"[1]['{_POSITIONS}']" not in self.arguments.full:
            return {}
        known = self.ranks.documents
        if positions not in known:  # read from the device once for all modules
            known[positions] = Documents.of_positions(positions, self.ranks.deal)
        documents: Documents = known[positions]
        return {} if documents.are_full_rows else {_DOCUMENTS: documents}


def _is_seen(mask: Tensor) -> Tensor:
    """Return which keys a mask lets queries see."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


Maskless = list[tuple[Any, str]]
"""Configurations whose models make no masks, and their own attention."""


def leave_masks_out(
    model: nn.Module, rings: Collection[str], blocks: Collection[str] | None = None
) -> Maskless:
    """Have a model make no masks, if all its attention is in the modules at ``rings``.

    Args:
        model: The model.
        rings: Paths of modules whose attention reads no masks.
        blocks: Paths of the blocks, beside which towers attend by configurations of their own.
            None: there is no tower.
    """
    attention = {p: m for p, m in model.named_modules() if looks_attention_up(m)}
    own = {id(m.config) for p, m in attention.items() if blocks is None or _is_in(p, blocks)}
    attention = {p: m for p, m in attention.items() if id(m.config) in own}
    if not all(_is_in(path, rings) for path in attention):
        return []
    configs = [m.config for m in attention.values()]
    if attention and blocks is not None:  # a model may make masks with its own configuration
        configs.append(cast(Any, model.config).get_text_config())
    found = {id(c): (c, c._attn_implementation) for c in configs}
    for config, _ in found.values():
        without_masks(config)
    return list(found.values())


def _is_in(path: str, outer: Collection[str]) -> bool:
    return any(f"{path}.".startswith(f"{one}.") for one in outer)


class RingFunctions:
    """Attention functions of ``transformers``, which are all ours."""

    def __init__(self, attention: ContextBackend, ranks: SharingRanks) -> None:
        self._attention = attention
        self._ranks = ranks

    def get_interface(self, *_: Any) -> Any:
        """Return our function."""
        return self.attend

    def __getitem__(self, _: str) -> Any:
        return self.attend

    def attend(  # noqa: PLR0917 (called by transformers)
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        documents: Documents | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Map queries [b, n, s, d], keys and values [b, g, s, d] to outputs [b, s, n, d].

        Raises:
            ConfigError: If there is an argument of unknown meaning, or a mask of the module's own.
        """
        unknown = [k for k, v in others.items() if k not in _WITHOUT_EFFECT and v is not None]
        if attention_mask is not None or unknown or key.shape[2] != query.shape[2]:
            found = unknown[0] if unknown else "a mask or keys of its own"
            raise ConfigError(
                f"{type(module).__name__} asks for attention with {found}, which attention over "
                "the ranks of context_parallel_size does not know. Leave it out, or set "
                "context_parallel_size to 1."
            )
        deal = self._ranks.deal
        if documents is None and deal is not None:  # attention must know the chunks
            length = query.shape[2] * self._ranks.group.size
            documents = Documents(((0, length),), deal)
        own: Any = module
        window = sliding_window or getattr(own, "sliding_window", None)
        for mask in self._ranks.left_out:
            self._check_mask(mask, window, documents)
        causal = bool(getattr(own, "is_causal", True) if is_causal is None else is_causal)
        sequence = SequenceInfo(
            causal=causal, window=None if window is None else window - 1, documents=documents
        )
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        size = value.shape[3]
        q, k, v = with_equal_heads(query, key, value)
        out = self._attention(q, k, v, sequence, scale, softcap=softcap, sink=s_aux)
        return out[..., :size].transpose(1, 2).contiguous(), None

    def _check_mask(self, mask: Tensor, window: int | None, documents: Documents | None) -> None:
        """Check that a mask says what attention computes, in every entry: masks of images may
        differ from call to call.

        Raises:
            ConfigError: If it says something else.
        """
        masks = self._ranks.usual
        if mask not in masks:
            masks[mask] = {}
        known = masks[mask]
        what = window, documents
        if what not in known:  # read from the device once for all modules
            usual = _usual_mask(mask, window, documents)
            known[what] = usual.shape[-2:] == mask.shape[-2:] and torch.equal(
                _is_seen(mask), usual.expand_as(mask)
            )
        if not known[what]:
            raise ConfigError(
                "a mask lets tokens see others than causality and windows do, as tokens of images "
                "may, which the rows before have not shown to the ranks of context_parallel_size. "
                'Set ContextOptions(mixers={"**": "rows"}), or set context_parallel_size to 1.'
            )


def _usual_mask(mask: Tensor, window: int | None, documents: Documents | None) -> Tensor:
    """Return which keys causality, a window and documents let queries see."""
    at = torch.arange(mask.shape[-1], device=mask.device)
    distance = at[:, None] - at
    usual = (distance >= 0) & (distance < (window or len(at)))
    if documents is None or documents.are_full_rows:
        return usual
    first = at - documents.positions(device=mask.device)
    return (usual & (first[:, :, None] == first[:, None, :]))[:, None]
