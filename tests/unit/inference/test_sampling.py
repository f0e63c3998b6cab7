"""Tokens of several requests: each row of logits has options of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lightning.inference import Sampling
from megatron_lightning.inference.engine import uncached_loop as sampling_module
from megatron_lightning.inference.engine.uncached_loop import draw

transformers = pytest.importorskip("transformers")

ROWS, VOCABULARY = 24, 200
SAMPLINGS = [
    Sampling(
        temperature=(0.3, 0.9, 2.0)[i % 3],
        top_k=(None, 1, 20, 10**6)[i % 4],
        top_p=(1.0, 0.9, 0.3)[i // 2 % 3],
    )
    for i in range(ROWS)
]


def _logits() -> Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))


def _expected(logits: Tensor, sampling: Sampling) -> Tensor:
    scores = logits.double()[None]
    warpers = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0]


def test_rows_keep_the_tokens_that_transformers_keeps() -> None:
    logits = _logits()
    found = sampling_module._filtered(logits, SAMPLINGS)
    for row, kept, sampling in zip(logits, found, SAMPLINGS, strict=True):
        torch.testing.assert_close(kept, _expected(row, sampling))


def test_draws_take_one_number_of_each_generator() -> None:
    logits = _logits()
    generators = [torch.Generator().manual_seed(i) for i in range(ROWS)]
    together = draw(logits, SAMPLINGS, generators)
    for i, row in enumerate(logits):
        generator = torch.Generator().manual_seed(i)
        weights = _expected(row, SAMPLINGS[i]).softmax(-1)
        share = torch.rand((), generator=generator, dtype=torch.float64)
        # The first token with a larger sum of probabilities up to and including the token.
        assert together[i] == int((weights.cumsum(-1) <= share * weights.sum()).sum())
        assert generators[i].get_state().equal(generator.get_state())
