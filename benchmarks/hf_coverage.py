"""Compare families of ``transformers``, unchanged, on several ranks with one process.

    python -m benchmarks.hf_coverage --work coverage.jsonl --layouts tp2

Every family becomes a tiny random model, which takes a few SGD steps under plain Lightning in one
process, and under each layout (``benchmarks.hf_training``). Losses and final weights are compared.
A family gives one line of JSON in the work file; a run continues after the last one. The tables go
to docs/hf_coverage.md: causal LMs, and with ``--others`` encoders, encoder-decoders and images.

Column ``sp`` says whether the layouts with tensor parallelism shard activations over the sequence,
and why not; ``benchmarks.hf_bridge`` adds columns to the same work file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks import hf_families, hf_images
from benchmarks.hf_training import LAYOUTS, SENSITIVITY, WAYS, measure, shards_sequence
from tests.helpers.image_folders import FAMILIES

FOLDER_COLUMNS = ("load", "export")
"""Columns of ``benchmarks.hf_bridge``: folders."""
SEQUENCE = "sp"
KINDS = ("equal", "refused", "sensitive", "wrong", "failed")

_LEGEND = {
    "cp2ep2": "- *cp2ep2*: ranks divide experts, beside context parallelism.",
    "fsdpcp2": "- *fsdpcp2*: fsdp, beside context parallelism.",
    WAYS: "- *ways*: how many modules share rows in which "
    "[way](context.md#models-without-a-plan-of-their-attention) in *cp2*, or *known*.",
}
"""Column -> line that explains it."""

TABLE = Path("docs/hf_coverage.md")
OTHERS = "## Encoders, encoder-decoders and images"
"""Heading of the section of ``--others``."""
_MODEL = re.compile(r"\w+ForConditionalGeneration")
IMAGES = "## Chats with images"
"""Heading of the section of ``--images``."""
FOLDERS = "## Folders"
"""Heading of the section that ``benchmarks.hf_bridge`` writes."""


def read_results(work: Path) -> dict[str, dict[str, str]]:
    """Return the results in a work file, by family."""
    results: dict[str, dict[str, str]] = {}
    for line in work.read_text().splitlines() if work.exists() else ():
        row = json.loads(line)
        results.setdefault(row.pop("family"), {}).update(row)
    return results


def write_table(results: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """Write the page of all results."""
    import transformers

    known = (*LAYOUTS, WAYS, SEQUENCE, *FOLDER_COLUMNS)
    columns = [name for name in known if any(name in row for row in results.values())]
    layouts = [name for name in columns if name in LAYOUTS]
    trained = {name: row for name, row in results.items() if row.get("plain") == "trained"}
    lines = [
        "# Causal-LM families of transformers, unchanged",
        "",
        "Look your family up to see on which layouts it trains unchanged, as in one process. To",
        "measure your installed version, run `python -m benchmarks.hf_coverage`: it gives each",
        "family's tiny random model a few SGD steps in fp32 under each layout and in one process",
        "with plain Lightning. This table is from transformers "
        f"{transformers.__version__} and torch {torch.__version__}.",
        "",
        "- *equal*: losses within 1e-5 and final weights within 1e-4 of their updates.",
        "- *refused*: our error tells you why and what to set.",
        "- *sensitive*: the first loss is equal, and later losses and weights differ at most",
        f"  {SENSITIVITY} times as much as one process whose weights were changed by a rounding.",
        "- an empty cell: not measured.",
        "- *tp2ep2*: ranks divide experts by expert parallelism, other layers by tensor",
        "  parallelism. *sp*: whether you get sequence parallelism with tensor parallelism. *load*",
        "  and *export*: [folders](#folders).",
        *(line for column, line in _LEGEND.items() if column in columns),
        "",
        f"| layout | {' | '.join(KINDS)} | of |",
        "|---" * (len(KINDS) + 2) + "|",
    ]
    for layout in layouts:
        counts = Counter(row[layout].split(":")[0] for row in trained.values() if layout in row)
        numbers = [counts[kind] for kind in KINDS]
        lines.append(f"| {layout} | {' | '.join(map(str, numbers))} | {sum(counts.values())} |")
    if SEQUENCE in columns:
        on = sum(row.get(SEQUENCE) == "on" for row in trained.values())
        lines += ["", f"You get sequence parallelism in {on} of {len(trained)} families."]
    lines += ["", f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    notes: list[str] = []
    classes = {family.name: family.model_class for family in hf_families.families()}
    for name, row in sorted(trained.items()):
        cells = []
        for column in columns:
            kind, _, why = row.get(column, "").partition(": ")
            if name in classes:  # a reason of several families is one note
                why = why.replace(classes[name], "the model")
            if why and why not in notes:
                notes.append(why)
            cells.append(f"{kind} [{notes.index(why) + 1}]" if why else kind)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    missing = sorted(results.keys() - trained.keys())
    lines += ["", f"Not built from a shrunk configuration: {', '.join(missing) or 'none'}.", ""]
    _, heading, rest = path.read_text().partition(OTHERS) if path.exists() else ("",) * 3
    path.write_text("\n".join(lines) + (f"\n{heading}{rest}" if heading else ""))


def read_table(path: Path = TABLE) -> dict[str, dict[str, str]]:
    """Return the cells of the table of causal LMs by family and column, with the notes in full."""
    # The next heading begins other tables, with notes numbered from 1 again.
    lines = path.read_text().partition("\n## ")[0].splitlines()
    notes = dict(line.split(". ", 1) for line in lines if line[:1].isdigit())
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = next(number for number, row in enumerate(table) if row[0] == "family")
    cells: dict[str, dict[str, str]] = {}
    for name, *row in table[start + 2 :]:
        if not row:
            break
        kinds = (cell.partition(" [") for cell in row)
        full = [f"{kind}: {notes[note[:-1]]}" if note else kind for kind, _, note in kinds]
        cells[name] = dict(zip(table[start][1:], full, strict=True))
    return cells


def write_others(results: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """Write the section of encoders, encoder-decoders and models with images."""
    columns = [name for name in LAYOUTS if any(name in row for row in results.values())]
    lines = [
        OTHERS,
        "",
        "`python -m benchmarks.hf_coverage --others` measures models that predict masked tokens,",
        "translate, classify images, or read an image beside the text. An empty cell: not measured",
        "since [they share rows](context.md#models-without-a-plan-of-their-attention). On two",
        "ranks, gradients of one step of all 14 that predict masked tokens or translate are those",
        "of one process.",
        "",
        f"| family | predicts | {' | '.join(columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    notes: list[str] = []
    for family in hf_families.other_families():
        row = results.get(family.name, {})
        if row.get("plain") != "trained":
            continue
        cells = []
        for layout in columns:
            result = row.get(layout, "").replace(family.model_class, "the model")
            cells.append(_cell(result, notes))
        lines.append(f"| {family.name} | {family.kind} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    text = path.read_text()
    before = text.partition(OTHERS)[0].partition(IMAGES)[0].partition(FOLDERS)[0]
    rest = text[min(place for place in map(text.find, (IMAGES, FOLDERS)) if place >= 0) :]
    path.write_text(f"{before}{chr(10).join(lines)}\n{rest}")


def write_images(results: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """Write the section of chats with images."""
    columns = [name for name in hf_images.COLUMNS if any(name in row for row in results.values())]
    lines = [
        IMAGES,
        "",
        "`python -m benchmarks.hf_coverage --images` fine-tunes tiny models with a vision tower on",
        "[chats with images](images.md): rows with none, one and two images of three sizes, with",
        "*fsdp* a rank without any. Under *fsdp* weights are compared. *frozen*: the tower is not",
        "trained. An empty cell: not measured. Mllama's losses [depend on",
        "micro-batches](images.md#layouts), so that it differs where they are others.",
        "",
        f"| family | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    notes: list[str] = []
    for name, row in sorted(results.items()):
        if row.get("plain") == "trained":
            reasons = (_MODEL.sub("the model", row.get(column, "")) for column in columns)
            cells = [_cell(reason, notes) for reason in reasons]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    text = path.read_text()
    before = text.partition(IMAGES)[0].partition(FOLDERS)[0]
    _, heading, folders = text.partition(FOLDERS)
    path.write_text(f"{before}{chr(10).join(lines)}\n{heading}{folders}")


def _cell(result: str, notes: list[str]) -> str:
    """Return a cell of a table. A reason becomes a note."""
    kind, _, why = result.partition(": ")
    if why and why not in notes:
        notes.append(why)
    return f"{kind} [{notes.index(why) + 1}]" if why else kind


def _measure_images(options: argparse.Namespace) -> None:
    results = read_results(options.work)
    for name in options.families or FAMILIES:
        done = results.get(name, {})
        missing = [column for column in hf_images.COLUMNS if column not in done]
        if not missing or done.get("plain", "trained") != "trained":
            continue
        row = hf_images.measure_images(name, missing, options.limit_s)
        results[name] = done | row
        with options.work.open("a") as file:
            file.write(json.dumps({"family": name, **row}) + "\n")
        print(name, row, flush=True)
    write_images(results, options.table)


def main() -> None:
    """Measure the families that the work file lacks, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True, help="file with a line per family")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--families", nargs="+", help="only these; default: all")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one run of one family")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--others", action="store_true", help="encoders, translation, images")
    parser.add_argument("--images", action="store_true", help="chats with images")
    options = parser.parse_args()
    if options.images:
        _measure_images(options)
        return
    results = read_results(options.work)
    chosen = hf_families.other_families() if options.others else hf_families.families()
    for family in chosen:
        done = results.get(family.name, {})
        missing = [layout for layout in options.layouts if layout not in done]
        missing += [SEQUENCE] if SEQUENCE not in done and not options.others else []
        if (options.families and family.name not in options.families) or not missing:
            continue
        if done.get("plain", "trained") != "trained":
            continue
        layouts = [name for name in missing if name in LAYOUTS]
        row = measure(family, layouts, options.limit_s) if layouts else {}
        if SEQUENCE in missing and row.get("plain", "trained") == "trained":
            row[SEQUENCE] = shards_sequence(family)
        results[family.name] = done | row
        with options.work.open("a") as file:
            file.write(json.dumps({"family": family.name, **row}) + "\n")
        print(family.name, row, flush=True)
    (write_others if options.others else write_table)(results, options.table)


if __name__ == "__main__":
    main()
