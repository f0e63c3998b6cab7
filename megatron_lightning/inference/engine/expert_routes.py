"""Record the experts of each token while text is written.

A rank records its tokens in its layers, without communication. When all texts have ended, the ranks
of a replica merge the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.layer_kinds import LAYER_KINDS
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.request_batch import Batch, Request
from megatron_lightning.layers.moe.routes import TakenRoutes
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import ParallelContext


class RouteRecorder:
    """Records routes of a model.

    Args:
        config: The model's configuration.
        context: Groups of this rank.

    Raises:
        ConfigError: If the model has no layers of experts, or layers of other kinds.
    """

    def __init__(self, config: Any, context: ParallelContext) -> None:
        if not isinstance(config, TransformerConfig) or config.moe is None:
            raise ConfigError(
                "record_routes is True, and the model has no layers of experts as a GPTModel, so "
                "that there is nothing to record. Set it to False."
            )
        other_kinds = sorted(set(config.layer_kinds) - set(LAYER_KINDS))
        if other_kinds:
            raise ConfigError(
                f"record_routes is True, and the model has layers of the kinds {other_kinds}, "
                "whose experts are not recorded. Set it to False."
            )
        self._sizes = (config.num_expert_layers, config.moe.router_topk)
        self._context = context
        self._steps: list[tuple[Batch, TakenRoutes]] = []

    def begin(self, batch: Batch) -> TakenRoutes:
        """Return the record of a forward of ``batch``."""
        taken_routes = TakenRoutes()
        self._steps.append((batch, taken_routes))
        return taken_routes

    def collect(self) -> None:
        """Give the records of the forwards so far to the requests."""
        for batch, taken_routes in self._steps:
            for layer, first, experts in taken_routes.experts:
                own_experts, start = experts.cpu(), 0
                for portion in batch.portions:
                    if not portion.request.num_scored:
                        # The part of the portion among this rank's tokens.
                        begin = max(start, first)
                        end = min(start + portion.count, first + len(own_experts))
                        place = portion.request.offset + portion.first + begin - start
                        if begin < end:
                            rows = self._record(portion.request)[place : place + end - begin, layer]
                            rows.copy_(own_experts[begin - first : end - first])
                    start += portion.count
        self._steps = []

    def _record(self, request: Request) -> torch.Tensor:
        """Return the record of a request [most tokens, m, k]. Unknown entries are -1."""
        if request.routes is None:
            most = request.prompt_length + request.sampling.max_new_tokens
            request.routes = torch.full((most, *self._sizes), -1, dtype=torch.int32)
        return request.routes

    def finish(self, requests: Sequence[Request]) -> None:
        """Merge the records of all ranks of a replica. A collective of the replica."""
        writing = [request for request in requests if not request.num_scored]
        if not writing:
            return
        records = [self._record(request) for request in writing]
        merged = torch.cat(records).to(self._context.device)
        for group in (self._context.tp, self._context.pp):
            merged = all_reduce(merged, group, "max")
        parts = torch.split(merged.cpu(), [len(record) for record in records])
        for request, part in zip(writing, parts, strict=True):
            routes = part[: len(request.tokens)].clone()
            leader = request.leader
            if leader is not None and leader.routes is not None:
                # Keys of the prompt are the leader's. Leaders come first.
                prompt = routes[: request.prompt_length]
                prompt.copy_(torch.where(prompt < 0, leader.routes[: len(prompt)], prompt))
            request.routes = routes


def refuse_routes(options: EngineOptions | None) -> None:
    """Refuse routes for a model with a ``generate`` of its own."""
    if options is not None and options.record_routes:
        raise ConfigError(
            "record_routes is True, and the model writes by its own generate, which shows no "
            "routes. Set it to False, or train the model as a GPTModel."
        )


def check_recorded(request: Request) -> None:
    """Check that the model sees the full text of a request.

    Raises:
        ConfigError: If the text may become longer than the model's longest sequence.
    """
    most = request.prompt_length + request.sampling.max_new_tokens - 1
    if not request.num_scored and most > request.longest:
        raise ConfigError(
            f"record_routes is True, and a prompt of {request.prompt_length} tokens with up to "
            f"{request.sampling.max_new_tokens} new tokens is longer than the model's longest "
            f"sequence ({request.longest}): tokens are then computed several times, with other "
            "experts. Lower max_new_tokens, or shorten the prompt."
        )
