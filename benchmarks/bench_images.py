"""Chats with images: what a start, a read row and a worker cost beside decoding and processing.

    python -m benchmarks.bench_images          # minutes; writes results/
    python -m benchmarks.bench_images --quick  # seconds, small images: does it run?

JPEGs of about 1024 x 768, once in 30 sizes and once in a size each, under a folder with the image
settings of Qwen2.5-VL and a tiny random model.

    pixels   every image alone, decoded and processed
    start    ``prepare_data`` of a conversation with each image
    row      the rows of the data set, with ids, labels and pixels

All are processor seconds of one thread, in one run. A worker's growth is memory that it has
allocated (``RssAnon``) behind 2,000 rows, above that behind the first 20.

Two numbers are of 120 conversations of a tiny model, with up to two images of three sizes: steps of
an epoch with ``packing="online"``, over those without, and the operations (counted) of the busiest
of 4 ranks beyond their mean, with ``balance_rows`` over those without.
"""

from __future__ import annotations

import gc
import io
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks import machine
from benchmarks.command_line import measured_page, print_page
from benchmarks.statistics import verdict
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from tests.helpers.image_balance import measured_ranks
from tests.helpers.image_folders import make_image_folder

GOALS = {"start, 30 sizes": 0.25, "start, a size each": 0.6, "row": 1.15}
"""Our processor seconds over those of decoding and processing, at most."""
GROWTH_GOAL_MIB = 50
BALANCE_GOAL = 0.7
_SETTINGS = {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}
_WARM_ROWS = 20


class Size(NamedTuple):
    """Size of a measurement."""

    images: int = 1000
    height: int = 768
    width: int = 1024
    worker_rows: int = 2000
    sequence_length: int = 2048


def write_rows(folder: Path, size: Size, num_sizes: int) -> Path:
    """Write JPEGs of smooth noise in several sizes, and a conversation with each. Return the
    rows.
    """
    draw = np.random.default_rng(0)
    rows = folder / f"{num_sizes}.jsonl"
    with rows.open("w") as file:
        for index in range(size.images):
            step = index % num_sizes
            height, width = size.height - step // 40, size.width - step % 40
            coarse = draw.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
            name = f"{num_sizes}-{index}.jpg"
            Image.fromarray(coarse).resize((width, height)).save(folder / name, quality=90)
            content = [{"type": "image", "image": name}, {"type": "text", "text": "what"}]
            turns = [("user", content), ("assistant", "a photograph")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return rows


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(
    folder: Path, rows: Path, model: str, size: Size, *, reads: bool = False
) -> dict[str, float]:
    """Return processor seconds of pixels and of a start. ``reads``: also those of reading every
    image's row, and a worker's growth.
    """
    data = FinetuneDataModule(
        str(rows),
        sequence_length=size.sequence_length,
        batch_size=1,
        images=ImageOptions(processor_options=_SETTINGS),
        cache_dir=str(folder / "cache"),
    )
    data.use_model(HuggingFaceModule(model))
    processor: Any = data.processor
    _ = data.template  # the processor is loaded
    found = {"start": seconds(data.prepare_data)}
    data.setup("fit")
    text = f"what{processor.placeholder}"

    def alone() -> None:
        for index in range(size.images):
            content = Path(folder, f"{rows.stem}-{index}.jpg").read_bytes()
            processor.document(text, [Image.open(io.BytesIO(content)).convert("RGB")])

    dataset: Any = data.train_dataset()

    def read(count: int) -> None:
        for index in range(count):
            dataset[(index % size.images,)]

    read(_WARM_ROWS)
    found["pixels"] = seconds(alone)
    if reads:
        gc.collect()
        before = machine.status_bytes("RssAnon")
        found["row"] = seconds(lambda: read(size.images))
        read(size.worker_rows - size.images)
        gc.collect()
        found["growth_mib"] = (machine.status_bytes("RssAnon") - before) / 2**20
    return found


def measure_mixed(folder: Path) -> dict[str, float]:
    """Return steps of a packed epoch over those of an unpacked one, and the excess of the busiest
    rank with balance over that without.
    """
    (data, counted, wait), (_, _, balanced) = measured_ranks(folder, 120)
    return {
        "steps": len(data.row_order().rows(0)) / len(counted),
        "excess": wait,
        "balance": balanced / wait,
    }


def page(
    few: Mapping[str, float], many: Mapping[str, float], mixed: Mapping[str, float], size: Size
) -> str:
    """Return the results as a page."""
    ratios = {
        "start, 30 sizes": few["start"] / few["pixels"],
        "start, a size each": many["start"] / many["pixels"],
        "row": few["row"] / few["pixels"],
    }
    milliseconds, growth = 1000 * few["pixels"] / size.images, few["growth_mib"]
    lines = [
        f"{size.images:,} JPEGs of about {size.width} x {size.height}. Decoding and processing one "
        f"takes {milliseconds:.1f} ms of a core. Every rank in a replica does it: with 8 "
        f"tensor-parallel ranks an image takes {8 * milliseconds:.0f} ms of a node's cores.",
        "",
        "| what | times decoding and processing | goal, at most | |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {ratio:.2f} | {GOALS[name]} | {verdict(ratio <= GOALS[name])} |"
            for name, ratio in ratios.items()
        ),
        "",
        "| what | MiB | goal, at most | |",
        "| --- | --- | --- | --- |",
        f"| growth of a worker over {size.worker_rows:,} rows | {growth:.0f} | {GROWTH_GOAL_MIB} | "
        f"{verdict(growth <= GROWTH_GOAL_MIB)} |",
        "",
        "120 conversations of mixed lengths, with up to two images:",
        "",
        "| what | ratio | goal, at most | |",
        "| --- | --- | --- | --- |",
        f"| steps of an epoch, packed over unpacked | {mixed['steps']:.2f} | | |",
        "| operations of the busiest of 4 ranks beyond the mean, balanced over not "
        f"({mixed['excess']:.1%}) | {mixed['balance']:.2f} | {BALANCE_GOAL} | "
        f"{verdict(mixed['balance'] <= BALANCE_GOAL)} |",
        "",
    ]
    return "\n".join(lines)


def run(size: Size, folder: Path | None) -> str:
    """Measure, and return the page; with a folder, keep it there."""

    def measured() -> tuple[str, Mapping[str, Any]]:
        with tempfile.TemporaryDirectory() as work:
            whole = Path(work)
            model = str(make_image_folder("qwen2_5_vl", whole))
            rows = [write_rows(whole, size, number) for number in (30, size.images)]
            few = measure(whole, rows[0], model, size, reads=True)
            many = measure(whole, rows[1], model, size)
            (whole / "mixed").mkdir()
            mixed = measure_mixed(whole / "mixed")
        parts = {"30 sizes": few, "a size each": many, "mixed": mixed}
        return page(few, many, mixed, size), parts

    return measured_page("Chats with images", "images_cpu", measured, folder)


if __name__ == "__main__":
    print_page(__doc__, run, Size(), Size(4, 56, 84, 8, 256))
