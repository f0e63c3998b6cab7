"""Multi-token prediction: layers after the last layer predict tokens further ahead (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2), with the module names of Megatron-Core.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, D depths. Depth k = 1 … D continues from depth
k-1. Depth 0 is the model, after the final norm. For token t_i and hidden state h_i,

    h_i^k = final_layernorm(layer(eh_proj [enorm(Emb(t_{i+k})) ; hnorm(h_i^{k-1})]))
    L_k   = mean over i of the loss of the shared output layer on h_i^k for the label of i + k

and the training loss gets factor / D times the sum of the L_k. A mean covers the counted labels of
a micro-batch. Labels beyond the end of a row, or of a document in a row, do not count. The hidden
states of all depths pass through the model's output layer side by side, as additional samples: the
layer is called once, and computes the losses in chunks.

In evaluation the layers return their input. In generation they draft tokens, with a cache of keys
of their own (``inference.drafts``).

Logged: ``mtp_1_loss``, … , the L_k, and ``mtp_loss``, the addition to the training loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.layers.step_report import StepReport
from megatron_lightning.parallel.collectives import all_reduce, copy_to_axis, reduce_from_axis
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.sequence_exchange import gather_parts

IGNORED = -100
"""Label of a position without a loss."""


DepthInputs = tuple[Tensor, Tensor | None, SequenceInfo]
"""Tokens, embedded positions and sequences of a depth."""


class TokenShift(nn.Module):
    """Shift of sequences by one position to the left.

    If ranks share sequences, each rank sends the first entry of its chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.context_group: AxisGroup = ALONE
        """Ranks that share sequences, set by the style ``ContextGroup``."""

    def forward(self, x: Tensor, fill: int, documents: Documents | None = None) -> Tensor:
        """Return for every position of ``x`` [b, s] the next entry of the same document, or
        ``fill`` at the end. A collective of the ranks that share sequences.
        """
        group, deal = self.context_group, None if documents is None else documents.deal
        part = SequencePart(group.rank, group.size, deal)
        chunks = x.chunk(len(part.chunks), 1)
        first = gather_parts(torch.cat([chunk[:, :1] for chunk in chunks], 1), group, 1, deal)
        following = part.split(F.pad(first[:, 1:], (0, 1), value=fill), 1)
        pieces = zip(chunks, following.split(1, 1), strict=True)  # type: ignore[no-untyped-call]
        shifted = torch.cat([piece for chunk, end in pieces for piece in (chunk[:, 1:], end)], 1)
        if documents is None:
            return shifted
        return shifted.masked_fill(documents.ends(part, x.device), fill)


class MultiTokenPredictionLayer(nn.Module):
    """One depth: joins the hidden states of the previous depth with the embeddings of later tokens.

    Args:
        config: Sizes.
        embedding: Embedding of tokens, with parameters shared with the model.
        transformer_layer: The layer applied to the joined states.
    """

    def __init__(
        self, config: TransformerConfig, embedding: nn.Module, transformer_layer: nn.Module
    ) -> None:
        super().__init__()
        h = config.hidden_size
        self.embedding = embedding
        self.enorm = build_norm(config, h)
        self.hnorm = build_norm(config, h)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.transformer_layer = transformer_layer
        self.final_layernorm = build_norm(config, h)
        self._wide_stream = config.fp32_residual_connection

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """Map [s, b, h] to [s, b, h]. In evaluation, return the input, unless the sequence has a
        cache.

        Args:
            hidden: Of the depth before.
            tokens: [b, s], the tokens added by this depth.
            position_ids: [b or 1, s] positions of ``tokens``, if positions are embedded.
            sequence: Positions and visible keys of ``hidden``.
        """
        if not self.training and (sequence is None or sequence.cache is None):
            return hidden
        joined = [self.enorm(self.embedding(tokens, position_ids)), self.hnorm(hidden)]
        stream = self.eh_proj(torch.cat(joined, -1))
        if self._wide_stream:
            stream = stream.float()
        out: Tensor = self.final_layernorm(self.transformer_layer(stream, sequence))
        return out


class MultiTokenLoss(nn.Module):
    """Adds the losses of all depths to the training loss, and logs the losses.

    Args:
        scaling_factor: Weight of the mean over the depths.
    """

    def __init__(self, scaling_factor: float) -> None:
        super().__init__()
        self.scaling_factor = scaling_factor
        self.report = StepReport()
        self.context_group: AxisGroup = ALONE
        """Ranks that share sequences, set by the style ``ContextGroup``."""

    def forward(
        self, output: Tensor, losses: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Return ``output`` with the backward of the losses attached.

        Args:
            output: Output of the model.
            losses: [D, b, s] losses of the depths, or None.
            targets: [D, b, s] their labels.
        """
        if losses is None or targets is None:
            return output
        has_loss, group = targets != IGNORED, self.context_group
        # Each rank of a shared sequence weighs the loss of the full sequence by local items.
        sums = copy_to_axis(reduce_from_axis((losses * has_loss).sum((1, 2)), group), group)
        counts = all_reduce(has_loss.sum((1, 2)).to(sums.dtype), group)
        means = sums / counts.clamp(min=1)
        for depth, mean in enumerate(means.detach().unbind(), 1):
            self.report.value(f"mtp_{depth}_loss", mean)
        out: Tensor = self.report.loss("mtp_loss", self.scaling_factor * means.mean(), output)
        return out


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, keyed by number, with the preceding shift and the final loss.

    Args:
        layers: One layer for each depth.
        scaling_factor: Weight of the losses' mean over the depths.
    """

    def __init__(self, layers: Sequence[MultiTokenPredictionLayer], scaling_factor: float) -> None:
        super().__init__()
        self.shift = TokenShift()
        self.layers = nn.ModuleDict({str(depth): layer for depth, layer in enumerate(layers)})
        self.loss = MultiTokenLoss(scaling_factor)
        self.layers_at_once = 1
        """Number of layers in a call of :meth:`run_layers`.

        Above 1, the layers are recomputed together.
        """

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        sequence: SequenceInfo,
    ) -> tuple[Tensor, Tensor | None]:
        """Continue from the model's hidden states.

        Args:
            hidden: [s, b, h], behind the final norm.
            tokens: [b, s].
            labels: [b, s] next tokens. None: derived from the tokens.
            position_ids: [b or 1, s], if positions are embedded.
            sequence: Positions and visible keys.

        Returns:
            Hidden states of depth 0 to D as additional samples [s, (1 + D) b, h], and the labels of
            depth 1 to D [D, b, s]. In evaluation: ``hidden`` and None.
        """
        layers, states = list(self.layers.values()), [hidden]
        inputs: list[DepthInputs] = [(tokens, position_ids, sequence)] * len(layers)
        targets: list[Tensor] = []
        if self.training:
            inputs, targets = self._ahead(tokens, labels, position_ids, sequence)
        for start in range(0, len(layers), self.layers_at_once):
            end = start + self.layers_at_once
            states += self.run_layers(layers[start:end], states[-1], inputs[start:end])
        if not self.training:
            return states[-1], None
        return torch.cat(states, 1), torch.stack(targets)

    def run_layers(
        self, layers: Sequence[nn.Module], hidden: Tensor, inputs: Sequence[DepthInputs]
    ) -> list[Tensor]:
        """Return the hidden states after each of the given layers."""
        states = []
        for layer, depth_inputs in zip(layers, inputs, strict=True):
            hidden = layer(hidden, *depth_inputs)
            states.append(hidden)
        return states

    def _ahead(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        sequence: SequenceInfo,
    ) -> tuple[list[DepthInputs], list[Tensor]]:
        """Return the inputs and the labels of every depth."""
        documents, padding = sequence.documents, sequence.padding
        if labels is None:
            labels = self.shift(tokens, IGNORED, documents)
        inputs: list[DepthInputs] = []
        targets = []
        for _ in self.layers:
            tokens = self.shift(tokens, 0, documents)
            labels = self.shift(labels, IGNORED, documents)
            if position_ids is not None:
                position_ids = self.shift(position_ids, 0, documents)
            if padding is not None:  # a position without a token ahead does not count
                padding = self.shift(padding.to(torch.uint8), 1, documents).bool()
            inputs.append((tokens, position_ids, sequence.with_padding(padding)))
            targets.append(labels)
        return inputs, targets
