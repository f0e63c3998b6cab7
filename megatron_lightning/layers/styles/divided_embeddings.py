"""Sequences that a model divides behind its merge of images and text (context parallelism).

Every rank runs the tower on all images, and merges the features with the embeddings of the full
rows. The first layers receive the rank's part. Gradients of tower and embeddings are therefore
sums over the ranks, as all gradients of ranks that share sequences, and a rank whose part has no
token of an image takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles.common import AdditionalStyle
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style

_EMBEDDINGS, _POSITIONS = "inputs_embeds", "position_ids"
_PLACES, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""Whether a token is one of an image [b, s], and features [n, h] of these tokens for each of the
first layers, which are added to hidden states behind the layer."""
_DOCUMENTS = "documents"
"""Keyword that reaches our attention through the layers' calls."""
_KNOWN = (_EMBEDDINGS, _POSITIONS, "attention_mask", "labels", "shift_labels", _PLACES, _FEATURES)
"""Tensors in a text model's call. The text model does not read labels."""


@dataclass
class DivideEmbeddings:
    """Forward pre-hook of a text model of ``transformers``: the rank's part of the embeddings
    [b, s, h] and of the positions [b, s], or [n, b, s] for positions of images, and features of the
    part's image tokens. Attention receives the documents of the rows.
    """

    group: AxisGroup
    """The context-parallel ranks."""
    deal: Deal | None = None
    """Chunks of the micro-batch at hand. None: zigzag."""

    @property
    def part(self) -> SequencePart:
        """The rank's part of a row."""
        return SequencePart(self.group.rank, self.group.size, self.deal)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the part.

        Raises:
            ConfigError: If the call has no embeddings, or further tensors of unknown meaning.
        """
        embeddings = kwargs.get(_EMBEDDINGS)
        others = [k for k, v in kwargs.items() if isinstance(v, Tensor | list) and k not in _KNOWN]
        if args or not isinstance(embeddings, Tensor) or others:
            argument = others[0] if others else "no inputs_embeds"
            raise ConfigError(
                f"{type(module).__name__} was called with {argument}, and ranks that share "
                "sequences divide embeddings and positions alone. Set context_parallel_size to 1."
            )
        positions = kwargs.get(_POSITIONS)
        if positions is None:
            local_positions = self.part.positions(embeddings.shape[1], embeddings.device)[None]
        else:
            local_positions = self.part.split(positions, positions.ndim - 1)
        local_embeddings = self.part.split(embeddings, 1)
        local: dict[str, Any] = {_EMBEDDINGS: local_embeddings, _POSITIONS: local_positions}
        documents = documents_of(positions, self.deal)
        if documents is None and self.deal is not None:  # attention must know the chunks
            documents = Documents(((0, embeddings.shape[1]),), self.deal)
        if documents is not None:
            local[_DOCUMENTS] = documents
        if kwargs.get(_PLACES) is not None:
            local |= self._visual(kwargs[_PLACES], kwargs.get(_FEATURES) or ())
        return args, kwargs | local

    def _visual(self, places: Tensor, features: Sequence[Tensor]) -> dict[str, Any]:
        """Return the part's places of image tokens, and their features. A rank without image tokens
        takes part in the backward of the features, with zeros.
        """
        numbers = places.flatten().cumsum(0).view_as(places) - 1
        local_places = self.part.split(places, 1)
        chosen = self.part.split(numbers, 1)[local_places]
        return {_PLACES: local_places, _FEATURES: [x[chosen] for x in features]}


def documents_of(positions: Tensor | None, deal: Deal | None = None) -> Documents | None:
    """Return the documents of full rows. None: every row is one.

    Args:
        positions: [b, s], or [4, b, s], of which the first are flat. Three count time, height and
            width of rows of one document. None: those of rows of one document.
        deal: Chunks of the ranks. None: zigzag.
    """
    if positions is None or (positions.ndim == 3 and len(positions) != 4):
        return None
    found = Documents.of_positions(positions if positions.ndim == 2 else positions[0], deal)
    return None if found.are_full_rows else found


@dataclass(frozen=True)
class DividedEmbeddings(AdditionalStyle):
    """A text model of ``transformers`` called with embeddings of full rows."""

    also: Style | None = None
    """Another style of the same module, applied first."""

    def apply(self, module: nn.Module, context: ParallelContext, plan: ShardingPlan) -> nn.Module:
        """Divide the rows of every call."""
        module = self.apply_also(module, context, plan)
        if context.cp.size > 1:
            module.register_forward_pre_hook(DivideEmbeddings(context.cp), with_kwargs=True)
        return module


def dividing_hooks(module: nn.Module) -> list[DivideEmbeddings]:
    """Return the hooks that divide the calls of a module over the ranks that share sequences."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, DivideEmbeddings)]
