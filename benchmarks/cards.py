"""Cards of twenty families of ``transformers``: tiny models with random weights, in one command.

    python -m benchmarks.cards                        # all families
    python -m benchmarks.cards llama --item fit:tp2   # one item of one family

The models are those of :mod:`benchmarks.hf_families`, with wide weights. Ranks are forked, so that
a training takes seconds. ``results/cards`` keeps YAML and page of every family, and
``docs/verification_cards.md`` prints what they say.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import hf_families, machine
from benchmarks.hf_families import Family
from benchmarks.hf_training import verdict
from benchmarks.optimizers import write
from benchmarks.ranks import run
from megatron_lightning.cards.card import Card, read_card
from megatron_lightning.cards.command import make_card
from megatron_lightning.cards.page import page_of
from megatron_lightning.cards.subject import Subject
from megatron_lightning.cards.trainings import Curve, FitError, Job, train
from megatron_lightning.errors import ConfigError

FOLDER = machine.RESULTS / "cards"
PAGE = machine.ROOT / "docs" / "verification_cards.md"
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "glm4_moe", "phi3",
    "olmo2", "granite", "nemotron_h", "falcon",
)  # fmt: skip
LAYOUTS = ("tp2", "pp2", "zero1", "fsdp")
NOTE = "4 layers of width 32, random weights"
_LIMIT_S = 300.0
_WIDE = 0.1


def family_of(name: str) -> Family:
    """Return a family by name.

    Raises:
        ValueError: If ``transformers`` has no such family.
    """
    found = next((one for one in hf_families.families() if one.name == name), None)
    if found is None:
        raise ValueError(f"there is no family {name!r} in the installed transformers.")
    return found


def make_folder(name: str, parent: Path) -> Path:
    """Save a tiny model of a family. Its weights are wide, since flat attention hides positions."""
    family = family_of(name)
    config = hf_families.small_config(family)
    config.initializer_range = _WIDE
    path = parent / name
    model = hf_families.build(family, config).eval()
    model.save_pretrained(path)
    return path


def forked(job: Job) -> Curve:
    """Run a training of a card on forked ranks.

    Raises:
        ConfigError: If the layout is refused.
        FitError: If the training failed.
    """
    try:
        curves: list[Curve] = run(job.ranks, _train_quietly, job, limit_s=_LIMIT_S)
    except RuntimeError as error:
        said = verdict(error)
        kind = ConfigError if said.startswith("refused: ") else FitError
        raise kind(said.partition(": ")[2]) from error
    return curves[0]


def _train_quietly(job: Job) -> Curve:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "megatron_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return train(job)


def card_of(name: str, layouts: Sequence[str] = LAYOUTS, items: Sequence[str] = ()) -> Card:
    """Return the card of a family."""
    with tempfile.TemporaryDirectory() as parent:
        found = Subject.of(str(make_folder(name, Path(parent))), None, trusts=False)
        return make_card(
            Subject(name, found.path, found.revision),
            layouts=layouts,
            items=items,
            command=f"python -m benchmarks.cards {shlex.quote(name)}",
            note=NOTE,
            run=forked,
        )


def table(cards: Sequence[Card]) -> Iterator[str]:
    """Yield the lines of a table of cards: the measured value of every item, or its status."""
    columns = list(dict.fromkeys(item.id for card in cards for item in card.items))
    yield f"| family | commit | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 2) + "|"
    reasons: list[str] = []
    for card in cards:
        found = {item.id: item for item in card.items}
        cells = []
        for column in columns:
            item = found.get(column)
            if item is None:
                cells.append("")
            elif item.status == "passed":
                cells.append(f"{item.measured:.1g}")
            else:
                why = f"{item.status}: {item.why}"
                if why not in reasons:
                    reasons.append(why)
                cells.append(f"{item.status} [{reasons.index(why) + 1}]")
        header = card.header
        yield f"| {header['model']} | {header['commit']} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {why}" for number, why in enumerate(reasons, 1))


def kept(folder: Path = FOLDER) -> list[Card]:
    """Return the kept cards, checked."""
    return [read_card(path) for path in sorted(folder.glob("*.yaml"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the cards, keep them, and print the table. Return 1 if an item failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", default=FAMILIES, help="default: all twenty")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--item", nargs="+", default=(), help="only these; nothing is kept")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--write", action="store_true", help=f"print the kept cards in {PAGE.name}")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.families:
        card = card_of(name, options.layouts, options.item)
        failed += [f"{name} {item}" for item in card.failed]
        if options.item:
            print(page_of(card))
            continue
        card.write(options.results / f"{name}.yaml")
        (options.results / f"{name}.md").write_text(page_of(card))
    if options.write:
        write(PAGE, list(table(kept(options.results))))
    print(f"failed: {', '.join(failed) or 'nothing'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
