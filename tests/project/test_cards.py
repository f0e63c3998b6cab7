"""Cards of twenty families, and the page that prints the kept ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", "5")

from benchmarks import cards
from megatron_lightning.cards.card import Card
from megatron_lightning.cards.page import page_of


def test_the_page_prints_the_kept_cards() -> None:
    kept = cards.kept()  # checked by the validator
    assert {card.header["model"] for card in kept} == set(cards.FAMILIES)
    for card in kept:
        page = cards.FOLDER / f"{card.header['model']}.md"
        assert page.read_text() == page_of(card)
        assert "random weights" in str(card.header["reduced"])
    assert "\n".join(cards.table(kept)) in cards.PAGE.read_text()


def test_a_table_gives_reasons_in_notes() -> None:
    [card, *_] = cards.kept()
    failed = {"status": "failed", "measured": None, "why": "NaN"}
    items = [type(item)(**{**vars(item), **failed}) for item in card.items[:2]]
    lines = list(cards.table([Card(card.header, items)]))
    assert lines[2].endswith("| failed [1] | failed [1] |") and lines[-1] == "1. failed: NaN"


@pytest.mark.slow
@pytest.mark.parametrize("family", cards.FAMILIES)
def test_a_family_has_a_card(family: str, tmp_path: Path) -> None:
    assert cards.main([family, "--results", str(tmp_path)]) == 0
    [card] = cards.kept(tmp_path)
    status = {item.id: item.status for item in card.items}
    assert status["folder"] == status["logits"] == status["fit:zero1"] == "passed"
