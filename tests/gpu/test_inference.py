"""Text on a GPU: the kernel over pages, and every other path of the engine, beside the uncached
forward and ``transformers``.

fp32 texts are equal token by token. In bf16 two correct computations choose different tokens where
two are nearly equally likely: log-probabilities are compared, with those of the same bf16 forward
without a cache as the scale.
"""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import SampleText
from megatron_lightning.compat import ragged_attention
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.inference import Engine, EngineOptions, Sampling, load_engine, sample
from megatron_lightning.inference.commands.load import find_codec
from megatron_lightning.inference.engine.uncached_loop import draw
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.distributed.test_generate import save_plain
from tests.distributed.test_inference_engine import (
    CONFIGS,
    PROMPTS,
    cache_of,
    texts_of,
    without_capacity,
)
from tests.helpers.attention import exact_attention
from tests.helpers.layouts import tiny_config
from tests.helpers.trainers import Losses, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = "cuda:0"
ACCELERATOR = "gpu"
GREEDY = Sampling(max_new_tokens=16, temperature=0.0)
DRAWN = Sampling(max_new_tokens=16, temperature=0.9, top_k=20, top_p=0.9, seed=5)
CHUNKS = EngineOptions(max_tokens=9, max_requests=4)
MB = 1 << 20


def engine_of(name: str, folder: Path, dtype: Any, options: EngineOptions | None = None) -> Engine:
    path = save_plain(folder / name, CONFIGS[name])
    return Engine.load(path, device=CUDA, dtype=dtype, options=options)


def full_forward(name: str, engine: Engine, dtype: torch.dtype) -> GPTModel:
    model = GPTModel(without_capacity(CONFIGS[name])).eval()
    model.load_state_dict(engine.model.state_dict())
    return model.to(CUDA, dtype)


def uncached(model: GPTModel, sampling: Sampling, prompts: Any = PROMPTS) -> list[list[int]]:
    """Return new tokens by a full forward for each."""

    @torch.inference_mode()
    def logits(tokens: Tensor, last: Tensor) -> Tensor:
        return model(tokens.to(CUDA))[torch.arange(len(tokens)), last].cpu()

    longest = model.config.max_sequence_length
    texts = sample(logits, prompts, sampling, max_sequence_length=longest)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@torch.inference_mode()
def logprobs_of(model: GPTModel, prompt: list[int], new: list[int]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of new tokens, and of the best tokens, by one full forward."""
    tokens = torch.tensor([prompt + new], device=CUDA)
    rows = model(tokens)[0, len(prompt) - 1 : -1].double().log_softmax(-1).cpu()
    return rows.gather(1, torch.tensor(new)[:, None])[:, 0], rows.max(-1).values


class Kernel:
    """Counts calls of the attention kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self._kernel: Any = ragged_attention.varlen_attn
        monkeypatch.setattr(ragged_attention, "varlen_attn", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        return self._kernel(*args, **options)


# ------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_text_is_that_of_the_uncached_forward(name: str, tmp_path: Path) -> None:
    engine = engine_of(name, tmp_path, "float32", CHUNKS)
    model = full_forward(name, engine, torch.float32)
    for sampling in (GREEDY, DRAWN):
        expected = uncached(model, sampling)
        assert texts_of(engine, sampling) == expected
        assert len({token for text in expected for token in text}) > 15


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "experts"])
def test_bf16_log_probabilities_are_as_near_as_those_of_a_full_forward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 moves a token to other experts, so models of experts have no such scale."""
    kernel = Kernel(monkeypatch)
    engine = engine_of(name, tmp_path, "bfloat16", replace(CHUNKS, block_size=256))
    assert torch.bfloat16 in {p.dtype for p in engine.model.parameters()}
    found = [one for (one,) in engine.generate(PROMPTS, GREEDY)]
    # A latent's keys are wider than its values, and neither sinks nor fp32 scores have a kernel.
    uses = name in ("grouped", "window", "sliding", "states", "delta net")
    assert (kernel.num_calls > 0) == uses
    exact = full_forward(name, engine, torch.float32)
    rounded = engine.model
    errors, scales, gaps = [], [], []
    longest = CONFIGS[name].max_sequence_length
    for prompt, one in zip(PROMPTS, found, strict=True):
        if len(prompt) + len(one.tokens) > longest:
            continue
        own, best = logprobs_of(exact, prompt, one.tokens)
        errors.append((torch.tensor(one.logprobs) - own).abs())
        scales.append((logprobs_of(rounded, prompt, one.tokens)[0] - own).abs())
        gaps.append(best - own)
    error, scale, gap = (torch.cat(values).mean().item() for values in (errors, scales, gaps))
    # Means over about 90 tokens, each rounded some 30 times: a factor of 2 is far outside of
    # chance, and a wrong key costs nats.
    assert error < 2 * scale + 0.01, (error, scale, gap)
    assert gap < 2 * scale + 0.01, (error, scale, gap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "size"), [(8, 64), (2, 128), (1, 96), (2, 256)])
@pytest.mark.parametrize("window", [-1, 40])
def test_the_kernel_over_pages(dtype: torch.dtype, groups: int, size: int, window: int) -> None:
    """Pages in any order, several pages a request, chunks: against scores in fp64."""
    torch.manual_seed(0)
    counts, ends, block = [5, 1, 300, 1, 70], [5, 513, 700, 1, 90], 256
    tables, pages = [], (torch.randperm(9) + 1).tolist()
    for end in ends:
        tables.append([pages.pop() for _ in range(-(-end // block))])
    pools = torch.randn(2, 10 * block, groups, size, device=CUDA, dtype=dtype)
    q = torch.randn(sum(counts), 8, size, device=CUDA, dtype=dtype)
    from megatron_lightning.layers.state import key_cache

    numbers = torch.tensor([counts, ends], dtype=torch.int32)
    both = torch.cat((numbers, torch.nn.functional.pad(numbers.cumsum(1), (1, 0))), 1)
    table = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tables], batch_first=True)
    paged = key_cache.paged(
        block, table.int().to(CUDA), both.int().to(CUDA),
        longest=max(counts), most_keys=max(ends), num_slots=sum(ends),
    )  # fmt: skip
    form: dict[str, Any] = {"scale": size**-0.5, "window": window}
    keys, values = (pool[paged.slots] for pool in pools)
    results = [ragged_attention.attend_ragged(q, keys, values, paged.rows, **form)]
    if ragged_attention.reads_pages():
        pool_keys, pool_values = (pool.unflatten(0, (-1, block)) for pool in pools)
        results.append(
            ragged_attention.attend_pages(
                q,
                pool_keys,
                pool_values,
                paged.rows,
                table=paged.table,
                num_keys=paged.num_keys,
                **form,
            )
        )
    first = first_key = 0
    for count, end, pages_of in zip(counts, ends, tables, strict=True):
        slots = torch.cat([torch.arange(p * block, (p + 1) * block) for p in pages_of])[:end]
        assert paged.slots[first_key : first_key + end].tolist() == slots.tolist()
        k, v = (pool[slots] for pool in pools)
        own = q[first : first + count]
        expected = exact_attention(own, k, v, scale=size**-0.5, window=window)
        for result in results:
            # Weights and results are rounded: bf16 has 8 bits.
            torch.testing.assert_close(
                result[first : first + count].double(), expected, rtol=2e-2, atol=2e-2
            )
        first, first_key = first + count, first_key + end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_samples_share_the_keys_of_a_prompt(storage: Any, dtype: Any, tmp_path: Path) -> None:
    options = EngineOptions(storage=storage, block_size=4)
    engine = engine_of("grouped", tmp_path, dtype, options)
    found = engine.generate(PROMPTS, DRAWN, num_samples=3)
    assert engine.num_steps == GREEDY.max_new_tokens + 1
    assert len({tuple(one.tokens) for one in found[0]}) == 3
    if dtype == "float32":
        apart = texts_of(engine, DRAWN, [prompt for prompt in PROMPTS for _ in range(3)])
        assert [one.tokens for samples in found for one in samples] == apart


def test_full_caches_let_the_youngest_wait(tmp_path: Path) -> None:
    texts, num_steps = [], []
    for storage in ("runs", "pages"):
        engine = engine_of("grouped", tmp_path, "float32", cache_of(56, storage))
        texts.append(texts_of(engine, GREEDY))
        num_steps.append(engine.num_steps)
    expected = uncached(full_forward("grouped", engine, torch.float32), GREEDY)
    assert texts == [expected, expected]
    assert min(num_steps) > 2 * GREEDY.max_new_tokens


def test_scores(tmp_path: Path) -> None:
    engine = engine_of("grouped", tmp_path, "float32", CHUNKS)
    model = full_forward("grouped", engine, torch.float32)
    found = [one for (one,) in engine.generate(PROMPTS, DRAWN)]
    scores = engine.score(PROMPTS, [one.tokens for one in found])
    for prompt, one, score in zip(PROMPTS, found, scores, strict=True):
        expected, best = logprobs_of(model, prompt, one.tokens)
        # fp32: sums in another order, of logits up to 50
        torch.testing.assert_close(
            torch.tensor(score.logprobs).double(), expected, rtol=1e-4, atol=1e-4
        )
        assert [value for _, value in score.best] == pytest.approx(best.tolist(), abs=1e-4)


def test_drafts_leave_the_text(tmp_path: Path) -> None:
    config = replace(CONFIGS["grouped"], mtp_num_layers=2)
    path = save_plain(tmp_path / "drafting", config)
    plain = Engine.load(path, device=CUDA, dtype="float32")
    options = EngineOptions(draft_tokens=2, max_tokens=24, max_requests=4)
    drafting = Engine.load(path, device=CUDA, dtype="float32", options=options)
    for sampling in (GREEDY, DRAWN):
        assert texts_of(drafting, sampling) == texts_of(plain, sampling)
    assert drafting.draft_counts.proposed > 0
    half = Engine.load(path, device=CUDA, dtype="bfloat16", options=options)
    assert all(len(text) == GREEDY.max_new_tokens for text in texts_of(half, GREEDY))


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_are_drawn_as_on_the_cpu(deterministic: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 5000, generator=draws)
    samplings = [
        Sampling(
            temperature=(0.3, 0.9, 2.0)[i % 3],
            top_k=(None, 1, 20, 10**6)[i % 4],
            top_p=(1.0, 0.9, 0.3)[i // 2 % 3],
        )
        for i in range(40)
    ]
    found = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for device in ("cpu", CUDA):
            generators = [torch.Generator().manual_seed(i) for i in range(40)]
            found.append([draw(logits.to(device), samplings, generators) for _ in range(5)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]
    assert len({token for row in found[0] for token in row}) > 50


# -------------------------------------------------------------------------------------- in the fit

FIT = tiny_config(
    num_layers=4,
    num_query_groups=2,
    vocab_size=290,
    max_sequence_length=64,
    init_method_std=0.3,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(["def f(x):\n    return x\n", "import os, sys\n"] * 20, 290, path)
    return str(path)


def _fit(tokenizer: str, precision: Any, *, writes: bool) -> tuple[list[float], SampleText, int]:
    draws = torch.Generator().manual_seed(3)
    rows: Any = [
        {"tokens": text[:-1], "labels": text[1:]}
        for text in torch.randint(0, 290, (32, 25), generator=draws)
    ]
    losses = Losses()
    texts = SampleText(
        ["def f(x):", "import", "return x, sys"], every_n_steps=2, max_new_tokens=10,
        temperature=0.8, tokenizer_model=tokenizer,
    )  # fmt: skip
    run = trainer(
        MegatronStrategy(micro_batch_size=4), accelerator=ACCELERATOR, devices=1, max_steps=4,
        callbacks=[losses, *([texts] if writes else [])], precision=precision,
        gradient_clip_val=1.0,
    )  # fmt: skip
    module = GPTLightningModule(FIT, learning_rate=1e-2)
    run.fit(module, DataLoader(rows, batch_size=8))
    gc.collect()  # of fits before
    allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return losses.losses, texts, allocated


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_text_in_a_fit_changes_no_loss(precision: str, tokenizer: str) -> None:
    first, _, _ = _fit(tokenizer, precision, writes=False)  # makes workspaces of libraries, too
    plain, _, before = _fit(tokenizer, precision, writes=False)
    assert plain == first, "two equal fits differ"
    written, texts, after = _fit(tokenizer, precision, writes=True)
    assert written == plain
    assert [(step, [len(row) for row in rows]) for step, rows in texts.texts] == [
        (2, [1, 1, 1]),
        (4, [1, 1, 1]),
    ]
    assert len({text for _, rows in texts.texts for row in rows for text in row}) > 2
    assert after <= before + MB  # the cache alone would be 10 MB


# ---------------------------------------------------------------------------- folders and commands


def spoken(parent: Path, **options: Any) -> Path:
    pytest.importorskip("transformers")
    from tests.helpers.spoken import make_spoken

    return make_spoken(parent, **options)


def theirs(folder: Path, prompts: Any, most: int) -> list[list[int]]:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(CUDA).eval()
    return [
        model.generate(
            torch.tensor([prompt], device=CUDA),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=CUDA),
            max_new_tokens=most, do_sample=False, pad_token_id=0, eos_token_id=-1,
        )[0].tolist()[len(prompt) :]
        for prompt in prompts
    ]  # fmt: skip


FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt-oss", "deepseek-v3", "qwen3-moe")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.helpers.gpt_folders import make_folder

    folder = make_folder(name, tmp_path, initializer_range=0.4)
    prompts = [[1, 2, 3], [7], list(range(1, 22))]
    options = EngineOptions(max_tokens=6, max_requests=3)
    engine = load_engine(folder, device=CUDA, dtype="float32", options=options)
    assert isinstance(engine, Engine)
    assert texts_of(engine, GREEDY, prompts) == theirs(folder, prompts, 16)


def test_untouched_models_write_by_their_own_generate(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.distributed.test_inference_folders import make_neox

    make_neox(tmp_path / "neox")
    prompts = [[1, 2, 3], [7]]
    for dtype in ("float32", "bfloat16"):
        engine: Any = load_engine(tmp_path / "neox", device=CUDA, dtype=dtype)
        assert type(engine).__name__ == "OwnGenerate"
        tensors = [*engine.model.parameters(), *engine.model.buffers()]
        assert {tensor.device for tensor in tensors} == {torch.device(CUDA)}
        texts = texts_of(engine, GREEDY, prompts)
        if dtype == "float32":
            assert texts == theirs(tmp_path / "neox", prompts, 16)
            assert all(score.is_greedy for score in engine.score(prompts, texts))


def test_the_harness_scores_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval.evaluator")
    from megatron_lightning.inference.commands.evaluate import sharing_of
    from megatron_lightning.inference.commands.harness import HarnessModel
    from tests.distributed.test_inference_harness import OFFLINE, results_of, write_tasks

    # The last one is set by lm_eval.
    for variable, value in {**OFFLINE, "HF_XET_HIGH_PERFORMANCE": "1"}.items():
        monkeypatch.setenv(variable, value)
    folder, tasks = spoken(tmp_path), write_tasks(tmp_path / "tasks")
    codec, found = find_codec(folder), []
    for device in ("cpu", CUDA):
        engine = load_engine(
            folder, device=device, dtype="float32", stops=codec.stops, decode=codec.decode
        )
        assert {p.device for p in engine.model.parameters()} == {torch.device(device)}
        found.append(results_of(HarnessModel(engine, codec, sharing_of(engine)), tasks))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)  # fp32 on other kernels
    assert found[0][1] == found[1][1]


def test_the_command(tmp_path: Path) -> None:
    folder = spoken(tmp_path)
    command = [
        *(sys.executable, "-m", "megatron_lightning", "generate", "--checkpoint", str(folder)),
        *("--prompts", '["def f(x):", "import"]', "--temperature", "0", "--max_new_tokens", "24"),
        *("--device", CUDA.partition(":")[0], "--dtype", "float32"),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    codec = find_codec(folder)
    ids = [codec.encode(prompt) for prompt in ("def f(x):", "import")]
    engine: Any = load_engine(folder, device=CUDA, stops=codec.stops, decode=codec.decode)
    for prompt, (one,) in zip(
        ("def f(x):", "import"),
        engine.generate(ids, replace(GREEDY, max_new_tokens=24)),
        strict=True,
    ):
        assert prompt + codec.decode(one.tokens) in found.stdout


def test_the_server_answers_as_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    folder = spoken(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "megatron_lightning", "serve", "--checkpoint", str(folder)),
        *("--port", str(port), "--device", CUDA.partition(":")[0], "--dtype", "float32"),
    ]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors)
    try:
        deadline = time.monotonic() + 60
        while "serving" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        body = {"prompt": "def f(x):", "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        for _ in range(50):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    text = json.load(answer)["choices"][0]["text"]
                break
            except urllib.error.URLError:
                time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    codec = find_codec(folder)
    engine: Any = load_engine(folder, device=CUDA, stops=codec.stops, decode=codec.decode)
    [[one]] = engine.generate([codec.encode("def f(x):")], replace(GREEDY, max_new_tokens=12))
    assert text == codec.decode(one.tokens)
