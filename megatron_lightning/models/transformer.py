"""A decoder-only transformer (GPT, Llama, Qwen) in plain PyTorch, with Megatron-Core's module
names.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden, ``v`` vocabulary. Inputs and outputs are
batch-first. Inside, activations are sequence-major [s, b, h], so that a sequence shard is
contiguous. The model runs on one CPU without a process group. ``models.plans`` describes the split
over ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.layers.attention.sequence_info import (
    Documents,
    SequenceInfo,
    document_lengths,
)
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.losses.linear_loss import OutputLinear, token_losses
from megatron_lightning.layers.losses.loss import CrossEntropy, capped
from megatron_lightning.layers.moe.routes import GivenRoutes, Routes
from megatron_lightning.layers.mtp import MultiTokenPrediction, MultiTokenPredictionLayer
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.layers.state.key_cache import CacheStep
from megatron_lightning.layers.state_space.initial import fill_initial, is_state_space
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.models.transformer_layers import build_depth, build_layers, times
from megatron_lightning.optim.maximal_update import MaximalUpdate, clear_query, initial_std

if TYPE_CHECKING:
    from megatron_lightning.parallel.shards.sharding import ShardingPlan
    from megatron_lightning.pipeline.schedules.partition import Unit

_BITS = MappingProxyType({torch.bfloat16: 8, torch.float16: 11})  # of the mantissa
_OUTPUT, _WORDS = "output_layer.weight", "embedding.word_embeddings.weight"
_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
_GATED_NORMS = ("mixer.norm.weight", "self_attention.out_norm.weight")  # never zero-centered


class LanguageModelEmbedding(nn.Module):
    """Word embeddings plus optional learned positions. Maps tokens [b, s] to [s, b, h]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        learned = config.position_embedding_type == "learned_absolute"
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = (
            nn.Embedding(config.max_sequence_length, config.hidden_size) if learned else None
        )
        self.dropout = Dropout(config.embedding_dropout_p)
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Embed ``tokens`` [b, s] at ``position_ids`` [b, s] (None: 0 to s-1). Returns [s, b,
        h].
        """
        words = self.word_embeddings(tokens.t())
        hidden = times(words, rounded(self.multiplier, words.dtype))
        if self.position_embeddings is not None:
            positions = (
                torch.arange(tokens.shape[1], device=tokens.device)[None]
                if position_ids is None
                else position_ids
            )
            hidden = hidden + self.position_embeddings(positions.t())
        out: Tensor = self.dropout(hidden)
        return out


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return a factor as numbers of ``dtype`` have it, the first factor of a half-precision model.

    Gemma multiplies by a number of the weights' dtype: 33.94 is 34 in bf16.
    """
    bits = _BITS.get(dtype)
    if bits is None:
        return factor
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


class TransformerBlock(nn.Module):
    """The layers, keyed by their number in the full model, and the final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(index): layer for index, layer in enumerate(build_layers(config))}
        )
        self.final_layernorm = build_norm(config, config.hidden_size)
        self.layers_at_once = 1
        """Number of layers in a call of :meth:`run_layers`.

        Above 1, the layers are recomputed together.
        """

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        layers = list(self.layers.values())
        for start in range(0, len(layers), self.layers_at_once):
            hidden = self.run_layers(layers[start : start + self.layers_at_once], hidden, sequence)
        out: Tensor = self.final_layernorm(hidden)
        return out

    def run_layers(
        self, layers: Sequence[nn.Module], hidden: Tensor, sequence: SequenceInfo | None
    ) -> Tensor:
        """Map [s, b, h] to [s, b, h] through ``layers``."""
        for layer in layers:
            hidden = layer(hidden, sequence)
        return hidden


def build_multi_token_prediction(config: TransformerConfig) -> MultiTokenPrediction | None:
    """Return the config's multi-token prediction before its embeddings are shared, or None."""
    layers = [
        MultiTokenPredictionLayer(config, LanguageModelEmbedding(config), build_depth(config))
        for _ in range(config.num_predicting_layers)
    ]
    return MultiTokenPrediction(layers, config.mtp_loss_scaling_factor) if layers else None


class GPTModel(nn.Module):
    """A decoder-only language model.

    On a real device the model is built with initial weights. Under ``torch.device("meta")`` the
    model stays on ``meta`` until :meth:`init_weights` fills the parameters. Neither case draws from
    torch's default generator.
    """

    def __init__(
        self, config: TransformerConfig, maximal_update: MaximalUpdate | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.maximal_update = maximal_update
        device = torch.empty(0).device
        with torch.device("meta"):
            self.embedding = LanguageModelEmbedding(config)
            self.decoder = TransformerBlock(config)
            self.mtp = build_multi_token_prediction(config)
            self.output_layer = OutputLinear(config.hidden_size, config.vocab_size, bias=False)
        self.output_gather: nn.Module = nn.Identity()
        self.loss: nn.Module = CrossEntropy(
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            softcap=config.final_logit_softcapping,
        )
        if device.type != "meta":
            self.to_empty(device=device)
        self._share_embeddings()
        if device.type != "meta":
            for name, parameter in self.named_parameters():
                self.init_weights(name, parameter)

    def _share_embeddings(self) -> None:
        """Share the embedding with the layers that embed tokens, or predict tokens by the
        embedding.
        """
        if self.config.share_embeddings_and_output_weights:
            self.output_layer.weight = self.embedding.word_embeddings.weight
        for layer in self.mtp.layers.values() if self.mtp is not None else ():
            for name, embedding in self.embedding.named_children():
                if isinstance(embedding, nn.Embedding):
                    getattr(layer.embedding, name).weight = embedding.weight

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | Documents | None = None,
        cache: CacheStep | None = None,
        *,
        routes: Tensor | Routes | None = None,
        padding: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token of every position.

        Args:
            tokens: [b, s] token ids.
            labels: [b, s] next tokens, already shifted. -100 is ignored.
            position_ids: [b or 1, s] positions. None: 0 to s-1, restarting with every document.
            document_ids: [b, s] document number of each token in its row. Tokens see only tokens of
                the same document. None: a row is one document.
            cache: Requests with new tokens in ``tokens`` [1, s], and the cache of earlier keys.
                None: rows are full sequences.
            routes: [b, s, m, k] experts of each token in the m layers of experts, recorded by an
                engine (``Completion.routes``). Routers weigh the experts by their own scores. A
                negative entry leaves the choice to the router. None: routers choose.
            padding: [b, s] whether a token is padding, which layers of experts compute and do not
                count. None: no token is.
            lengths: [b or 1, s or 1] length of each token's document, which LongRoPE chooses
                frequencies by. None: as documents, positions and padding of full rows say.

        Returns:
            Logits [b, s, v], or with a cache [1, k, v] for the cache's requested tokens. With
            labels: the losses of the tokens [b, s] in fp32.
        """
        documents = document_ids
        if isinstance(documents, Tensor):
            documents = Documents.of_ids(documents)
            if position_ids is None:
                position_ids = documents.positions(device=tokens.device)
        hidden: Tensor = self.embedding(tokens, position_ids)
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if isinstance(routes, Tensor):
            num_layers = self.config.num_expert_layers
            routes = GivenRoutes.of(routes, tokens, self.config.moe, num_layers)
        if lengths is None:
            lengths = self._lengths(tokens, position_ids, documents, padding, cache)
        # One object takes positions, documents, cache, routes and padding to every layer, since a
        # layer's call has room for nothing else under a pipeline.
        sequence = SequenceInfo(
            position_ids, lengths, documents=documents, cache=cache, routes=routes, padding=padding
        )
        hidden = self.decoder(hidden, sequence)
        if cache is not None:
            return self._kept_output(hidden, tokens.shape[1], cache)
        if self.mtp is None:
            return self._output(hidden, labels)
        positions = self._embedded_positions(tokens, position_ids)
        # Predicting layers see other tokens, to which the given routes do not belong.
        sequence = sequence.without_routes()
        hidden, ahead = self.mtp(hidden, tokens, labels, positions, sequence)
        output, losses = self._outputs(hidden, labels, ahead)
        out: Tensor = self.mtp.loss(output, losses, ahead)
        return out

    def _lengths(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        documents: Documents | None = None,
        padding: Tensor | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor | None:
        """Return the lengths of the tokens' documents if rotary frequencies depend on them."""
        if self.config.longest_short_document is None:
            return None
        return document_lengths(tokens, position_ids, documents, padding, cache)

    def _outputs(
        self, hidden: Tensor, labels: Tensor | None, ahead: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the model's output, and the losses [D, b, s] of multi-token prediction.

        Args:
            hidden: [s, (1 + D) b, h] hidden states of all depths.
            labels: [b, s] of depth 0.
            ahead: [D, b, s] of the other depths. None: there is only depth 0.
        """
        if ahead is None:
            return self._output(hidden, labels), None
        later_hidden = ahead.flatten(0, 1)
        if labels is not None:
            losses = self._losses(hidden, torch.cat([labels, later_hidden]))
            return losses[: len(labels)], losses[len(labels) :].view(ahead.shape)
        logits: Tensor = self.output_layer(self._scaled(hidden))
        first = hidden.shape[1] - len(later_hidden)
        losses = self.loss(logits[:, first:], later_hidden.t()).t()
        return self._full(logits[:, :first]), losses.reshape(ahead.shape)

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [b, s] of hidden states [s, b, h]."""
        return token_losses(self._scaled(hidden), labels.t(), self.output_layer, self.loss).t()

    def _output(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """Return the losses [b, s] of hidden states [s, b, h], without labels the logits [b, s,
        v].
        """
        if labels is not None:
            return self._losses(hidden, labels)
        return self._full(self.output_layer(self._scaled(hidden)))

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states scaled for the output layer.

        Logits cannot be scaled instead, because chunked losses never hold all logits.
        """
        return times(hidden, 1.0 / self.config.logits_scaling)

    def _kept_output(self, hidden: Tensor, length: int, cache: CacheStep) -> Tensor:
        """Return the logits [1, k, v] of the requested tokens of a row of ``length``."""
        for layer in () if self.mtp is None else self.mtp.layers.values():
            hidden = layer(hidden, cache.kept)  # a pipeline unit that returns the input
        if cache.states is not None:
            cache.states.hidden = hidden
        logits = self._logits_of(hidden, length, cache.kept)
        return logits if self.mtp is None else self.mtp.loss(logits)

    def _logits_of(self, hidden: Tensor, length: int, kept: Tensor) -> Tensor:
        """Return the logits [1, k, v] of the tokens ``kept`` [k] of a row of ``length``.

        Hidden states may be a sequence shard. The output layer then gathers first.
        """
        hidden = self._scaled(hidden)
        if len(hidden) == length:
            return self._full(self.output_layer(hidden[kept]))
        return self._full(self.output_layer(hidden)[kept])

    def draft(  # noqa: PLR0917 (the arguments of a layer)
        self,
        depth: int,
        hidden: Tensor,
        tokens: Tensor,
        position_ids: Tensor,
        cache: CacheStep,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after the next ``depth`` tokens by a layer of multi-token prediction.

        Args:
            depth: Number of the layer, from 1 on.
            hidden: [s, 1, h] of the depth before, of depth 0 as in ``cache.states``.
            tokens: [1, s] the tokens ``depth`` places ahead.
            position_ids: [1, s] positions of the row.
            cache: Requests of the row, and the cache of earlier keys.
            kept: [k] tokens with requested logits.

        Returns:
            Hidden states of the depth, and logits [1, k, v].
        """
        ahead = self._embedded_positions(tokens, position_ids)
        if ahead is not None:
            ahead = (ahead + depth).clamp(max=self.config.max_sequence_length - 1)
        lengths = self._lengths(tokens, position_ids, cache=cache)
        sequence = SequenceInfo(position_ids, lengths, cache=cache)
        layers: Any = self.mtp.layers if self.mtp is not None else {}
        hidden = layers[str(depth - 1)](hidden, tokens, ahead, sequence)
        return hidden, self._logits_of(hidden, tokens.shape[1], kept)

    def _full(self, logits: Tensor) -> Tensor:
        """Return this rank's logits [s, b, …] as capped logits of the full vocabulary, [b, s,
        v].
        """
        full_logits: Tensor = self.output_gather(logits).transpose(0, 1).contiguous()
        full_logits = capped(full_logits, self.config.final_logit_softcapping)
        return full_logits.float() if self.config.logits_in_fp32 else full_logits

    def _embedded_positions(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor | None:
        """Return the embedded positions [b or 1, s], or None if positions are not embedded."""
        if self.config.position_embedding_type != "learned_absolute":
            return None
        if position_ids is None:
            return torch.arange(tokens.shape[1], device=tokens.device)[None]
        return position_ids

    def pipeline_units(self) -> list[Unit]:
        """Return the module paths of the full model in order, as units for the partition into
        stages. A weight counts the unit as several layers. A pattern may end stages.
        """
        return pipeline_units(self.config)

    def sharding_plan(self) -> ShardingPlan:
        """Return the plan for tensor-parallel ranks."""
        # The model itself is independent of parallelism.
        from megatron_lightning.models.plans.gpt import gpt_plan

        return gpt_plan(self.config)

    @torch.no_grad()
    def init_weights(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, of the full shape of parameter ``name``, with initial values.

        The values depend only on the config's seed, the name, and the device type, because a
        generator of the device draws. Matrices are normal with the config's standard deviation,
        divided by sqrt(blocks in the residual stream) for projections into the residual stream
        (Megatron-LM, GPT-2). Norms are one (zero if zero-centered), biases zero. Parameters of
        state-space layers: see :func:`fill_initial`.
        """
        config = self.config
        if config.share_embeddings_and_output_weights and name == _OUTPUT:
            name = _WORDS
        # A generator for each name: values do not depend on the order in which parameters are made,
        # nor on who makes them.
        digest = hashlib.sha256(f"{config.init_seed}/{name}".encode()).digest()
        generator = torch.Generator(device=tensor.device).manual_seed(
            int.from_bytes(digest[:8], "little") >> 1
        )
        if is_state_space(name):
            fill_initial(name, tensor, generator)
        elif name.endswith("bias"):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            centered = config.layernorm_zero_centered_gamma and not name.endswith(_GATED_NORMS)
            tensor.fill_(0.0 if centered else 1.0)
        else:
            into_residual = name.endswith(_INTO_RESIDUAL)
            num_blocks = float(config.num_residual_blocks)
            std, rule = config.init_method_std, self.maximal_update
            if rule is not None:
                std = initial_std(name, std, rule, config)
                num_blocks *= rule.depth_of_values(config)
            std /= math.sqrt(num_blocks) if into_residual else 1.0
            # Equal draws for all dtypes.
            values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            tensor.copy_(values.normal_(0.0, std, generator=generator))
            if rule is not None:
                clear_query(name, tensor, config)
