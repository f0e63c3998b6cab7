"""Drafts of tokens by the model's layers of multi-token prediction (MTP), verified by the model.

A step computes the last token of a request and the request's drafts side by side. A draft counts if
the model chooses the same token at the draft's place. The first other token ends the step's new
tokens, and the keys of the drafts behind it are rolled back: later steps write the same slots
again. Texts therefore equal the texts without drafts, drawn texts as well.

After a step the layers continue from the step's hidden states, on the stage with the output layer.
They compute the row of the step with tokens k places ahead (depth k) and store keys in the slots of
the step. Depth k at the last token reads the draft of depth k - 1. If that draft is refused, the
last D places are computed again, so that all keys are those of the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.stage_runner import StageCall
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.request_batch import Batch, Portion
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.pipeline.stages.stage import StagePartition

_KINDS = frozenset(("dense", "expert", "attention", "mlp", "moe"))
"""Kinds of layers that keep nothing but keys, which later tokens write over."""


class Drafter:
    """Drafts after each step.

    Args:
        model: The rank's part of the model, with all MTP layers if the rank has the last stage.
        num_tokens: Drafts of a request in a step.
        in_lockstep: Whether forwards are collectives of several replicas, so that the layers run
            after every step.
    """

    def __init__(self, model: GPTModel, num_tokens: int, *, in_lockstep: bool) -> None:
        self.num_tokens = num_tokens
        self._model = model
        self._in_lockstep = in_lockstep

    def draft(self, batch: Batch, call: StageCall, results: Tensor) -> Tensor:
        """Return the drafts [r, D] of the r requests in ``batch``, as exact fp64 numbers. Requests
        still at their prompts have unused drafts.

        Args:
            batch: The requests.
            call: The model's call of the step, already run.
            results: Results [k, 3] of the step.
        """
        rows = _Rows.of(batch, results)
        drafts = torch.full((len(batch.portions), self.num_tokens), -1, dtype=torch.float64)
        if not (self._in_lockstep or any(not p.request.num_scored for p in batch.portions)):
            return drafts
        (row,), step, positions = call.args, call.kwargs["cache"], call.kwargs["position_ids"]
        hidden, kept_rows = step.states.hidden, torch.tensor(rows.kept or [0], device=row.device)
        for depth in range(1, self.num_tokens + 1):
            tokens = torch.tensor([rows.ahead(depth, row.shape[1])], device=row.device)
            hidden, logits = self._model.draft(depth, hidden, tokens, positions, step, kept_rows)
            if rows.kept:
                best = logits[0].argmax(-1).tolist()
                rows.extend(best)
                drafts[rows.drafting, depth - 1] = torch.tensor(best, dtype=torch.float64)
        return drafts


class _Rows:
    """Texts of the requests of a step, with the step's new tokens and the drafts behind them."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        """Index in the row of the last token with a known next token, for each drafting request."""
        self.drafting: list[int] = []
        """Index of each drafting request in the batch."""
        self._texts: list[list[int]] = []
        self._portions: tuple[Portion, ...] = ()

    @classmethod
    def of(cls, batch: Batch, results: Tensor) -> _Rows:
        rows, start, place = cls(), 0, 0
        rows._portions = batch.portions
        for index, portion in enumerate(batch.portions):
            request, num_kept = portion.request, len(portion.kept)
            text = request.tokens[request.offset :]
            if num_kept and not request.num_scored:
                new_tokens = [int(token) for token in results[place : place + num_kept, 0].tolist()]
                text = text + [token for token in new_tokens if token >= 0]
                rows.kept.append(start + len(text) - 2 - portion.first)
                rows.drafting.append(index)
            rows._texts.append(text)
            start += portion.count
            place += num_kept
        return rows

    def ahead(self, depth: int, length: int) -> list[int]:
        """Return the tokens ``depth`` places ahead of the tokens of the row [length]. Unknown
        tokens are 0. The keys of their places are computed again before anything reads them.
        """
        tokens: list[int] = []
        for portion, text in zip(self._portions, self._texts, strict=True):
            known_tokens = text[portion.first + depth : portion.end + depth]
            tokens += known_tokens + [0] * (portion.count - len(known_tokens))
        return tokens + [0] * (length - len(tokens))

    def extend(self, drafts: list[int]) -> None:
        """Add a draft to each drafting request."""
        for index, draft in zip(self.drafting, drafts, strict=True):
            self._texts[index].append(draft)


def make_drafter(
    model: nn.Module,
    options: EngineOptions,
    partition: StagePartition | None,
    *,
    in_lockstep: bool,
) -> Drafter | None:
    """Return the drafter of a model. None: no drafts are wanted.

    Raises:
        ConfigError: If the model or the pipeline cannot draft.
    """
    if not options.draft_tokens:
        return None
    check_drafts(getattr(model, "config", None), options)
    last = None if partition is None else partition.stages[-1]
    # Drafts need the last layer's hidden states, the predicting layers and the output layer on one
    # stage.
    layers = [f"mtp.layers.{index}" for index in range(options.draft_tokens)]
    if last is not None and not set(layers) <= set(last):
        raise ConfigError(
            f"draft_tokens={options.draft_tokens} and the last pipeline stage has only {last}: "
            "drafts are computed by layers of multi-token prediction beside the output layer. Put "
            "both on one stage (a pipeline_model_parallel_layout that ends with mL), lower "
            "pipeline_model_parallel_size, or set draft_tokens to 0."
        )
    if not isinstance(model, GPTModel):
        raise ConfigError(
            f"draft_tokens={options.draft_tokens} and the model is a {type(model).__name__}, which "
            "is not a GPTModel. Set it to 0."
        )
    return Drafter(model, options.draft_tokens, in_lockstep=in_lockstep)


def check_drafts(config: Any, options: EngineOptions) -> None:
    """Check that a model can draft.

    Args:
        config: The model's configuration. None: the model writes by its own ``generate``.
        options: Sizes of the engine.

    Raises:
        ConfigError: If the model has too few layers of multi-token prediction, or layers with
            another cache than keys.
    """
    num_drafts = options.draft_tokens
    if not num_drafts:
        return
    if not isinstance(config, TransformerConfig):
        raise ConfigError(
            f"draft_tokens={num_drafts}, and the model writes by its own generate, which takes no "
            "drafts. Set it to 0, or train the model as a GPTModel."
        )
    depths = config.num_predicting_layers
    if num_drafts > depths:
        raise ConfigError(
            f"draft_tokens={num_drafts}, and the model has {depths} layers of multi-token "
            f"prediction (mtp_num_layers); a layer drafts one token. Set it to {depths}."
        )
    other_kinds = sorted(set(config.layer_kinds) - _KINDS)
    if config.linear_attention_freq is not None:  # in layers of any kind
        other_kinds.append("delta_net")
    if other_kinds:
        raise ConfigError(
            f"draft_tokens={num_drafts}, and the model has layers of the kinds {other_kinds}, "
            "whose state cannot be rolled back when a draft is refused. Set it to 0."
        )
    if options.record_routes:
        raise ConfigError(
            f"draft_tokens={num_drafts} and record_routes=True: experts of refused drafts would be "
            "recorded. Set one of them to its default."
        )
