"""Find the causal-LM families of ``transformers`` that part the documents of a row.

    python -m benchmarks.hf_packed --work packed.jsonl
    python -m benchmarks.hf_packed --work packed.jsonl --images

Every family becomes a tiny random model. It gets two rows, one with four documents, with positions
that start again with every document, and then each document alone. A family is *equal* if logits
and gradients agree. It then belongs into ``PACKED_FAMILIES`` of ``models/plans/hf_documents.py``,
unless its layers may be of other kinds. A run continues after the last line of the work file.

With ``--images`` a row has four conversations, with two images, one, none and two, and models
compute in float64. Equal families belong into ``PACKED_WITH_TOWERS``, or, if the model counts time,
height and width apart, into ``PACKED_WITH_POSITION_ROWS``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks import hf_families
from benchmarks.hf_families import Family
from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.images.row_entries import IMAGES, RowEntries
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule
from tests.helpers.image_folders import FAMILIES as IMAGE_FAMILIES
from tests.helpers.image_folders import make_image_folder, write_image_rows

LENGTHS = ((5, 1, 4, 6), (16,))
"""Of the documents of the two rows."""
LOGITS, GRADIENTS = 1e-5, 1e-3
"""Largest differences, as a fraction of the largest value of each tensor."""
EXACT = (1e-6, 1e-6)
"""The same in float64, with norms and routers that compute in fp32."""
DOCUMENTS = (1, 0, 2, 4)
"""Conversations of a row with images."""
Limits = tuple[float, float]
Row = dict[str, Any]


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
    return float((ours - theirs).detach().abs().max() / theirs.abs().max().clamp(min=1e-6))


def image_differences(
    name: str, change: Callable[[dict[str, Any]], None] | None = None
) -> tuple[float, float]:
    """Return the largest differences of logits and of gradients, for a row with images.

    ``change`` changes the packed row, to show that a fault would be seen.
    """
    torch.manual_seed(0)
    with TemporaryDirectory() as work:
        folder = make_image_folder(name, Path(work))
        rows = write_image_rows(Path(work), max(DOCUMENTS) + 1)
        module = HuggingFaceModule(str(folder))
        data = FinetuneDataModule(
            rows, sequence_length=512, batch_size=1, packing="offline", images=ImageOptions(),
            cache_dir=f"{work}/cache",
        )  # fmt: skip
        data.use_model(module)
        data.prepare_data()
        data.setup("fit")
        module.configure_model()
        module.double().eval()
        module.model.set_experts_implementation("eager")  # grouped products have no float64
        sequences: Any = data.train_dataset()
        packed = _double(sequences[DOCUMENTS])
        if change is not None:
            change(packed)
        documents = [_double(sequences[(number,)]) for number in DOCUMENTS]
    batch = {name: value[None] for name, value in packed.items() if name != IMAGES}
    given = module._inputs({**batch, IMAGES: [packed[IMAGES]]})
    ours = module(batch["tokens"], **given)
    theirs = []
    for one in documents:  # as a user of transformers calls the model
        length = int((~one["padding"]).sum())
        entries = RowEntries(data.processor).cut(one[IMAGES], length)  # type: ignore[arg-type]
        images = {name: value for name, value in entries.items() if value.any()}
        theirs.append(module.model(input_ids=one["tokens"][None, :length], **images).logits)
    expected = torch.cat(theirs, 1)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    parameters = [p for p in module.parameters() if p.requires_grad]
    ours = ours[:, : expected.shape[1]]
    found, wanted = (
        torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
        for logits in (ours, expected)
    )
    return _difference(ours, expected), max(
        _difference(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b.any()
    )


def _double(sample: dict[str, Any]) -> dict[str, Any]:
    images = {
        name: value.double() if value.is_floating_point() else value
        for name, value in sample[IMAGES].items()
    }
    return {**sample, IMAGES: images}


def measured(name: str, measure: Callable[[], tuple[float, float]], limits: Limits) -> Row:
    """Return a line of the work file."""
    try:
        logits, gradients = measure()
    except Exception as error:
        return {"family": name, "verdict": "failed", "error": f"{type(error).__name__}: {error}"}
    is_equal = logits <= limits[0] and gradients <= limits[1]
    verdict = "equal" if is_equal else "wrong"
    return {"family": name, "verdict": verdict, "logits": logits, "gradients": gradients}


def main() -> None:
    """Write a line of JSON for every family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="file that takes the results")
    parser.add_argument("--images", action="store_true", help="models with a vision tower")
    options = parser.parse_args()
    work: Path = options.work
    warnings.filterwarnings("ignore")
    lines = work.read_text().splitlines() if work.exists() else []
    done = {json.loads(line)["family"] for line in lines}
    measures: dict[str, Callable[[], tuple[float, float]]]
    if options.images:
        measures = {name: partial(image_differences, name) for name in IMAGE_FAMILIES}
    else:
        families = hf_families.families()
        measures = {family.name: partial(differences, family) for family in families}
    for name in sorted(measures.keys() - done):
        row = measured(name, measures[name], EXACT if options.images else (LOGITS, GRADIENTS))
        print(row, flush=True)
        with work.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
