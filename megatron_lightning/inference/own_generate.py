"""Text and scores by a model's own ``generate``: models of ``transformers`` not supported by the
engine.

Each text is computed alone, with the model's own cache, on every rank. Tokens are drawn as in the
engine, so that a seed gives the same text on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.choice import choose
from megatron_lightning.inference.engine import (
    Completion,
    Observe,
    Score,
    completion_of,
    evaluated,
    score_of,
)
from megatron_lightning.inference.requests import RequestMaker
from megatron_lightning.inference.sampling import Sampling
from megatron_lightning.inference.scheduler import Batch, Portion, Request
from megatron_lightning.parallel.context import ParallelContext


class OwnGenerate:
    """Continues and scores texts as :class:`~megatron_lightning.inference.engine.Engine` does.

    Args:
        model: A rank's part of a model of ``transformers``.
        context: Groups of this rank.
        requests: Makes requests.
        uses_inference_mode: Must be False for weights gathered by FSDP, since weights gathered in
            inference mode could not be trained.
        forward_context: Returns the context of a forward, such as autocast.
        prepare: Called before the first forward of a call.

    Raises:
        ConfigError: If ranks share layers or sequences.
    """

    steps_together = True
    """All ranks compute all texts, since a forward may be a collective of all."""

    def __init__(
        self,
        model: Any,
        context: ParallelContext,
        requests: RequestMaker,
        *,
        uses_inference_mode: bool = True,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        layout = context.layout
        for name, size in (
            ("pipeline_model_parallel_size", layout.pp),
            ("context_parallel_size", layout.cp),
        ):
            if size > 1:
                raise ConfigError(
                    f"{name}={size}: {type(model).__name__} writes text by its own generate, which "
                    f"calls the whole model for each token. Set {name} to 1, or load the "
                    "checkpoint in another layout."
                )
        self.model = model
        self.context = context
        self.requests = requests
        self._uses_inference_mode = uses_inference_mode
        self._forward_context = forward_context
        self._prepare = prepare

    @property
    def longest(self) -> int:
        """Most input tokens of the model."""
        return self.requests.longest

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        num_samples: int = 1,
        *,
        seeds: Sequence[int] | None = None,
        observe: Observe = lambda _: None,
    ) -> list[list[Completion]]:
        """See :meth:`Engine.generate`. All ranks pass the same arguments."""
        rows = self.requests.samples(prompts, sampling or Sampling(), num_samples, seeds)
        requests = [request for row in rows for request in row]
        self._run(requests, self._continue, observe)
        return [[completion_of(row[i]) for row in rows] for i in range(len(prompts))]

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        observe: Observe = lambda _: None,
    ) -> list[Score]:
        """See :meth:`Engine.score`. All ranks pass the same arguments."""
        requests = self.requests.scored(contexts, continuations)
        self._run(requests, self._score, observe)
        return [score_of(request) for request in requests]

    def _run(
        self, requests: Sequence[Request], work: Callable[[Request], None], observe: Observe
    ) -> None:
        self._prepare()
        with ExitStack() as stack:
            stack.enter_context(evaluated(self.model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.inference_mode(self._uses_inference_mode))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._forward_context())
            for request in requests:
                work(request)
                observe(requests)

    def _score(self, request: Request) -> None:
        total = request.num_inputs
        portion = Portion(request, 0, total)
        row = request.tokens[request.offset : request.offset + total]
        logits = self.model(input_ids=torch.tensor([row], device=self.context.device)).logits
        kept = logits[0, portion.kept.start :]
        request.take([(a, b, c) for a, b, c in choose(Batch((portion,)), kept).tolist()])

    def _continue(self, request: Request) -> None:
        if request.prompt_length + request.sampling.max_new_tokens > self.longest:
            raise ConfigError(
                f"a prompt of {request.prompt_length} tokens with up to "
                f"{request.sampling.max_new_tokens} new ones is longer than the {self.longest} of "
                f"{type(self.model).__name__}. Shorten the prompt, or lower max_new_tokens."
            )
        row = torch.tensor([request.tokens], device=self.context.device)

        def draw(_: Tensor, logits: Tensor) -> Tensor:
            """Leave a single token: the token drawn by the request."""
            last = request.num_inputs
            portion = Portion(request, last - 1, last)
            [result] = choose(Batch((portion,)), logits).tolist()
            request.take([(result[0], result[1], result[2])])
            only = torch.full_like(logits, -torch.inf)
            only[:, int(result[0])] = 0.0
            return only

        def is_done(*_: Any, **__: Any) -> Tensor:
            return torch.tensor([request.reason is not None], device=row.device)

        self.model.generate(
            row,
            attention_mask=torch.ones_like(row),  # a prompt may hold the padding's id
            logits_processor=[draw],
            stopping_criteria=[is_done],
            max_new_tokens=request.sampling.max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=1.0,
            eos_token_id=-1,  # requests know their ends
            pad_token_id=0,
            use_cache=True,
        )
