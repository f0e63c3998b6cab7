"""Fine-tuning of chats with images on layouts equals one process, and transformers' own losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from benchmarks.hf_packed import image_differences
from megatron_lightning.callbacks import SampleText
from megatron_lightning.config import ContextOptions
from megatron_lightning.data.images.image_options import AudioOptions, ImageOptions
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.image_folders import make_image_folder, write_image_rows
from tests.helpers.layouts import fit_losses, make_layout
from tests.helpers.ranks import run_ranks
from tests.helpers.sound_folders import make_sound_folder, write_sound_rows
from tests.helpers.trainers import trainer

STEPS, GLOBAL_BATCH = 3, 4
SOUND = "qwen2_audio"
"""Model of sounds."""
_DEALT = ContextOptions(chunks_per_rank=4)
LAYOUTS = {
    layout.name: layout
    for layout in (
        make_layout("tp2", 2, tp=2),
        make_layout("pp2", 2, pp=2, mbs=1),  # stages of micro-batches with and without images
        make_layout("fsdp2", 2, dp="fsdp"),  # in some steps a rank has no image
        make_layout("tp2-pp2", 4, tp=2, pp=2, mbs=2),
        make_layout("cp2", 2, cp=2),
        make_layout("cp2-pp2", 4, cp=2, pp=2, mbs=1),
        make_layout("tp2-cp2", 4, tp=2, cp=2),
        make_layout("cp2-fsdp2", 4, cp=2, dp="fsdp"),
        make_layout("cp2-dealt", 2, cp=2, mbs=1, context_options=_DEALT),
        make_layout("cp2-pp2-dealt", 4, cp=2, pp=2, mbs=1, context_options=_DEALT),
    )
}
Run = tuple[list[float], list[float]]


@cache
def _folders(family: str) -> tuple[str, str]:
    """Return the folder of a model, and rows."""
    parent = Path(mkdtemp(prefix="images-"))
    if family == SOUND:
        return str(make_sound_folder(parent)), write_sound_rows(parent, GLOBAL_BATCH * STEPS)
    return str(make_image_folder(family, parent)), write_image_rows(parent, GLOBAL_BATCH * STEPS)


def _fit(layout: str | None, model: str, rows: str, packing: str = "none") -> Run:
    """Return losses and gradient norms."""
    chosen = None if layout is None else LAYOUTS[layout]
    data = FinetuneDataModule(
        rows,
        sequence_length=192,
        batch_size=(GLOBAL_BATCH if packing == "none" else 2) // (chosen.data if chosen else 1),
        packing=packing,
        images=None if SOUND in model else ImageOptions(),
        audio=AudioOptions() if SOUND in model else None,
        cache_dir=f"{model}/../cache",
    )
    module = HuggingFaceModule(model, learning_rate=1e-2)
    return fit_losses(chosen, module, data, steps=STEPS, gradient_clip_val=1.0)


@cache
def _one_process(family: str) -> Run:
    ((losses, norms),) = run_ranks(1, partial(_fit, None, *_folders(family)))
    return losses, norms


# Idefics3 moves its embeddings to the device of the model, of which a stage lacks parameters.
# The tower of Qwen3-VL is large beside the text model, and ranks without an image do not call it.
_USUAL = (("fsdp2", "qwen3_vl"), ("tp2", "gemma3"), ("pp2", SOUND))
_CASES = [
    pytest.param(layout, family, marks=() if (layout, family) in _USUAL else pytest.mark.slow)
    for layout in LAYOUTS
    if "dealt" not in layout
    for family in ("qwen2_5_vl", "llava", "gemma3", "idefics3", "qwen3_vl", SOUND)
    if "cp2" not in layout or family not in ("gemma3", SOUND)  # refused
]


@pytest.mark.parametrize(("layout", "family"), _CASES)
def test_a_layout_equals_one_process(layout: str, family: str) -> None:
    expected, norms = _one_process(family)
    results = run_ranks(LAYOUTS[layout].ranks, partial(_fit, layout, *_folders(family)))
    # fp32, sums in another order.
    assert results[0][1] == pytest.approx(norms, rel=2e-5)
    if LAYOUTS[layout].data == 1:  # ranks with other rows have means of other tokens
        assert results[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("cp2", "qwen2_5_vl"),
        *(
            pytest.param(layout, family, marks=pytest.mark.slow)
            for layout, family in (
                ("pp2", "llava"), ("tp2", "gemma3"), ("pp2", "qwen2_5_vl"), ("cp2", "llava"),
                ("cp2", "idefics3"), ("cp2-pp2", "qwen3_vl"), ("tp2-cp2", "qwen2_5_vl"),
                ("cp2-fsdp2", "llava"), ("cp2-dealt", "qwen2_5_vl"), ("cp2-pp2-dealt", "qwen3_vl"),
                ("cp2-dealt", "llava"),
            )
        ),
    ],
)  # fmt: skip
def test_packed_rows_on_a_layout_equal_one_process(layout: str, family: str) -> None:
    model, rows = _folders(family)
    ((expected, norms),) = run_ranks(1, partial(_fit, None, model, rows, "online"))
    results = run_ranks(LAYOUTS[layout].ranks, partial(_fit, layout, model, rows, "online"))
    if LAYOUTS[layout].data == 1:
        assert results[0][0] == pytest.approx(expected, rel=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=2e-5)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    for family in ("qwen2_5_vl", "gemma3"):
        model, rows = _folders(family)
        module = HuggingFaceModule(model)
        data = FinetuneDataModule(
            rows, sequence_length=192, batch_size=3, images=ImageOptions(), cache_dir=str(tmp_path)
        )
        data.use_model(module)
        data.prepare_data()
        data.setup("fit")
        stock = AutoModelForImageTextToText.from_pretrained(model).train()
        batch = next(iter(data.train_dataloader()))
        losses, counts = 0.0, 0
        for row in range(3):  # alone, as a user would call it
            length = int((~batch["padding"][row]).sum())
            given = {
                name: value[:, :length] if name.endswith("token_type_ids") else value
                for name, value in batch["images"][row].items()
                if value.numel()
            }
            logits = stock(input_ids=batch["tokens"][row : row + 1, :length], **given).logits
            labels = batch["labels"][row, :length]
            losses += torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum").item()
            counts += int((labels != -100).sum())
        own = module.training_step(batch, 0)["loss"].item()
        assert own == pytest.approx(losses / counts, rel=1e-5)


@pytest.mark.parametrize("family", ["llava", "gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_packed_rows_are_the_conversations_alone(family: str) -> None:
    logits, gradients = image_differences(family)
    assert logits <= 1e-12  # float64
    assert gradients <= 1e-6  # some norms compute in fp32


Change = Callable[[dict[str, Any]], None]


def _flat(sample: dict[str, Any]) -> None:
    rows = sample["position_rows"]
    rows[1:] = rows[0]


def _swapped(sample: dict[str, Any]) -> None:
    pixels = sample["images"]["pixel_values"]
    pixels[:] = pixels.roll(32, 0)  # patches of an image of 20 x 36


def _without_padding(sample: dict[str, Any]) -> None:
    entries = sample["images"]  # the types of a text without images are missing between others
    entries["token_type_ids"] = entries["token_type_ids"].roll(-33, 1)


@pytest.mark.parametrize(
    ("family", "change"),
    [("qwen2_5_vl", _flat), ("qwen2_5_vl", _swapped), ("gemma3", _without_padding)],
)
def test_a_fault_in_packed_rows_is_seen(family: str, change: Change) -> None:
    assert max(image_differences(family, change)) > 1e-4


def test_a_resumed_fit_reads_the_images_of_the_rest(tmp_path: Path) -> None:
    model, rows = _folders("llava")

    def fitted(name: str, steps: int, ckpt_path: str | None = None, workers: int = 0) -> pl.Trainer:
        data = FinetuneDataModule(
            rows,
            sequence_length=192,
            batch_size=4,
            num_workers=workers,
            images=ImageOptions(),
            cache_dir=str(tmp_path / "cache"),
        )
        run = trainer(MegatronStrategy(), max_steps=steps, default_root_dir=tmp_path)
        run.fit(HuggingFaceModule(model, learning_rate=1e-2), data, ckpt_path=ckpt_path)
        run.save_checkpoint(tmp_path / name)
        return run

    whole = fitted("whole", 3)
    fitted("half", 2)
    resumed = fitted("resumed", 3, str(tmp_path / "half"), workers=1)
    weights = resumed.lightning_module.state_dict()
    for name, weight in whole.lightning_module.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def _third_step(model: str, rows: str, folder: str, batch: int, workers: int) -> list[str]:
    """Resume behind two steps, and return digests of the rows of the third."""
    seen: list[str] = []

    class Rows(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, module: Any, batch: Any, _: int
        ) -> None:
            for tokens, images in zip(batch["tokens"], batch["images"], strict=True):
                values = [tokens[: int(tokens.count_nonzero())], *images.values()]
                kept = [value.numpy().tobytes() for value in values if value.any()]
                seen.append(sha256(b"".join(kept)).hexdigest())

    data = FinetuneDataModule(
        rows, sequence_length=192, batch_size=batch, num_workers=workers, images=ImageOptions(),
        cache_dir=f"{folder}/cache", pad_to=192,
    )  # fmt: skip
    run = trainer(MegatronStrategy(), max_steps=3, callbacks=[Rows()], default_root_dir=folder)
    run.fit(HuggingFaceModule(model), data, ckpt_path=f"{folder}/half")
    return seen


def _first_steps(model: str, rows: str, folder: str) -> None:
    data = FinetuneDataModule(
        rows, sequence_length=192, batch_size=4, images=ImageOptions(),
        cache_dir=f"{folder}/cache", pad_to=192,
    )  # fmt: skip
    run = trainer(MegatronStrategy(), max_steps=2, default_root_dir=folder)
    run.fit(HuggingFaceModule(model), data)
    run.save_checkpoint(Path(folder, "half"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_ranks_and_workers_read_the_rest_bit_by_bit(tmp_path: Path) -> None:
    given = (*_folders("llava"), str(tmp_path))
    run_ranks(1, partial(_first_steps, *given))
    (expected,) = run_ranks(1, partial(_third_step, *given, 4, 0))
    assert len(expected) == 4
    ranks = run_ranks(2, partial(_third_step, *given, 2, 1))
    assert sorted(digest for rank in ranks for digest in rank) == sorted(expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_texts_on_two_ranks_are_those_of_one_process() -> None:
    model, rows = _folders("llava")
    image = [str(Path(rows).parent / "0.png")]
    asked: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "chat": True}
    found = [
        generate(
            ModelOptions(checkpoint=model, tensor_model_parallel_size=size),
            "what", images=image, **asked,
        )
        for size in (1, 2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_texts_about_images_are_written_in_a_fit(tmp_path: Path) -> None:
    model, rows = _folders("llava")
    image = str(Path(rows).parent / "0.png")
    asked: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "chat": True}
    text = SampleText(["what", "what"], every_n_steps=1, images=[[image], []], **asked)
    data = FinetuneDataModule(
        rows, sequence_length=192, batch_size=4, images=ImageOptions(), cache_dir=str(tmp_path)
    )
    run = trainer(MegatronStrategy(), max_steps=1, callbacks=[text], default_root_dir=tmp_path)
    run.fit(HuggingFaceModule(model, learning_rate=0.0), data)
    options = ModelOptions(checkpoint=model)
    expected = [generate(options, "what", images=files, **asked) for files in ([image], None)]
    assert text.texts == [(1, expected)]
    assert expected[0] != expected[1]
