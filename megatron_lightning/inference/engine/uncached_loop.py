"""The sampling loop: token by token from a function for the next token's logits.

The loop knows neither model nor layout. Every rank runs the loop on the same logits and so chooses
the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError

NextLogits = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens [b, s], padded on the right, and the index of each row's last token [b] to the next
token's logits [b, v]."""
_LEAST_TEMPERATURE = 1e-6
_SEEDS = 1 << 63
_ROWS = 16
"""Rows of logits in fp64 at a time on GPUs. On CPUs one row, which stays in the cache."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of sampling.

    Raises:
        ConfigError: If a value is out of range.
    """

    max_new_tokens: int = 64
    """Tokens added to each prompt, at most."""
    temperature: float = 1.0
    """Divides the logits. 0: always the most likely token. Otherwise 1e-6 or more."""
    top_k: int | None = None
    """Choose among this number of the most likely tokens. None: all."""
    top_p: float = 1.0
    """Choose among the most likely tokens with this total probability (nucleus sampling,
    arXiv:1904.09751)."""
    seed: int = 1234
    """Seed of the draws. Each prompt has a separate stream, so a text does not depend on the other
    prompts."""
    stop: tuple[str, ...] = ()
    """Strings at the end of a text. The text is returned without a stop string. Stop strings may
    begin and end inside of tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} must be a positive integer. Set it to 1 or "
                "more."
            )
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} is no finite number from 0 on. Set it to 0 (most "
                "likely token) or more."
            )
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature} would divide logits beyond the range of fp64 for "
                f"no other text than temperature=0. Set it to 0, or to {_LEAST_TEMPERATURE} or "
                "more."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k={self.top_k} leaves no token to choose. Set it to 1 or more, or leave it "
                "out."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"top_p={self.top_p} is not a probability above 0. Set it above 0 and at most 1."
            )
        if not -_SEEDS <= self.seed < _SEEDS:
            raise ConfigError(f"seed={self.seed} has more than 64 bits. Set it below 2^63.")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError(
                f"stop={self.stop!r} is not a list of strings with characters. Set it to a list, "
                "such as ['\\n\\n']."
            )

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return a token for ``logits`` [v], of any floating dtype and device, drawn from a CPU
        ``generator``.
        """
        if self.temperature == 0.0:
            return int(logits.argmax())
        return draw(logits[None], [self], [generator])[0]


def draw(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> list[int]:
    """Return a token for each row of logits.

    Args:
        logits: [d, v] of any floating dtype and device.
        samplings: Options of each row, with a temperature above 0.
        generators: Generator of each row, on the CPU. Each gives one number.
    """
    if torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()  # cumulative sums of GPUs are rounded in any order
    tokens: list[int] = []
    count = 1 if logits.device.type == "cpu" else _ROWS
    for start in range(0, len(logits), count):
        rows = slice(start, start + count)
        own, most = samplings[rows], logits.shape[1] - 1
        probabilities = _filtered(logits[rows].detach(), own).softmax(dim=-1)
        # In the vocabulary's order, not by probability: layouts round differently, and a swap of
        # two near-equal probabilities would give another token.
        cumulative = probabilities.cumsum(dim=-1)
        shares = [
            torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
            for generator in generators[rows]
        ]
        points = torch.stack(shares)[:, None].to(logits.device) * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, points, right=True).clamp(max=most)
        tokens += found[:, 0].tolist()
    return tokens


def _filtered(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return logits [d, v] divided by the temperatures in fp64, with tokens outside of top-k and
    top-p at minus infinity.
    """
    size = logits.shape[1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits.double() / column([own.temperature for own in samplings])
    numbers = [size if own.top_k is None else min(own.top_k, size) for own in samplings]
    if min(numbers) < size:
        best = scaled.topk(max(number for number in numbers if number < size)).values
        last = torch.tensor([[min(number, best.shape[1]) - 1] for number in numbers])
        least = best.gather(1, last.to(logits.device))
        least = least.masked_fill(column(numbers) == size, -torch.inf)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if min(own.top_p for own in samplings) < 1.0:
        ordered, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
        sum_before = ordered.cumsum(dim=-1) - ordered  # the token crossing the threshold stays
        limits = column([own.top_p if own.top_p < 1.0 else math.inf for own in samplings])
        behind = torch.zeros_like(tokens, dtype=torch.bool)
        behind.scatter_(1, tokens, sum_before >= limits)
        scaled = scaled.masked_fill(behind, -torch.inf)
    return scaled


def check_num_samples(num_samples: int) -> None:
    """Check the number of texts of each prompt.

    Raises:
        ConfigError: If the number is below 1.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples}. Set it to 1 or more.")


def sample(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    eod: int | None = None,
    max_sequence_length: int | None = None,
) -> list[list[int]]:
    """Continue ``prompts``.

    Args:
        next_logits: The model.
        prompts: Token ids of each prompt, at least one id.
        sampling: How tokens are chosen.
        eod: End token of a text. The end token is not returned. None: every text gets
            ``max_new_tokens``.
        max_sequence_length: Longest input of the model. None: unlimited.

    Returns:
        The ids of each prompt and continuation.

    Raises:
        ConfigError: If a prompt is empty.
    """
    if any(not prompt for prompt in prompts):
        raise ConfigError(
            "a prompt has no tokens, so there is nothing to continue. Start it with the "
            "end-of-document token."
        )
    texts = [list(prompt) for prompt in prompts]
    # A generator for each text, so that a text does not depend on its neighbors.
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(texts))]
    unfinished = list(range(len(texts)))
    for _ in range(sampling.max_new_tokens):
        if not unfinished:
            break
        inputs = [texts[row][-(max_sequence_length or 0) :] for row in unfinished]
        logits = next_logits(*_padded(inputs))
        chosen = {
            row: sampling.choose(logits[i], generators[row]) for i, row in enumerate(unfinished)
        }
        unfinished = [row for row in unfinished if chosen[row] != eod]
        for row in unfinished:
            texts[row].append(chosen[row])
    return texts


def _padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens [b, s], padded on the right (causal attention ignores the padding), and the
    index of each row's last token [b].
    """
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(text) for text in texts], batch_first=True
    )
    return tokens, torch.tensor([len(text) - 1 for text in texts])
