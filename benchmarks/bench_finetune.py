"""Fine-tuning compared with the libraries that most people use for it, on one process.

    python -m benchmarks.bench_finetune          # 15 rounds; writes results/
    python -m benchmarks.bench_finetune --quick  # a minute, a tiny model: does it run?

*Step*: an untouched Llama of ``transformers`` with LoRA on all linear layers, in
``HuggingFaceModule``, and the same model with stock ``peft`` in plain Lightning. Both train in
turn, a step each (``benchmarks.teams``), and the peak of a process is compared at a vocabulary that
fills it with logits. *Packing*: documents of log-normal lengths, ours and trl's best fit, and fewer
documents with the first fit of Megatron-Bridge, whose time grows with their square. *Text*:
conversations rendered and tokenized into documents with marks of the answers, compared with the
tokenizer's own ``encode_batch`` of the same texts, by processor seconds.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import machine
from benchmarks.bench_single import Llama, llama_config
from benchmarks.bench_step import QUICK, Steps
from benchmarks.command_line import parser_of
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from benchmarks.teams import measure
from benchmarks.variants import Shape, Variant, megatron, single_device
from megatron_lightning.config import TransformerConfig
from megatron_lightning.data.chat.chat_encoding import Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.rows.packing import pack
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.peft import LoRA

LARGE_VOCABULARY = 32768
STEP_LIMIT, MEMORY_LIMIT, TEXT_GOAL = 1.05, 0.9, 0.6
RANK, ALPHA = 8, 16
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
CAPACITY, _TRL_BATCH = 4096, 1000
_TRL_NAME, _BRIDGE_NAME = "trl's `bfd`", "Megatron-Bridge's `first_fit_decreasing`"
_BRIDGE, _BRIDGE_DOCUMENTS = "megatron/bridge/data/datasets/packing_utils.py", 10_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "the a of model layer rank token where is why does sky blue answer loss step data in to and "
)


class Packed(NamedTuple):
    """Seconds of a packer and the rows that it made."""

    ours_s: list[float]
    theirs_s: list[float]
    ours_rows: int
    theirs_rows: int


class Texts(NamedTuple):
    """Processor seconds for the same texts."""

    documents_s: list[float]
    tokenizer_s: list[float]
    num_tokens: int


class PeftLlama(Llama):
    """A Llama with stock ``peft``, as in its own examples.

    Args:
        folder: Folder of the model.
        config: Sizes, of which the folder is made.
    """

    def __init__(self, folder: str, config: TransformerConfig) -> None:
        self.folder = folder
        super().__init__(config)

    def build(self, config: TransformerConfig) -> nn.Module:
        """Return the adapted model."""
        from peft import LoraConfig, get_peft_model

        model = LlamaForCausalLM.from_pretrained(_folder_of(self.folder, config))
        options: Any = {"r": RANK, "lora_alpha": ALPHA, "target_modules": PROJECTIONS}
        adapted: nn.Module = get_peft_model(model, LoraConfig(**options))  # type: ignore[arg-type]
        return adapted.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's AdamW over the adapters."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-4)


def _folder_of(folder: str, config: TransformerConfig) -> str:
    return f"{folder}/{config.vocab_size}"


def _ours(folder: str, config: TransformerConfig) -> pl.LightningModule:
    lora = LoRA(r=RANK, lora_alpha=ALPHA)
    return HuggingFaceModule(_folder_of(folder, config), learning_rate=3e-4, peft=lora)


def variants(folder: str) -> tuple[Variant, Variant]:
    """Return ours and the peer, for models in ``folder``."""
    return (
        Variant(name="ours", size=1, strategy=megatron, module=partial(_ours, folder), ours=True),
        Variant(name="peft", size=1, strategy=single_device, module=partial(PeftLlama, folder)),
    )


def measure_steps(shape: Shape, num_rounds: int, folder: str, num_dropped: int) -> Steps:
    """Train both in turn."""
    config = shape.config
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(config)).save_pretrained(_folder_of(folder, config))
    steps = measure(variants(folder), shape, num_rounds, num_dropped=num_dropped)
    losses = [rounds[-1][0].loss for rounds in steps.values()]
    # The adapters' first values differ, and B is 0: losses differ little in so few steps.
    if abs(losses[0] / losses[1] - 1) > 1e-3:
        raise RuntimeError(f"losses {losses} of the last step are not those of one task")
    return steps


def lengths_of(num_documents: int) -> npt.NDArray[np.int64]:
    """Return log-normal lengths of documents."""
    random = np.random.RandomState(0)
    lengths = np.minimum(random.lognormal(np.log(300), 1.0, num_documents), CAPACITY)
    return np.maximum(lengths.astype(np.int64), 1)


def measure_bridge(num_documents: int, num_rounds: int) -> Packed | None:
    """Pack the same documents by ours and Megatron-Bridge. None: Bridge is not installed."""
    # Its package imports Megatron and engines. The packer's file needs numpy alone.
    try:
        file = distribution("megatron-bridge").locate_file(_BRIDGE)
    except PackageNotFoundError:
        return None
    spec = importlib.util.spec_from_file_location("bridge_packing", str(file))
    if spec is None or spec.loader is None:
        return None
    bridge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bridge)
    lengths = lengths_of(num_documents)
    as_list, found = lengths.tolist(), Packed([], [], 0, 0)
    for _ in range(num_rounds):
        start = time.perf_counter()
        ours = len(pack(lengths, CAPACITY))
        found.ours_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        theirs = len(bridge.first_fit_decreasing(as_list, CAPACITY))
        found.theirs_s.append(time.perf_counter() - start)
        found = found._replace(ours_rows=ours, theirs_rows=theirs)
    return found


def measure_packing(num_documents: int, num_rounds: int) -> Packed | None:
    """Pack the same documents by ours and trl. None: trl is not installed."""
    try:
        import pyarrow as pa
        from trl import data_utils
    except ImportError:
        return None
    lengths = lengths_of(num_documents)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = pa.array(np.zeros(bounds[-1], np.int32))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(bounds), ids)})
    # What `pack_dataset` maps over batches, without the files of `datasets`.
    pack_batch: Any = data_utils._pack_bfd
    found = Packed([], [], 0, 0)
    for _ in range(num_rounds):
        start = time.perf_counter()
        ours = len(pack(lengths, CAPACITY))
        found.ours_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        batches = (table.slice(at, _TRL_BATCH) for at in range(0, num_documents, _TRL_BATCH))
        theirs = sum(len(pack_batch(batch, CAPACITY, "truncate")) for batch in batches)
        found.theirs_s.append(time.perf_counter() - start)
        found = found._replace(ours_rows=ours, theirs_rows=theirs)
    return found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few words."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator([WORDS * 50], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>")


def measure_texts(num_chats: int, num_rounds: int) -> Texts:
    """Make documents of conversations, and tokenize the same texts alone."""
    random = np.random.RandomState(1)
    words = WORDS.split()
    rows = [
        Row(
            f"row {number}",
            {
                "messages": [
                    {"role": role, "content": " ".join(random.choice(words, 110))}
                    for role in ("user", "assistant") * 2
                ]
            },
        )
        for number in range(num_chats)
    ]
    tokenizer = ChatTokenizer(make_tokenizer())
    template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
    options = SupervisedOptions(sequence_length=4096)
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    texts, _ = render([row.fields["messages"] for row in rows], chat_template=TEMPLATE)
    found = Texts([], [], 0)
    for _ in range(num_rounds):
        start = time.process_time()
        made = list(Encoder(tokenizer, template, options).documents(rows))
        found.documents_s.append(time.process_time() - start)
        start = time.process_time()
        tokenizer.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        found.tokenizer_s.append(time.process_time() - start)
        found = found._replace(num_tokens=sum(len(document.ids) for document in made))
    return found


def _series(steps: Steps, name: str, what: Callable[[Any], float]) -> list[float]:
    return [what(rounds[0]) for rounds in steps[name]]


def markdown(
    facts: Mapping[str, Any],
    shape: Shape,
    ratios: Mapping[str, Ratio],
    peaks: Mapping[str, float],
    packed: Mapping[str, Packed | None],
    texts: Texts,
) -> str:
    """Return the result as a page."""
    share = peaks["ours"] / peaks["peft"]
    speed = ratio_of_medians(texts.tokenizer_s, texts.documents_s)
    lines = [
        f"# Fine-tuning, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)} (the benchmark itself adds up to 1).",
        "",
        f"Llama of {shape.num_layers} layers x {shape.hidden_size}, ffn {shape.ffn_size}, "
        f"vocabulary {shape.vocab_size}, sequence {shape.sequence}, batch {shape.batch}, fp32, "
        f"LoRA of rank {RANK} on all linear layers, one thread. {facts['rounds']} rounds in turns; "
        "medians, with a 95 % bootstrap interval.",
        "",
        "| ours over stock peft | ratio | limit | verdict |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} of a step | {ratio} | {STEP_LIMIT} | {verdict(ratio.keeps(STEP_LIMIT))} |"
        for name, ratio in ratios.items()
    ]
    lines += [
        f"| peak memory above the imports, vocabulary {facts['large_vocabulary']} "
        f"({peaks['ours']:.0f} and {peaks['peft']:.0f} MiB) | {share:.2f} | {MEMORY_LIMIT} | "
        f"{verdict(share <= MEMORY_LIMIT)} |",
        "",
    ]
    for name, peer in packed.items():
        if peer is not None:
            ratio = ratio_of_medians(peer.theirs_s, peer.ours_s)
            count = _BRIDGE_DOCUMENTS if name == _BRIDGE_NAME else facts["documents"]
            lines += [
                f"Packing {count} documents (log-normal, median 300) into rows of {CAPACITY}: ours "
                f"{np.median(peer.ours_s):.3f} s and {peer.ours_rows} rows, {name} "
                f"{np.median(peer.theirs_s):.3f} s and {peer.theirs_rows} rows; {name} over ours "
                f"{ratio}.",
                "",
            ]
    if packed[_TRL_NAME] is not None:
        lines += ["trl moves the tokens as well; the others make a table.", ""]
    lines += [
        f"Rendering and tokenizing {facts['chats']} conversations of {texts.num_tokens} tokens, "
        f"with marks of the answers: {speed} of the speed of `encode_batch`, by processor seconds "
        f"(goal at least {TEXT_GOAL}: {verdict(speed.low >= TEXT_GOAL)}).",
        "",
    ]
    return "\n".join(lines)


def run(
    shape: Shape, num_rounds: int, large_vocabulary: int, counts: Sequence[int], folder: Path
) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page.

    Args:
        shape: Sizes.
        num_rounds: Pairs to measure.
        large_vocabulary: Of the comparison of peaks.
        counts: Documents to pack, and conversations to tokenize.
        folder: Of the result files.
    """
    facts = machine.describe()
    with tempfile.TemporaryDirectory() as models_folder:
        steps = measure_steps(shape, num_rounds, models_folder, 3)
        wide = replace(shape, vocab_size=large_vocabulary)
        large = measure_steps(wide, 2, models_folder, 0)
    peaks = {name: rounds[-1][0].peak_bytes / 2**20 for name, rounds in large.items()}
    packed = {
        _TRL_NAME: measure_packing(counts[0], num_rounds),
        _BRIDGE_NAME: measure_bridge(_BRIDGE_DOCUMENTS, num_rounds),
    }
    texts = measure_texts(counts[1], num_rounds)
    facts |= {"rounds": num_rounds, "large_vocabulary": large_vocabulary}
    facts |= {"documents": counts[0], "chats": counts[1]}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    ratios = {
        name: ratio_of_medians(*(_series(steps, each, what) for each in ("ours", "peft")))
        for name, what in (
            ("processor seconds", lambda time_of: time_of.cpu_s),
            ("wall time", lambda time_of: time_of.wall_s),
        )
    }
    page = markdown(facts, shape, ratios, peaks, packed, texts)
    kept: dict[str, Any] = {
        "shape": asdict(shape),
        "peaks_mib": peaks,
        "packed": {name: None if p is None else p._asdict() for name, p in packed.items()},
        "texts": texts._asdict(),
        "steps": {
            name: [[rank._asdict() for rank in ranks] for ranks in rounds]
            for name, rounds in steps.items()
        },
    }
    machine.keep(folder, "finetune_cpu", facts, page, kept)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    if options.quick:
        print(run(QUICK, 2, 1024, (2000, 50), options.results))
    else:
        sizes = (100_000, 1200)
        print(run(Shape(batch=4), options.rounds, LARGE_VOCABULARY, sizes, options.results))


if __name__ == "__main__":
    main()
