"""``megatron-lightning verify-card``: verify a model, and keep the findings."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_lightning.cards.card import Card, Item, kind_of, read_card
from megatron_lightning.cards.header import describe
from megatron_lightning.cards.items import Verification
from megatron_lightning.cards.page import page_of
from megatron_lightning.cards.subject import Subject, reduce_model, reference_of
from megatron_lightning.cards.trainings import Curve, Job, run_job
from megatron_lightning.errors import ConfigError
from megatron_lightning.printed_json import json_text

LAYOUTS = ("tp2", "pp2", "zero1")
_COMMAND = "megatron-lightning verify-card"


def verify_card(
    model: str,
    *,
    layouts: list[str] | str | None = None,
    reference: str | None = None,
    item: list[str] | str | None = None,
    reduced: bool = False,
    output: str = "cards",
    revision: str | None = None,
    family: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> tuple[str, bool]:
    """Verify a model of the Hub, and write a card. Exit with 1 if an item failed.

    The card has expected and measured values, tolerances, and a command for each item. Items:
    folder (tensors come back), logits (as transformers), fit:LAYOUT and lora (losses and gradient
    norms as one process), resume (on another layout), merge (logits as peft), text (the engine
    beside transformers).

    Args:
        model: A folder, a Hub id, or ID@REVISION. Or a card (.yaml), to check and show.
        layouts: Layouts to train on, such as tp2, tp2-pp2 or fsdp. Default: tp2, pp2 and zero1.
        reference: Expected logits, in the place of transformers on the same folder: another folder
            or Hub id, also as FOLDER@REVISION, or recorded logits (.json).
        item: Measure these items alone.
        reduced: Train 4 layers with random weights. folder and logits still read the whole folder.
        output: Folder of the card's YAML and page.
        revision: Branch, tag or commit of the Hub id.
        family: Rules for a GPTModel, by name or class path. Default: the architecture's.
        trust_remote_code: Whether code in the folder may run.
        json: Print the card as JSON, in the place of the page.

    Returns:
        The text, and whether no item has failed.

    Raises:
        ConfigError: If a layout or an item has no such name.
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """
    if model.endswith((".yaml", ".yml")):
        card = read_card(model)
        return _result(card, as_json=json)
    if os.environ.get("RANK", "0") != "0":
        raise ConfigError(
            f"verify-card runs as rank {os.environ['RANK']} of a launcher, and starts the ranks of "
            "its layouts itself. Run it without torchrun or srun."
        )
    of_items = [name.partition(":")[2] for name in _words(item) if kind_of(name) == "fit"]
    names = _words([*(_words(layouts) or of_items or LAYOUTS), *of_items])
    options = _options(reference, revision, family, reduced=reduced, trusts=trust_remote_code)
    card = make_card(
        Subject.of(model, revision, trusts=trust_remote_code),
        layouts=names,
        items=_words(item),
        reference=reference,
        is_reduced=reduced,
        family=family,
        command=shlex.join([*_COMMAND.split(), model, *options]),
    )
    target = Path(output, file_name(card.header["model"], _words(item)))
    card.write(target.with_suffix(".yaml"))
    target.with_suffix(".md").write_text(page_of(card))
    print(f"written: {target.with_suffix('.yaml')} and {target.name}.md", file=sys.stderr)
    return _result(card, as_json=json)


def make_card(
    subject: Subject,
    *,
    layouts: Sequence[str],
    items: Sequence[str] = (),
    reference: str | None = None,
    is_reduced: bool = False,
    family: str | None = None,
    command: str,
    note: str = "",
    run: Callable[[Job], Curve] = run_job,
) -> Card:
    """Return the card of a model.

    Args:
        subject: The model.
        layouts: Names of the layouts.
        items: Ids of the items to measure. Empty: all.
        reference: See :func:`verify_card`.
        is_reduced: Whether trained models are reduced.
        family: Rules for a GPTModel, by name or class path.
        command: Command line, without layouts and items.
        note: Further reductions.
        run: Runs a training on its ranks.

    Raises:
        ConfigError: If a layout or an item has no such name.
    """
    with tempfile.TemporaryDirectory() as folder:
        expected = reference_of(reference, trusts=subject.trusts)
        trained, what = subject, ""
        if is_reduced:
            trained, what = reduce_model(subject, Path(folder, "reduced"))
        work = Verification(
            subject, trained, layouts, Path(folder), reference=expected, family=family, run=run
        )
        asked = _checked(items, work.ids())
        whole = f"{command} --layouts {' '.join(layouts)}"
        header = {
            **describe(whole + (f" --item {' '.join(asked)}" if items else "")),
            "model": subject.name,
            "revision": subject.revision,
            "reduced": "; ".join(filter(None, (note, what))) or None,
        }
        found: list[Item] = []
        for name in asked:
            print(f"{name} …", file=sys.stderr, flush=True)
            found.append(work.measure(name, f"{whole} --item {name}"))
            print(f"{name}: {found[-1].status} {found[-1].why}", file=sys.stderr, flush=True)
        return Card(header, found)


def file_name(model: str, items: Iterable[str] = ()) -> str:
    """Return the name of a card's files, without a suffix. A card of a few items has another."""
    parts = [*Path(model).parts[-2:]] if not Path(model).is_dir() else [Path(model).resolve().name]
    return "_".join([*parts, *(item.replace(":", "-") for item in items)])


def _checked(items: Sequence[str], known: Sequence[str]) -> list[str]:
    unknown = [item for item in items if item not in known]
    if unknown:
        raise ConfigError(
            f"item is {unknown[0]!r}, which is none of {', '.join(known)}. Name one of these, or "
            "fit: with another layout, as in fit:tp2-pp2."
        )
    return [item for item in known if item in items] if items else list(known)


def _options(
    reference: str | None,
    revision: str | None,
    family: str | None,
    *,
    reduced: bool,
    trusts: bool,
) -> list[str]:
    named = {"--reference": reference, "--revision": revision, "--family": family}
    flags = {"--reduced": reduced, "--trust-remote-code": trusts}
    pairs = [word for name, value in named.items() if value is not None for word in (name, value)]
    return pairs + [flag for flag, is_set in flags.items() if is_set]


def _words(value: list[str] | str | None) -> list[str]:
    words = [value] if isinstance(value, str) else value or []
    return list(dict.fromkeys(words))


def _result(card: Card, *, as_json: bool) -> tuple[str, bool]:
    if card.failed:
        print(f"verify-card: failed: {', '.join(card.failed)}", file=sys.stderr)
    text = json_text(card.values(), indent=1) if as_json else page_of(card)
    return text, not card.failed
