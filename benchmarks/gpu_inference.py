"""Text by the engine on one GPU, beside ``transformers``, and folders read onto a GPU.

    python -m benchmarks.gpu --case inference   # or make gpu-bench CASE=inference

A random Llama of 1.1 billion parameters in bf16, and 48 requests with prompts of 16 to 511 tokens
and 64 to 191 new ones. The peers are ``generate`` on a left-padded batch, which computes the
longest text for all, and the continuous batching of ``transformers``. *Floor*: the time to read
weights and keys once, at the bandwidth of a copy on the same GPU.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_cases import Item, Numbers, gpu_times_ms
from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.hf_models.meta_models import deferred_weights
from megatron_lightning.bridge.hf_models.transformers_model import read_weights
from megatron_lightning.config import PipelineOptions
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve

LIMIT_S = 60.0
"""Of one batch of texts."""
ROUNDS = 2


@dataclass(frozen=True)
class TextShape:
    """Sizes of a model and of its requests."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    groups: int = 8
    ffn: int = 8192
    vocabulary: int = 32768
    longest: int = 1024
    num_requests: int = 48
    most_prompt: int = 512
    most_new: int = 192
    device: str = "cuda"

    @property
    def config(self) -> Any:
        """The configuration of ``transformers``."""
        return transformers.LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, intermediate_size=self.ffn,
            num_attention_heads=self.heads, num_key_value_heads=self.groups,
            vocab_size=self.vocabulary, max_position_embeddings=self.longest,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    def requests(self) -> tuple[list[list[int]], list[int]]:
        """Return prompts, and the number of new tokens of each."""
        draws = torch.Generator().manual_seed(0)
        lengths = torch.randint(16, self.most_prompt, (self.num_requests,), generator=draws)
        wanted = torch.randint(self.most_new // 3, self.most_new, lengths.shape, generator=draws)
        prompts = [
            torch.randint(1, self.vocabulary, (length,), generator=draws).tolist()
            for length in lengths.tolist()
        ]
        return prompts, wanted.tolist()


ONE_B = TextShape()


def _random_model(shape: TextShape) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(shape.device):
            return transformers.LlamaForCausalLM(shape.config).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _folder(shape: TextShape) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        model = _random_model(shape)
        model.save_pretrained(Path(parent, "model"), max_shard_size="600MB")
        del model
        yield Path(parent, "model")


def _synchronize(shape: TextShape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------- texts


class Texts:
    """The same requests by the engine and by ``transformers``.

    Args:
        shape: Sizes.
        folder: The model.
    """

    def __init__(self, shape: TextShape, folder: Path) -> None:
        self._shape, self._folder = shape, folder
        self.prompts, self.wanted = shape.requests()
        self._theirs: Any = None

    def engine(self, **options: Any) -> Engine:
        """Return an engine."""
        sizes: dict[str, Any] = {"max_tokens": 2048, "max_requests": 64, "cache_gib": 8.0}
        own = EngineOptions(**(sizes | options))
        return Engine.load(
            self._folder, device=self._shape.device, dtype="bfloat16", options=own, stops=()
        )

    @property
    def theirs(self) -> Any:
        """The model of ``transformers``."""
        if self._theirs is None:
            model = transformers.LlamaForCausalLM.from_pretrained(
                self._folder, dtype=torch.bfloat16
            )
            self._theirs = model.to(self._shape.device).eval()  # type: ignore[arg-type]
        return self._theirs

    def by_engine(self, engine: Engine, temperature: float = 0.0) -> list[list[int]]:
        """Write by the engine."""
        requests = [
            engine.requests.one(
                prompt, sampling=Sampling(max_new_tokens=number, temperature=temperature)
            )
            for prompt, number in zip(self.prompts, self.wanted, strict=True)
        ]
        engine.run(requests)
        return [request.new_tokens for request in requests]

    @torch.inference_mode()
    def static(self) -> list[list[int]]:
        """Write by ``generate`` on a padded batch."""
        longest = max(map(len, self.prompts))
        ids = torch.zeros(len(self.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self.theirs.generate(
            ids.to(self._shape.device), attention_mask=mask.to(self._shape.device),
            max_new_tokens=max(self.wanted), do_sample=False,
        )  # fmt: skip
        return [out[row, longest : longest + n].tolist() for row, n in enumerate(self.wanted)]

    @contextmanager
    def continuous(self) -> Iterator[Callable[[], list[list[int]]]]:
        """Yield a function that writes by the continuous batching of ``transformers``."""
        batching = transformers.ContinuousBatchingConfig(
            page_size=256, num_blocks=5 * len(self.prompts), max_batch_tokens=2048,
            return_logprobs=False,
        )  # fmt: skip
        generation = transformers.GenerationConfig(
            max_new_tokens=max(self.wanted), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with self.theirs.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        ) as manager:

            def write() -> list[list[int]]:
                ids = [
                    manager.add_request(prompt, max_new_tokens=number)
                    for prompt, number in zip(self.prompts, self.wanted, strict=True)
                ]
                done: dict[str, Any] = {}
                deadline = time.monotonic() + LIMIT_S
                while len(done) < len(ids):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{len(done)} of {len(ids)} texts in {LIMIT_S:.0f} s")
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        done[result.request_id] = result
                return [done[own].generated_tokens for own in ids]

            yield write

    def measure(self, write: Callable[[], list[list[int]]]) -> dict[str, Any]:
        """Return tokens a second of the second and later rounds."""
        seconds = []
        for _ in range(1 + ROUNDS):
            begin = time.perf_counter()
            texts = write()
            _synchronize(self._shape)
            seconds.append(time.perf_counter() - begin)
        return {
            "tokens_per_s": sum(self.wanted) / statistics.median(seconds[1:]),
            "first_s": seconds[0],
            "wall_s": seconds[1:],
            "texts": texts,
        }


def texts_beside_transformers(shape: TextShape = ONE_B) -> Numbers:
    """Write the requests by the engine, over pages and over runs, and by the peers."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    numbers: dict[str, Any] = {}
    with _folder(shape) as folder:
        texts = Texts(shape, folder)
        for storage in ("pages", "runs"):
            engine = texts.engine(storage=storage)
            numbers[f"engine, {storage}"] = texts.measure(partial(texts.by_engine, engine))
            numbers[f"engine, {storage}"]["steps"] = engine.num_steps // (1 + ROUNDS)
            if storage == "pages":
                write = partial(texts.by_engine, engine, 1.0)
                numbers["engine, drawn tokens"] = texts.measure(write)
            del engine
        numbers["transformers, static batch"] = texts.measure(texts.static)
        try:
            with texts.continuous() as continued:
                numbers["transformers, continuous batching"] = texts.measure(continued)
        except Exception as error:  # the peer may lack a package here
            reason = str(error).splitlines()
            failure = f"{type(error).__name__}: {reason[0] if reason else ''}"
            numbers["transformers, continuous batching"] = {"failed": failure}
    written = {name: own.pop("texts", []) for name, own in numbers.items()}
    ours, speed = written["engine, pages"], numbers["engine, pages"]["tokens_per_s"]
    for name, own in numbers.items():
        if "tokens_per_s" in own:
            # bf16: where two tokens are nearly equally likely, the rest of the text differs.
            if "drawn" not in name:
                own["equal first tokens"] = _mean_equal(ours, written[name])
            own["engine is x"] = speed / own["tokens_per_s"]
    return numbers


def _mean_equal(ours: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the mean share of a text before the first different token."""
    shares = []
    for own, other in zip(ours, others, strict=True):
        pairs = list(zip(own, other, strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        shares.append(first / max(len(own), 1))
    return statistics.mean(shares)


# -------------------------------------------------------------------------------------------- step


def step_beside_floor(shape: TextShape = ONE_B) -> Numbers:
    """Time a decoding step of all requests, beside the floor and the time of its kernels."""
    numbers: dict[str, Any] = {}
    with _folder(shape) as folder:
        texts = Texts(shape, folder)
        bandwidth = _bandwidth(shape)
        numbers["copy_tb_per_s"] = bandwidth / 1e12
        for count in (1, 16, shape.num_requests):
            numbers[f"{count} requests"] = _steps(texts, count, bandwidth, shape)
    return numbers


def _steps(texts: Texts, count: int, bandwidth: float, shape: TextShape) -> dict[str, Any]:
    engine = texts.engine()
    weights = sum(p.nbytes for p in engine.model.parameters())
    sampling = Sampling(max_new_tokens=120, temperature=0.0)
    requests = [engine.requests.one(p, sampling=sampling) for p in texts.prompts[:count]]
    seconds, host = [], []
    with engine.active() as scheduler:
        for request in requests:
            scheduler.add(request)
        while any(len(request.new_tokens) < 20 for request in requests):
            engine.step()
        for _ in range(40):
            begin, cpu = time.perf_counter(), time.process_time()
            engine.step()
            _synchronize(shape)
            seconds.append(time.perf_counter() - begin)
            host.append(time.process_time() - cpu)
        kernels = _kernel_seconds(engine, 5) if shape.device == "cuda" else None
        keys = sum(len(request.tokens) for request in requests)
    size = 2 * 2 * shape.layers * shape.groups * (shape.hidden // shape.heads)
    floor = (weights + keys * size) / bandwidth
    return {
        "step_ms": statistics.median(seconds) * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "kernels_ms": None if kernels is None else kernels[0] * 1e3,
        "kernels": None if kernels is None else kernels[1],
        "floor_ms": floor * 1e3,
        "step_of_floor": statistics.median(seconds) / floor,
        "tokens_per_s": count / statistics.median(seconds),
    }


def _bandwidth(shape: TextShape) -> float:
    """Return the bytes a second of a copy, read and written."""
    if shape.device != "cuda":
        return 1e10
    x = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / (statistics.median(gpu_times_ms(partial(y.copy_, x))) / 1e3)


def _kernel_seconds(engine: Engine, count: int) -> tuple[float, int]:
    """Return the time of a step's kernels, one after the other, and their number."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in record.events() if event.device_time_total > 0]
    return sum(event.device_time_total for event in events) / 1e6 / count, len(events) // count


# -------------------------------------------------------------------------------------------- load


def load_untouched(folder: Path, device: str) -> Any:
    """Read a folder's own model onto a device, box by box."""
    context = ParallelContext(ParallelLayout(), device=device)
    with deferred_weights():
        model = AutoBridge.from_hf_pretrained(folder).to_model(dtype=torch.bfloat16)
    placement = resolve("auto", num_ranks=1, num_chunks=1).placement
    part = assemble(model, context, None, placement, PipelineOptions())
    read_weights(model, part, context)
    return model.to(device)  # buffers that no file has


def load_ours(folder: Path, device: str) -> Any:
    """Read a folder as a ``GPTModel`` onto a device."""
    return Engine.load(folder, device=device, dtype="bfloat16").model


def load_stock(folder: Path, device: str) -> Any:
    """Read a folder by ``transformers``."""
    model: Any
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map=device
        )
    except (ImportError, ValueError):  # without accelerate
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to(device)
    return model


LOADERS: Mapping[str, Callable[[Path, str], Any]] = {
    "untouched": load_untouched,
    "as GPTModel": load_ours,
    "transformers": load_stock,
}


def loads_beside_transformers(shape: TextShape = ONE_B, rounds: int = 3) -> Numbers:
    """Time reading a folder onto the GPU, in turns, with the files in the page cache."""
    seconds: dict[str, list[float]] = {name: [] for name in LOADERS}
    device = "cuda:0" if shape.device == "cuda" else shape.device
    with _folder(shape) as folder:
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for _ in range(1 + rounds):
            for name, load in LOADERS.items():
                _synchronize(shape)
                begin = time.perf_counter()
                model = load(folder, device)
                _synchronize(shape)
                seconds[name].append(time.perf_counter() - begin)
                assert sum(p.nbytes for p in model.parameters()) > 0.9 * num_bytes
                del model
    medians = {name: statistics.median(own[1:]) for name, own in seconds.items()}
    return {
        "gb": num_bytes / 1e9,
        **{
            name: {"s": value, "gb_per_s": num_bytes / 1e9 / value}
            for name, value in medians.items()
        },
        "of transformers": {
            name: value / medians["transformers"] for name, value in medians.items()
        },
    }


CASES: Mapping[str, Mapping[str, Item]] = {
    "inference": {
        "texts beside transformers": Item(90, texts_beside_transformers),
        "a step beside the bandwidth": Item(45, step_beside_floor),
        "a folder of 2 GB onto the GPU": Item(45, loads_beside_transformers),
    },
}
"""Cases by name, as in :mod:`benchmarks.gpu_cases`."""
HEADLINE: Mapping[str, Item] = {
    "a folder of 2 GB onto the GPU": Item(45, loads_beside_transformers)
}
"""In the usual run."""
