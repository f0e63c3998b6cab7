"""Texts by the engine, by ``transformers`` and by the uncached loop, with the same weights. The
share of products with weights in a step. Log-probabilities beside the training forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from megatron_lightning.config import TransformerConfig
from megatron_lightning.inference import Engine, EngineOptions, Sampling, sample
from megatron_lightning.models import GPTModel
from tests.helpers.hf_weights import from_llama
from tests.helpers.spoken import make_spoken

NUM_UNCACHED = 8  # new tokens: the loop is slow


class Sizes(NamedTuple):
    """Sizes of the model."""

    layers: int = 12
    hidden: int = 512
    vocabulary: int = 8192

    def make_folder(self, parent: Path) -> Path:
        """Write a folder of ``transformers`` with random weights, and return the folder."""
        return make_spoken(
            parent,
            name="model",
            length=1024,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=self.vocabulary,
            initializer_range=0.05,
            rms_norm_eps=1e-5,
        )

    def config(self, **own: Any) -> TransformerConfig:
        """Return our configuration of the model."""
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=8,
            num_query_groups=4,
            vocab_size=self.vocabulary,
            max_sequence_length=1024,
            ffn_hidden_size=3 * self.hidden,
            **own,
        )


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of ``work``, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


class Texts:
    """A model, and 16 requests to it: prompts of 8 to 127 tokens, 16 to 95 new ones.

    Args:
        folder: The model's folder.
        sizes: Sizes of the model.
        dtype: Dtype of the weights.
    """

    def __init__(self, folder: Path, sizes: Sizes, dtype: torch.dtype) -> None:
        self.theirs: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        self.theirs = self.theirs.eval()
        self.theirs.generation_config.eos_token_id = None
        config = sizes.config()
        self.model = GPTModel(config)
        self.model.load_state_dict(from_llama(self.theirs.state_dict(), config))
        self.model = self.model.eval().to(dtype)
        self.engine = Engine.of(self.model)
        draws = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 128, (16,), generator=draws).tolist()
        self.wanted: list[int] = torch.randint(16, 96, (16,), generator=draws).tolist()
        self.prompts = [
            torch.randint(1, sizes.vocabulary, (n,), generator=draws).tolist() for n in lengths
        ]

    def by_engine(self) -> list[list[int]]:
        """Write by the engine."""
        requests = [
            self.engine.requests.one(p, sampling=Sampling(max_new_tokens=n, temperature=0.0))
            for p, n in zip(self.prompts, self.wanted, strict=True)
        ]
        self.engine.run(requests)
        return [request.new_tokens for request in requests]

    @torch.inference_mode()
    def static(self) -> list[list[int]]:
        """Write by ``generate`` on a padded batch."""
        longest = max(map(len, self.prompts))
        ids = torch.zeros(16, longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self.theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(self.wanted),
            do_sample=False,
            pad_token_id=0,
        )
        return [out[row, longest : longest + n].tolist() for row, n in enumerate(self.wanted)]

    def continuous(self) -> list[list[int]]:
        """Write by the continuous batching of ``transformers``."""
        batching = transformers.ContinuousBatchingConfig(
            page_size=32, num_blocks=200, max_batch_tokens=512, return_logprobs=False
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=max(self.wanted), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        attention = self.theirs.config._attn_implementation
        with self.theirs.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, warmup=False
        ) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=n)
                for prompt, n in zip(self.prompts, self.wanted, strict=True)
            ]
            done: dict[str, Any] = {}
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result
        self.theirs.set_attn_implementation(attention)
        return [done[own].generated_tokens for own in ids]

    def uncached(self) -> list[list[int]]:
        """Write a few tokens by a full forward for each."""

        @torch.inference_mode()
        def logits(tokens: Tensor, last: Tensor) -> Tensor:
            out: Tensor = self.model(tokens)
            return out[torch.arange(len(tokens)), last]

        sampling = Sampling(max_new_tokens=NUM_UNCACHED, temperature=0.0)
        texts = sample(logits, self.prompts, sampling)
        return [text[len(p) :] for text, p in zip(texts, self.prompts, strict=True)]

    def short(self) -> list[list[int]]:
        """Write as many tokens by the engine."""
        sampling = Sampling(max_new_tokens=NUM_UNCACHED, temperature=0.0)
        return [one.tokens for (one,) in self.engine.generate(self.prompts, sampling)]

    def largest_difference(self) -> float:
        """Return the largest difference of log-probabilities of the texts to the training
        forward's.
        """
        largest = 0.0
        sampling = Sampling(max_new_tokens=32, temperature=1.0, seed=3)
        completions = self.engine.generate(self.prompts, sampling)
        for prompt, (one,) in zip(self.prompts, completions, strict=True):
            tokens = torch.tensor([prompt + one.tokens])
            with torch.no_grad():
                logits = self.model.train()(tokens)[0, len(prompt) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            found = torch.tensor(one.logprobs)
            largest = max(largest, float((found - expected).abs().max()))
        self.model.eval()
        return largest

    def product_shares(self, rounds: int) -> dict[int, list[tuple[float, float]]]:
        """Return, for numbers of requests, seconds of a decode step and of the step's products with
        weights alone, round by round.
        """
        weights = [
            p.detach()
            for name, p in self.model.named_parameters()
            if p.dim() == 2 and "embedding" not in name
        ]
        shares: dict[int, list[tuple[float, float]]] = {}
        for count in (1, 4, 16):
            prompts = self.prompts[:count]
            shares[count] = []
            for _ in range(rounds + 1):
                step = statistics.median(self._step_seconds(prompts))
                rows = {w.shape[1]: w.new_ones(count, w.shape[1]) for w in weights}
                products = _products_seconds(weights, rows)
                shares[count].append((step, products))
            shares[count] = shares[count][1:]
        return shares

    def _step_seconds(self, prompts: list[list[int]]) -> list[float]:
        """Return processor seconds of decode steps of the prompts."""
        sampling = Sampling(max_new_tokens=20, temperature=0.0)
        seconds: list[float] = []
        with self.engine.active() as scheduler:
            for prompt in prompts:
                scheduler.add(self.engine.requests.one(prompt, sampling=sampling))
            while self.engine.is_busy():
                spent, _ = cpu_seconds(self.engine.step)
                seconds.append(spent)
        return seconds[-16:]


@torch.inference_mode()
def _products_seconds(weights: list[Tensor], rows: dict[int, Tensor]) -> float:
    seconds = []
    for _ in range(8):
        spent, _ = cpu_seconds(lambda: [functional.linear(rows[w.shape[1]], w) for w in weights])
        seconds.append(spent)
    return statistics.median(seconds)


class Drafts:
    """A model with a layer of multi-token prediction, with and without drafts. Its text follows a
    permutation of the vocabulary, so that drafts are accepted.

    Args:
        sizes: Sizes of the model.
        num_requests: Requests at once.
    """

    def __init__(self, sizes: Sizes, num_requests: int) -> None:
        model = GPTModel(sizes.config(mtp_num_layers=1)).eval()
        draws = torch.Generator().manual_seed(1)
        following = torch.randperm(sizes.vocabulary, generator=draws)
        with torch.no_grad():
            words = model.embedding.word_embeddings.weight
            words.copy_(torch.randn(sizes.vocabulary, sizes.hidden, generator=draws))
            model.output_layer.weight[following] = words
            for layer in model.mtp.layers.values() if model.mtp is not None else ():
                layer.eh_proj.weight[:, : sizes.hidden] += torch.eye(sizes.hidden)
        self._sampling = Sampling(max_new_tokens=64, temperature=0.0)
        prompts = torch.randint(1, sizes.vocabulary, (num_requests, 32), generator=draws)
        self._prompts: list[list[int]] = prompts.tolist()
        self.plain = Engine.of(model)
        self.drafting = Engine.of(model, options=EngineOptions(draft_tokens=1))

    def texts(self, engine: Engine) -> list[list[int]]:
        """Return the texts by one of the two engines."""
        return [one.tokens for (one,) in engine.generate(self._prompts, self._sampling)]
