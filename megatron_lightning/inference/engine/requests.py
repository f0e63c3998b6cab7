"""Make requests of prompts, and of texts to score."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.continuation import SpellingDecode, text_behind
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.uncached_loop import Sampling, check_num_samples

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids. Called with ``special=True`` for the names of special tokens, if
the function has the argument, as :class:`~megatron_lightning.inference.commands.text_codec.Codec`
has."""

_MARGIN = 8
"""Tokens before a stop string, decoded together with the stop string: a token may be half of a
character."""


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Common properties of all requests to a model."""

    longest: int
    """Most input tokens of the model."""
    longest_short: int | None = None
    """Most input tokens before keys of all tokens are others. None: there is no such number."""
    stops: frozenset[int] = frozenset()
    """Token ids at the end of a text."""
    decode: Decode | None = None
    """Text of token ids. Required for stop strings."""

    def one(
        self,
        prompt: Sequence[int],
        continuation: Sequence[int] = (),
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        num_scored: int = 0,
    ) -> Request:
        """Return a request.

        Args:
            prompt: Token ids, at least one id.
            continuation: Token ids behind the prompt.
            sampling: Options of sampling. None: the defaults.
            seed: Seed of the draws. None: the seed of ``sampling``.
            num_scored: Number of last tokens to score. 0: generate new tokens.

        Raises:
            ConfigError: If the prompt is empty, or stop strings need a tokenizer.
        """
        sampling = sampling or Sampling()
        if not prompt:
            raise ConfigError(
                "a prompt has no tokens, so there is nothing to continue. Start it with the "
                "end-of-document token."
            )
        if sampling.stop and self.decode is None:
            raise ConfigError(
                f"stop={list(sampling.stop)} needs the tokenizer, and this engine has none. Pass "
                "decode, or leave stop out."
            )
        return Request(
            [*prompt, *continuation],
            sampling,
            torch.Generator().manual_seed(sampling.seed if seed is None else seed),
            self.longest,
            self.longest_short,
            self.stops,
            self._ends(sampling.stop, len(prompt)) if sampling.stop else None,
            num_scored,
        )

    def samples(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        num_samples: int,
        seeds: Sequence[int] | None,
    ) -> list[list[Request]]:
        """Return, for each of ``num_samples`` samples, a request for each prompt.

        Sample j of prompt i draws from the i-th of ``seeds`` plus j. Without seeds sample j of
        prompt i draws from the sampling's seed plus i * num_samples + j.

        Raises:
            ConfigError: If ``num_samples`` is below 1, a prompt is empty, or stop strings need a
                tokenizer.
        """
        check_num_samples(num_samples)
        if seeds is None:
            seeds = [sampling.seed + i * num_samples for i in range(len(prompts))]
        rows = [
            [
                self.one(prompt, sampling=sampling, seed=seed + j)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            for j in range(num_samples)
        ]
        for further_requests in rows[1:]:
            for leader, request in zip(rows[0], further_requests, strict=True):
                # The prompt is computed once, by the leader, and the others share its keys.
                request.leader = leader
                request.num_common = leader.num_common = leader.prompt_length
        return rows

    def scored(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> list[Request]:
        """Return a request for the log-probabilities of each continuation. Requests with the same
        context share the keys of the context.

        Raises:
            ConfigError: If a context or continuation is empty, or too long.
        """
        if len(contexts) != len(continuations):
            raise ConfigError(
                f"score was given {len(contexts)} contexts and {len(continuations)} continuations. "
                "Pass as many of both."
            )
        requests = list[Request]()
        leaders: dict[tuple[int, ...], Request] = {}
        for context, continuation in zip(contexts, continuations, strict=True):
            if not continuation or len(continuation) > self.longest:
                raise ConfigError(
                    f"a continuation has {len(continuation)} tokens, and the model can score 1 to "
                    f"{self.longest}. Score longer texts in windows."
                )
            num_scored = len(continuation)
            request = self.one(context, continuation, num_scored=num_scored)
            requests.append(request)
            if request.offset:
                continue  # the context begins at another token
            leader = leaders.setdefault(tuple(context), request)
            if leader is not request:
                request.leader = leader
                request.num_common = leader.num_common = len(context)
        return requests

    def _ends(self, stop: tuple[str, ...], num_prompt: int) -> Callable[[Sequence[int]], bool]:
        length = max(len(text.encode()) for text in stop) + _MARGIN
        decode = _with_special(self.decode)

        def ends(tokens: Sequence[int]) -> bool:
            # Not all tokens: decoding a text would take a time growing with the square of the
            # length.
            start = max(num_prompt, len(tokens) - length)
            text = text_behind(decode, tokens[:start], tokens[start:], special=True)
            return any(stop_text in text for stop_text in stop)

        return ends


def _with_special(decode: Decode | None) -> SpellingDecode:
    """Return a decode with both forms of a text. For a function without the argument both forms are
    the same.
    """
    plain = cast(Decode, decode)  # checked at the request
    try:
        if "special" in inspect.signature(plain).parameters:
            return cast(SpellingDecode, plain)
    except ValueError:  # some functions of C have no signature
        pass

    def with_special(ids: Sequence[int], *, special: bool = False) -> str:
        return plain(ids)

    return with_special
