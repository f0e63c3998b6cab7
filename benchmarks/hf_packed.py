"""Which causal-LM families of ``transformers`` part the documents that share a row.

    python -m benchmarks.hf_packed --work packed.jsonl

Every family becomes a tiny random model. It gets two rows, one with four documents, with positions
that start again with every document, and then each document alone. A family is *equal* if logits
and gradients agree. It then belongs into ``PACKED_FAMILIES`` of ``models/plans/hf_documents.py``,
unless its layers may be of other kinds. A run continues after the last line of the work file.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import hf_families
from benchmarks.hf_families import Family

LENGTHS = ((5, 1, 4, 6), (16,))
"""Of the documents of the two rows."""
LOGITS, GRADIENTS = 1e-5, 1e-3
"""Largest differences, as a fraction of the largest value of each tensor."""


def differences(family: Family) -> tuple[float, float]:
    """Return the largest differences of logits and of gradients."""
    model: Any = hf_families.build(family, hf_families.small_config(family)).float()
    model.config.use_cache = False
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, hf_families.VOCABULARY, (2, sum(LENGTHS[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    packed: Tensor = model(input_ids=rows, position_ids=positions).logits
    alone = torch.stack(
        [
            torch.cat([model(input_ids=one[None]).logits[0] for one in row.split(lengths)])
            for row, lengths in zip(rows, LENGTHS, strict=True)
        ]
    )
    weights = torch.randn(packed.shape, generator=generator)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
        for logits in (packed, alone)
    )
    return _difference(packed, alone), max(
        _difference(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b.any()
    )


def _difference(ours: Tensor, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


def main() -> None:
    """Write a line of JSON for every family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="file that takes the results")
    work: Path = parser.parse_args().work
    warnings.filterwarnings("ignore")
    lines = work.read_text().splitlines() if work.exists() else []
    done = {json.loads(line)["family"] for line in lines}
    for family in hf_families.families():
        if family.name in done:
            continue
        row: dict[str, Any] = {"family": family.name}
        try:
            logits, gradients = differences(family)
            equal = logits < LOGITS and gradients < GRADIENTS
            row |= {"verdict": "equal" if equal else "wrong", "logits": logits}
        except Exception as error:
            row |= {"verdict": "failed", "error": f"{type(error).__name__}: {str(error)[:200]}"}
        with work.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
