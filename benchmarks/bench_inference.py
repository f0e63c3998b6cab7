"""Text by the engine, compared with ``transformers`` and with the uncached loop: CPU time of one
process, one thread, the same weights, in turns.

    python -m benchmarks.bench_inference                  # 5 rounds in fp32
    python -m benchmarks.bench_inference --dtype bfloat16
    python -m benchmarks.bench_inference --quick          # a tiny model: does it run?

A Llama of 46 million parameters, 16 requests with prompts of 8 to 127 tokens and 16 to 95 new ones.
The peers are ``generate`` on a left-padded batch, which computes the longest text for all, and the
continuous batching of ``transformers``. Drafts by a layer of multi-token prediction are compared
with the same engine without drafts, for one request and for 16, on a model whose text follows a
permutation of the vocabulary, so that drafts are accepted. Ratios are of the rounds' pairs: median,
and the lower end of a 90 % interval by resampling rounds.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.inference import Engine, EngineOptions, Sampling, sample
from megatron_lightning.models import GPTModel
from tests.helpers.hf_weights import from_llama

GOALS = {"transformers, static batch": 1.15, "transformers, continuous batching": 1.1}
UNCACHED_GOAL = 10.0
NUM_UNCACHED = 8  # new tokens: the loop is slow


class Case:
    """One model, and requests to it.

    Args:
        dtype: Of the weights.
        quick: Whether the model is tiny.
    """

    def __init__(self, dtype: torch.dtype, *, quick: bool) -> None:
        layers, hidden, vocabulary = (2, 64, 256) if quick else (12, 512, 8192)
        self.vocabulary = vocabulary
        sizes: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": vocabulary,
            "max_position_embeddings": 1024,
            "intermediate_size": 3 * hidden,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.05,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        torch.manual_seed(0)
        self.theirs: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        self.theirs = self.theirs.eval().to(dtype)
        config = _config(layers, hidden, vocabulary)
        self.model = GPTModel(config)
        self.model.load_state_dict(from_llama(self.theirs.state_dict(), config))
        self.model = self.model.eval().to(dtype)
        self.engine = Engine.of(self.model)
        draws = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 128, (16,), generator=draws).tolist()
        self.wanted: list[int] = torch.randint(16, 96, (16,), generator=draws).tolist()
        self.prompts = [
            torch.randint(1, vocabulary, (n,), generator=draws).tolist() for n in lengths
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
            ids, attention_mask=mask, max_new_tokens=max(self.wanted), do_sample=False
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


class DraftCase:
    """A model with a layer of multi-token prediction, with and without drafts.

    Args:
        dtype: Of the weights.
        num_requests: Requests at once.
        quick: Whether the model is tiny.
    """

    def __init__(self, dtype: torch.dtype, num_requests: int, *, quick: bool) -> None:
        layers, hidden, vocabulary = (2, 64, 256) if quick else (12, 512, 8192)
        config = _config(layers, hidden, vocabulary, mtp_num_layers=1)
        model = GPTModel(config).eval()
        draws = torch.Generator().manual_seed(1)
        following = torch.randperm(vocabulary, generator=draws)
        with torch.no_grad():
            words = model.embedding.word_embeddings.weight
            words.copy_(torch.randn(vocabulary, hidden, generator=draws))
            model.output_layer.weight[following] = words
            for layer in model.mtp.layers.values() if model.mtp is not None else ():
                layer.eh_proj.weight[:, :hidden] += torch.eye(hidden)
        model = model.to(dtype)
        self._sampling = Sampling(max_new_tokens=64, temperature=0.0)
        self._prompts = torch.randint(1, vocabulary, (num_requests, 32), generator=draws).tolist()
        self._plain = Engine.of(model)
        self._drafting = Engine.of(model, options=EngineOptions(draft_tokens=1))

    def plain(self) -> list[list[int]]:
        """Write without drafts."""
        return self._texts(self._plain)

    def drafting(self) -> list[list[int]]:
        """Write with drafts."""
        return self._texts(self._drafting)

    def measure(self, num_rounds: int) -> str:
        """Return a row of the table."""
        times: dict[str, list[float]] = {"plain": [], "drafting": []}
        texts: dict[str, list[list[int]]] = {}
        for _ in range(1 + num_rounds):
            for name, work in (("plain", self.plain), ("drafting", self.drafting)):
                seconds, texts[name] = _seconds(work)
                times[name].append(seconds)
        median, least = _ratio(times["plain"][1:], times["drafting"][1:])
        count = len(self._prompts)
        equal = sum(a == b for a, b in zip(texts["plain"], texts["drafting"], strict=True))
        speed = 64 * count / statistics.median(times["drafting"][1:])
        steps = self._drafting.num_steps / self._plain.num_steps
        accepted = self._drafting.draft_counts.acceptance
        return (
            f"| {count} | {speed:.1f} | {median:.2f} | {least:.2f} | {steps:.2f} | {accepted:.2f} "
            f"| {equal}/{count} |"
        )

    def _texts(self, engine: Engine) -> list[list[int]]:
        return [one.tokens for (one,) in engine.generate(self._prompts, self._sampling)]


def _config(layers: int, hidden: int, vocabulary: int, **own: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=4,
        vocab_size=vocabulary,
        max_sequence_length=1024,
        ffn_hidden_size=3 * hidden,
        **own,
    )


def _seconds(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.process_time()
    texts = work()
    return time.process_time() - start, texts


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Return the median ratio of the rounds, and the lower end of its 90 % interval."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[len(medians) // 20]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    case = Case(getattr(torch, options.dtype), quick=options.quick)
    works = {
        "engine": case.by_engine,
        "transformers, static batch": case.static,
        "transformers, continuous batching": case.continuous,
        "uncached": case.uncached,
        "engine, short": case.short,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    texts: dict[str, list[list[int]]] = {}
    for _ in range(1 + (1 if options.quick else options.rounds)):
        for name, work in works.items():
            seconds, texts[name] = _seconds(work)
            times[name].append(seconds)
    times = {name: own[1:] for name, own in times.items()}  # the first round warms up
    wanted = sum(case.wanted)
    print(f"{options.dtype}, {len(times['engine'])} rounds, torch {torch.__version__}")
    print("| | tokens/s of CPU time | engine is x | at least | goal | equal texts |")
    print("|---|---|---|---|---|---|")
    print(f"| engine | {wanted / statistics.median(times['engine']):.1f} | | | | |")
    for name, goal in GOALS.items():
        median, least = _ratio(times[name], times["engine"])
        equal = sum(a == b for a, b in zip(texts[name], texts["engine"], strict=True))
        speed = wanted / statistics.median(times[name])
        print(f"| {name} | {speed:.1f} | {median:.2f} | {least:.2f} | {goal} | {equal}/16 |")
    median, least = _ratio(times["uncached"], times["engine, short"])
    speed = 16 * NUM_UNCACHED / statistics.median(times["uncached"])
    equal = sum(a == b for a, b in zip(texts["uncached"], texts["engine, short"], strict=True))
    row = f"{speed:.1f} | {median:.1f} | {least:.1f} | {UNCACHED_GOAL} | {equal}/16"
    print(f"| uncached loop | {row} |")
    print("\n| requests with drafts | tokens/s | x without | at least | steps | accepted | equal |")
    print("|---|---|---|---|---|---|---|")
    for num_requests in (1, 16):
        drafts = DraftCase(getattr(torch, options.dtype), num_requests, quick=options.quick)
        print(drafts.measure(1 if options.quick else options.rounds))


if __name__ == "__main__":
    main()
