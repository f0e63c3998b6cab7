"""Indices of pre-training data, reading of samples and preprocessing, beside megatron-core's C++
helpers, its ``GPTDataset`` (``pip install --no-deps megatron-core``) and Megatron-LM's tool.

    python -m benchmarks.bench_data            # 1e8 samples; writes benchmarks/results
    python -m benchmarks.bench_data --quick    # seconds: to see that everything runs
    python -m benchmarks.bench_data --megatron-lm CHECKOUT    # also preprocess, 200 MB

Each measurement runs in a process of its own. Times are processor seconds of one thread. Memory is
the largest resident memory above that before the call. The results of both sides are compared.
Preprocessing is measured once, with a byte-level BPE of 32,000 ids trained on the texts: source
code of installed packages, and as many texts of random words. gigatoken is measured if installed.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.data.indexed.indexed_merge import merge
from megatron_lightning.data.pretraining.blend_order import blend_index, normalized
from megatron_lightning.data.pretraining.blended import BlendedDataset, BlendSpec
from megatron_lightning.data.pretraining.gpt_index import build_indices, plan_epochs
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, GPTDatasetConfig

MIB = 1 << 20
WEIGHTS = {5: (0.4, 0.25, 0.2, 0.1, 0.05), 20: tuple(1 / (k + 1) for k in range(20))}
GOALS = {
    "blend of 5": 1.2,
    "blend of 20": 1.2,
    "sample index": 1.0,
    "reading": 0.5,
    "a blend of 20 beside one file of ours": 1 / 0.85,
    "preprocess": 0.7,
    "preprocess, gigatoken": 0.15,
}
"""Our time over the peer's, at most."""
MEMORY_GOAL = 0.3
"""Our memory over the peer's, for a blend."""


def apart(body: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``body`` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, body, arguments))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _send(sender: Any, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(body(*arguments))


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result, processor seconds, and MiB of memory above that before the call."""
    before, peak, done = machine.status_bytes("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], machine.status_bytes("RssAnon"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    begin = time.process_time()
    result = call()
    seconds = time.process_time() - begin
    done.set()
    thread.join()
    # Native code may keep the watching thread from running until it returns.
    peak[0] = max(peak[0], machine.status_bytes("RssAnon"))
    return result, seconds, max(0, peak[0] - before) / MIB


def digest(*arrays: Any) -> int:
    """Return a sum that arrays of equal values share."""
    return sum(int(np.asarray(array, np.int64).sum()) * (i + 1) for i, array in enumerate(arrays))


def _helpers() -> Any:
    """Return megatron-core's compiled helpers, without the imports of the package."""
    package = importlib.util.find_spec("megatron")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    files = [f for folder in folders for f in Path(folder, "core", "datasets").glob("helpers_cpp*")]
    if not files:
        raise SystemExit("megatron-core is not installed: pip install --no-deps megatron-core")
    spec = importlib.util.spec_from_file_location("helpers_cpp", files[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_blend(num: int, size: int) -> tuple[int, float, float]:
    """Return digest, seconds and MiB of a blend index."""
    weights = normalized(WEIGHTS[num])
    index, seconds, memory = measured(lambda: blend_index(weights, size))
    return digest(index), seconds, memory


def their_blend(num: int, size: int) -> tuple[int, float, float]:
    """Do as :func:`our_blend` by the peer."""
    helpers_cpp = _helpers()
    weights = np.asarray(normalized(WEIGHTS[num]))

    def build() -> Any:
        picks, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers_cpp.build_blending_indices(picks, samples, weights, num, size, False)
        return picks

    index, seconds, memory = measured(build)
    return digest(index), seconds, memory


def _lengths(num_documents: int) -> Any:
    return np.random.RandomState(0).randint(1, 1000, num_documents).astype(np.int32)


def our_samples(num_documents: int) -> tuple[int, float, float]:
    """Return digest, seconds and MiB of a sample index."""
    lengths = _lengths(num_documents)
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), None, 8192, 1)
    found, seconds, memory = measured(
        lambda: build_indices(
            lengths, range(num_documents), plan, sequence_length=8192, extra=1, seed=1
        )
    )
    return digest(found.document_index[:1000], found.sample_index), seconds, memory


def their_samples(num_documents: int) -> tuple[int, float, float]:
    """Do as :func:`our_samples` by the peer."""
    helpers_cpp = _helpers()
    lengths = _lengths(num_documents)
    num_tokens = int(lengths.sum(dtype=np.int64))

    def build() -> Any:
        random = np.random.RandomState(1)
        documents = np.mgrid[0:1, 0:num_documents][1].reshape(-1).astype(np.int32)
        random.shuffle(documents)
        samples = helpers_cpp.build_sample_idx_int32(
            lengths, documents, 8192, 1, num_tokens, True, 1
        )
        order = np.arange((num_tokens - 1) // 8192, dtype=np.uint32)
        random.shuffle(order)
        return documents, samples

    (documents, samples), seconds, memory = measured(build)
    return digest(documents[:1000], np.asarray(samples).reshape(-1, 2)), seconds, memory


def write_data(folder: str, num: int) -> list[str]:
    """Write ``num`` data sets of random documents, and return the prefixes."""
    prefixes = []
    for number in range(num):
        random = np.random.RandomState(number)
        lengths = random.randint(1, 1000, 20000 // num + 1).astype(np.int32)
        prefix = f"{folder}/{num}-{number}"
        with IndexedDatasetWriter(prefix, "uint16") as writer:
            tokens = random.randint(0, 30000, lengths.sum())
            writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
        prefixes.append(prefix)
    return prefixes


def _seconds_a_sample(data: Any, names: str) -> tuple[int, float]:
    rows = [int(row) for row in np.random.RandomState(0).permutation(len(data))[:1500]]
    for row in rows[:200]:
        data[row]
    begin = time.process_time()
    total = sum(int(data[row][names][0]) for row in rows)
    return total, (time.process_time() - begin) / len(rows)


def our_reading(prefixes: list[str]) -> tuple[int, float]:
    """Return a sum of first tokens, and seconds a sample."""
    config = GPTDatasetConfig(sequence_length=4096, split="1")

    def make(prefix: str, count: int | None) -> GPTDataset:
        return GPTDataset(prefix, config, "train", count)

    if len(prefixes) == 1:
        return _seconds_a_sample(make(prefixes[0], None), "tokens")
    return _seconds_a_sample(BlendedDataset(BlendSpec(tuple(prefixes)), None, make), "tokens")


def their_reading(prefix: str) -> tuple[int, float]:
    """Do as :func:`our_reading` by the peer."""
    from megatron.core.datasets.gpt_dataset import (  # type: ignore[import-not-found]
        GPTDataset as Theirs,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as TheirConfig
    from megatron.core.datasets.indexed_dataset import (  # type: ignore[import-not-found]
        IndexedDataset,
    )
    from megatron.core.datasets.utils import Split  # type: ignore[import-not-found]

    class Tokenizer:
        eod, pad, unique_identifiers = 30001, 30002, {"class": "x"}
        vocab_size = 30003

    config = TheirConfig(
        random_seed=1234,
        sequence_length=4096,
        blend=([prefix], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=Tokenizer(),
        create_attention_mask=False,
    )
    files = IndexedDataset(prefix)
    documents = np.arange(len(files), dtype=np.int32)
    data = Theirs(files, prefix, documents, None, Split.train, config)
    return _seconds_a_sample(data, "tokens")


def merge_memory(folder: str) -> float:
    """Return the MiB that a merge of 8 million documents takes."""
    for name in "ab":
        lengths = np.full(4_000_000, 8, np.int32)
        with IndexedDatasetWriter(f"{folder}/{name}", "uint16") as writer:
            ones = np.ones(len(lengths), np.int64)
            writer.add_documents(np.zeros(8 * len(lengths), np.uint16), lengths, ones)
    names = [f"{folder}/a", f"{folder}/b"]
    _, _, memory = measured(lambda: merge(names, output_prefix=f"{folder}/ab"))
    return memory


def write_text(folder: str, num_bytes: int) -> tuple[str, str]:
    """Write JSON lines of source code and random words, and a tokenizer of them. Return the paths
    of both.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    random, texts, size = np.random.RandomState(0), [], 0
    for path in _source_files():
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size > 0.6 * num_bytes:
            break
    words = sorted({word for text in texts[::50] for word in text.split() if word.isalpha()})
    input_path, size, number = f"{folder}/text.jsonl", 0, 0
    with open(input_path, "w", encoding="utf-8") as file:
        while size < num_bytes:
            source = texts[number % len(texts)][: random.randint(500, 12000)]
            made = " ".join(random.choice(words, random.randint(50, 900)))
            for text in (source or "empty", made):
                size += file.write(json.dumps({"text": text}) + "\n")
            number += 1
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32000,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts[::7], trainer)
    inner.save(f"{folder}/tokenizer.json")
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
    return input_path, folder


def _source_files() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for folder in (paths["stdlib"], paths["purelib"]):
        yield from sorted(Path(folder).rglob("*.py"))


def seconds_of(command: Sequence[str]) -> float:
    """Return the processor seconds of a command and its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def preprocessing(folder: str, checkout: Path, num_bytes: int, rounds: int) -> dict[str, Ratio]:
    """Return our processor seconds over those of Megatron-LM's tool, with equal bytes."""
    text, model = write_text(folder, num_bytes)
    options = ["--input", text, "--tokenizer-model", model, "--append-eod", "--workers", "1"]
    tool = [sys.executable, "-m", "benchmarks.megatron_preprocess"]
    theirs = [*tool, f"{checkout}/tools/preprocess_data.py", *options]
    theirs += ["--tokenizer-type", "HuggingFaceTokenizer", "--output-prefix", f"{folder}/theirs"]
    ours = [sys.executable, "-m", "megatron_lightning", "preprocess", *options]
    ours += ["--tokenizer-type", "huggingface", "--output-prefix", f"{folder}/ours"]
    sides = {"theirs": theirs, "preprocess": ours}
    if importlib.util.find_spec("gigatoken") is not None:
        sides["preprocess, gigatoken"] = [*ours, "--tokenizer-backend", "gigatoken"]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in sides.items():
            seconds[name].append(seconds_of(command))
            written = "theirs" if name == "theirs" else "ours"
            for suffix in (".bin", ".idx"):
                files = [f"{folder}/{side}_text_document{suffix}" for side in (written, "theirs")]
                assert filecmp.cmp(*files, shallow=False), f"{name}: other bytes"
    base = seconds.pop("theirs")
    return {name: ratio_of_medians(values, base) for name, values in seconds.items()}


def page(facts: dict[str, Any], rows: dict[str, tuple[Ratio, str]], merged: float) -> str:
    """Return the page of results."""
    lines = [
        "# Data, beside megatron-core",
        "",
        machine.headline(facts),
        "",
        "| what | ours ÷ megatron-core, processor seconds | goal | memory |",
        "|---|---|---|---|",
    ]
    for name, (ratio, memory) in rows.items():
        goal = GOALS.get(name)
        kept = "" if goal is None else f"≤ {goal:.2f}: {verdict(ratio.keeps(goal))}"
        lines.append(f"| {name} | {ratio} | {kept} | {memory} |")
    lines += ["", f"A merge of 8 million documents takes {merged:.0f} MiB (goal: 64).", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and keep a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--megatron-lm", type=Path, help="a checkout, to measure its preprocess tool"
    )
    parser.add_argument("--results", type=Path, default=machine.RESULTS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    size = 10**5 if options.quick else 10**8
    rounds = options.rounds or (2 if options.quick else 5)
    facts = machine.describe()
    rows: dict[str, tuple[Ratio, str]] = {}
    pairs: list[tuple[str, Any, Any, Any]] = [
        *((f"blend of {num}", our_blend, their_blend, (num, size)) for num in WEIGHTS),
        ("sample index", our_samples, their_samples, (size,)),
    ]
    for name, ours, theirs, arguments in pairs:
        found = [(apart(ours, *arguments), apart(theirs, *arguments)) for _ in range(rounds)]
        assert all(own[0] == their[0] for own, their in found), f"{name}: other values"
        ratio = ratio_of_medians([own[1] for own, _ in found], [their[1] for _, their in found])
        own_memory, their_memory = (max(pair[i][2] for pair in found) for i in range(2))
        rows[name] = ratio, f"{own_memory:.0f} of {their_memory:.0f} MiB"
        print(name, *rows[name], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        one, twenty = write_data(folder, 1), write_data(folder, 20)
        read = [
            (apart(our_reading, one), apart(their_reading, one[0]), apart(our_reading, twenty))
            for _ in range(rounds)
        ]
        assert all(own[0] == their[0] for own, their, _ in read), "reading: other samples"
        own, theirs, blended = ([side[i][1] for side in read] for i in range(3))
        rows["reading"] = ratio_of_medians(own, theirs), ""
        rows["a blend of 20 beside one file of ours"] = ratio_of_medians(blended, own), ""
        merged = apart(merge_memory, folder)
        if options.megatron_lm is not None:
            num_bytes = 10**6 if options.quick else 2 * 10**8
            for name, ratio in preprocessing(folder, options.megatron_lm, num_bytes, 1).items():
                rows[name] = ratio, ""
    facts["load_average_at_end"] = machine.describe()["load_average"]
    text = page(facts, rows, merged)
    print(text)
    numbers = {name: {**asdict(ratio), "memory": memory} for name, (ratio, memory) in rows.items()}
    machine.keep(options.results, "data_cpu", facts, text, numbers)


if __name__ == "__main__":
    main()
