"""What an engine samples can be trained: the end token is kept, and a training forward with the
same temperature gives the recorded log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Completion, Engine, Sampling
from megatron_lightning.layers.losses.loss import ALONE, Vocabulary, losses_of
from megatron_lightning.models import GPTModel
from megatron_lightning.models.teacher_student import ReferencePair
from megatron_lightning.models.token_outputs import (
    entropies_of,
    set_temperature,
    token_logits,
    token_losses_of,
)

PROMPT = [3, 5, 7]


def _gpt(**changes: Any) -> GPTModel:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 16}
    config = TransformerConfig(**sizes, max_sequence_length=32, **changes)  # type: ignore[arg-type]
    return GPTModel(config).eval()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def _trained_logprobs(model: nn.Module, text: Completion) -> Tensor:
    row = torch.tensor([PROMPT + text.sampled_tokens])
    return -token_losses_of(model, row[:, :-1], row[:, 1:])[0, len(PROMPT) - 1 :]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_recorded_log_probabilities_are_those_of_training(softcap: float | None) -> None:
    model = _gpt(final_logit_softcapping=softcap)
    engine = Engine.of(model, stops=range(4))
    sampling = Sampling(max_new_tokens=12, temperature=0.6, seed=4)
    texts = engine.generate([PROMPT], sampling, 6)[0]
    assert {text.reason for text in texts} == {"stop", "length"}
    for text in texts:
        recorded = torch.tensor(text.sampled_logprobs)
        assert (_trained_logprobs(model, text) - recorded).abs().max() > 1e-3  # temperature 1
        set_temperature(model, 0.6)
        torch.testing.assert_close(_trained_logprobs(model, text), recorded, rtol=0, atol=1e-5)
        set_temperature(model, 1.0)


def test_the_end_token_is_kept() -> None:
    [[text]] = Engine.of(_gpt(), stops=range(16)).generate([PROMPT], Sampling(max_new_tokens=4))
    assert (text.tokens, text.logprobs, text.reason) == ([], [], "stop")
    assert text.end is not None
    assert text.sampled_tokens == [text.end[0]]
    assert text.sampled_logprobs == [text.end[1]]
    assert text.end[1] < 0


def test_losses_of_a_transformers_model_and_their_gradient_take_a_temperature() -> None:
    model = _llama()
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits: Tensor = model(input_ids=inputs).logits
    wanted = nn.functional.cross_entropy((logits / 0.7).transpose(1, 2), labels, reduction="none")
    parameters = list(model.parameters())
    expected = torch.autograd.grad(wanted.sum(), parameters)
    set_temperature(model, 0.7)
    losses = token_losses_of(model, inputs, labels)
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-6)
    for grad, want in zip(torch.autograd.grad(losses.sum(), parameters), expected, strict=True):
        assert (grad - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("make", [_gpt, _llama])
def test_logits_and_their_losses_elsewhere_have_no_temperature(
    make: Callable[[], nn.Module],
) -> None:
    """Distillation divides the logits of both models by its own temperature."""
    model, tokens = make(), torch.tensor([PROMPT])
    expected, _ = token_logits(model, tokens)
    set_temperature(model, 0.5)
    logits, vocabulary = token_logits(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert vocabulary.temperature == 1.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_divides_nothing_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="Set a number above 0"):
        set_temperature(_gpt(), temperature)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_capped_and_divided_logits_are_those_of_autograd(
    softcap: float | None,
) -> None:
    logits = 3.0 * torch.randn(5, 16, generator=torch.Generator().manual_seed(3)).double()
    targets = torch.arange(5)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses_of(
        ours, targets, Vocabulary(ALONE, 16, softcap=softcap, temperature=0.6)
    ).sum().backward()
    x = theirs if softcap is None else (theirs / softcap).tanh() * softcap
    nn.functional.cross_entropy(x / 0.6, targets, reduction="sum").backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_reference_takes_its_temperature() -> None:
    pair = ReferencePair(_llama(), _llama())
    set_temperature(pair.frozen, 0.7)
    set_temperature(pair.trained, 0.7)
    tokens = torch.tensor([PROMPT])
    reference, policy = pair(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(reference, policy)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_entropies_are_those_of_the_divided_logits(kind: str) -> None:
    """By chunks of rows and positions, in order, and without a trace in later calls."""
    model = _gpt(final_logit_softcapping=4.0) if kind == "gpt" else _llama()
    tokens = torch.randint(0, 16, (3, 7), generator=torch.Generator().manual_seed(1))
    set_temperature(model, 0.6)
    plain = token_losses_of(model, tokens, tokens)
    with entropies_of(model) as found:
        losses = token_losses_of(model, tokens, tokens)
    with torch.no_grad():
        output = model(tokens)
    log_p = (output if kind == "gpt" else output.logits).div(0.6).log_softmax(-1)
    torch.testing.assert_close(found.of(tokens), -(log_p.exp() * log_p).sum(-1))
    assert found.of(tokens).std() > 1e-3
    torch.testing.assert_close(losses, plain)
    token_losses_of(model, tokens, tokens)
    assert len(found.calls) == 1
