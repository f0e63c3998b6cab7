"""Common part of models for text and scores: calls with prompts, and the state of a model while
texts are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_lightning.errors import ConfigError, NonFiniteError
from megatron_lightning.inference.engine.keys.prefix_cache import PrefixCounts
from megatron_lightning.inference.engine.request_batch import NOT_FINITE, DraftCounts, Request
from megatron_lightning.inference.engine.requests import RequestMaker
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.step_report import CurrentMicrobatch, StepReport
from megatron_lightning.parallel.grid.context import ParallelContext

Observe = Callable[[Sequence[Request]], object]
"""Called every few steps with the requests of a call."""


@dataclass(frozen=True)
class Completion:
    """A text continued by a model."""

    tokens: list[int]
    """New tokens, without the end token. Tokens of a stop string are among them."""
    logprobs: list[float]
    """Log-probability of each new token: of the logits divided by the temperature, before top-k and
    top-p."""
    reason: str
    """Why the text ended: ``stop`` (an end token or a stop string) or ``length``."""
    end: tuple[int, float] | None = field(default=None, compare=False)
    """The end token chosen behind ``tokens``, and its log-probability. None: the text ended
    otherwise."""
    steps: list[int | None] | None = field(default=None, compare=False)
    """Step of the weights that chose each of :attr:`sampled_tokens`. None: of the model at hand."""
    routes: torch.Tensor | None = field(default=None, compare=False)
    """[t, m, k] int32 experts of each token of prompt and text in each of the model's m layers of
    experts. -1 for a last token not read by the model. None: routes are not recorded."""

    @property
    def sampled_tokens(self) -> list[int]:
        """All tokens that the model chose, the end token included: what a policy trains."""
        return self.tokens if self.end is None else [*self.tokens, self.end[0]]

    @property
    def sampled_logprobs(self) -> list[float]:
        """Log-probability of each of :attr:`sampled_tokens`."""
        return self.logprobs if self.end is None else [*self.logprobs, self.end[1]]


@dataclass(frozen=True)
class Score:
    """Likelihood of a text after a context."""

    logprob: float
    """Sum over the tokens of the text."""
    is_greedy: bool
    """Whether each token is the most likely token."""
    logprobs: list[float]
    """Log-probability of each token."""
    best: list[tuple[int, float]]
    """The most likely token at each place, and the token's log-probability."""


class TextModel(ABC):
    """Continues and scores texts by a rank's part of a model.

    Args:
        model: The rank's part.
        context: Groups of this rank.
        requests: Makes requests.
        uses_inference_mode: Must be False for weights gathered by FSDP, since weights gathered in
            inference mode could not be trained.
        forward_context: Returns the context of a forward, such as autocast.
        prepare: Called before the first forward of a call.
    """

    def __init__(
        self,
        model: Any,
        context: ParallelContext,
        requests: RequestMaker,
        *,
        uses_inference_mode: bool,
        forward_context: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[], object],
    ) -> None:
        self.model = model
        self.context = context
        self.requests = requests
        """Makes requests for :meth:`run`."""
        self.draft_counts = DraftCounts()
        """Drafts of all texts so far."""
        self.part: Any = None
        """Description of the rank's part of a loaded model."""
        self.prefix_counts = PrefixCounts()
        """Tokens of prompts so far, if keys of ended texts are kept."""
        self._uses_inference_mode = uses_inference_mode
        self._forward_context = forward_context
        self._prepare = prepare

    def active(self) -> AbstractContextManager[Any]:
        """Context of several calls with the same weights."""
        return nullcontext()

    @abstractmethod
    def run(self, requests: Sequence[Request], observe: Observe = lambda _: None) -> None:
        """Run requests to their ends."""

    @property
    def longest(self) -> int:
        """Most input tokens of the model."""
        return self.requests.longest

    @property
    def steps_together(self) -> bool:
        """Whether forwards are collectives of several replicas with different requests."""
        layout = self.context.layout
        shares_experts = layout.ep > 1 and layout.tp % (layout.etp * layout.ep) != 0
        return shares_experts or not self._uses_inference_mode  # weights gathered by FSDP

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        num_samples: int = 1,
        *,
        seeds: Sequence[int] | None = None,
        images: Sequence[Mapping[str, Any] | None] = (),
        observe: Observe = lambda _: None,
    ) -> list[list[Completion]]:
        """Continue prompts. Every rank of a replica passes the same prompts, and gets the same
        texts.

        A text depends only on the prompt and the seed: neither on neighbors nor on the layout.

        Args:
            prompts: Token ids of each prompt, at least one id.
            sampling: Options of sampling. Sample j of prompt i draws from the seed plus
                i * num_samples + j. None: the defaults.
            num_samples: Texts of each prompt. The keys of a prompt are computed once.
            seeds: Seed of each prompt's first sample. Each further sample adds 1. None: seeds
                derived from the seed of ``sampling``.
            images: Entries of each prompt's images for the model. None: the prompt is text.
            observe: Called every few steps with all requests.

        Returns:
            The samples of each prompt.

        Raises:
            ConfigError: If a prompt is empty, can never fit, stop strings need a tokenizer, or
                ``num_samples`` is below 1.
            NonFiniteError: If logits of a text are not finite.
        """
        rows = self.requests.samples(prompts, sampling or Sampling(), num_samples, seeds)
        for row in rows if any(images) else ():
            for request, entries in zip(row, images, strict=True):
                self.add_images(request, entries)
        # The first sample of each prompt before the second of any: later samples wait for the first
        # sample's keys.
        requests = [request for row in rows for request in row]
        self.run(requests, observe)
        _check_finite(requests)
        return [[_completion_of(row[i]) for row in rows] for i in range(len(prompts))]

    def continue_each(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Completion]:
        """Continue prompts, each with options and a seed of its own. Every rank of a replica passes
        the same prompts, and gets the same texts.

        Args:
            prompts: Token ids of each prompt, at least one id.
            samplings: Options of each prompt.

        Raises:
            ConfigError: If a prompt is empty, can never fit, or stop strings need a tokenizer.
            NonFiniteError: If logits of a text are not finite.
        """
        requests = [
            self.requests.one(prompt, sampling=sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        self.run(requests)
        _check_finite(requests)
        return [_completion_of(request) for request in requests]

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        observe: Observe = lambda _: None,
    ) -> list[Score]:
        """Return the likelihood of each continuation after the context. Every rank of a replica
        passes the same texts, and gets the same scores.

        The model sees at most ``longest`` tokens. Earlier tokens are left out.

        Args:
            contexts: Token ids, at least one id each.
            continuations: Token ids, at least one id each.
            observe: Called every few steps with all requests.

        Raises:
            ConfigError: If a context or continuation is empty, or too long.
            NonFiniteError: If logits of a text are not finite.
        """
        requests = self.requests.scored(contexts, continuations)
        self.run(requests, observe)
        _check_finite(requests)
        return [_score_of(request) for request in requests]

    def add_images(self, request: Request, entries: Mapping[str, Any] | None) -> None:
        """Give a request the entries of its prompt's images.

        Raises:
            ConfigError: If the model reads text alone.
        """
        if entries:
            raise ConfigError(
                f"{type(self.model).__name__} reads text alone. Leave images out, or load a model "
                "of transformers with a vision tower."
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside the block the model computes texts, and nothing is recorded for a backward."""
        self._prepare()
        with ExitStack() as stack:
            stack.enter_context(_evaluated(self.model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.inference_mode(self._uses_inference_mode))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._forward_context())
            yield


def _check_finite(requests: Sequence[Request]) -> None:
    if any(request.reason == NOT_FINITE for request in requests):
        raise NonFiniteError(
            "the model's logits are not finite, so no token can be chosen. Look at the weights "
            "(megatron-lightning checkpoint inspect), and at the dtype: float16 overflows where "
            "bfloat16 does not."
        )


def _completion_of(request: Request) -> Completion:
    """Return the text of an ended request."""
    return Completion(
        request.new_tokens,
        request.logprobs,
        request.reason or "length",
        request.end,
        routes=request.routes,
    )


def _score_of(request: Request) -> Score:
    """Return the score of an ended request."""
    scored = request.tokens[-request.num_scored :]
    is_greedy = [token for token, _ in request.best] == scored
    return Score(sum(request.logprobs), is_greedy, request.logprobs, request.best)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in eval mode. Routers drop no token, so that no text depends on
    neighbors. Layers report nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    routers = [module for module in model.modules() if isinstance(module, Router)]
    reports = [module for module in model.modules() if isinstance(module, StepReport)]
    recorded = [report.microbatch for report in reports]
    try:
        model.eval()
        for router in routers:
            router.is_exact = True
        for report in reports:
            report.microbatch = CurrentMicrobatch(records=False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for router in routers:
            router.is_exact = False
        for report, microbatch in zip(reports, recorded, strict=True):
            report.microbatch = microbatch
