"""Models of folders, adapters, preferences and conversations train on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from megatron_lightning.config import CheckpointOptions
from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule, HuggingFaceModule
from megatron_lightning.parallel.shards.stored_weight import plain_tensors, stored_weights
from megatron_lightning.peft import LoRA
from tests.gpu.against_cpu import (
    BF16_RTOL,
    NEEDS_GPU,
    RTOL,
    accelerators,
    assert_equals_cpu,
    on_gpu,
    train,
)
from tests.helpers import hf_models, image_models
from tests.helpers.adapted import BATCH, TEXT, Tuned, llama
from tests.helpers.layouts import token_rows
from tests.helpers.preferences import (
    PAIRS,
    Distilled,
    Preferred,
    make_folders,
    scored,
    template,
)
from tests.parity.test_chat_data import SEQUENCE, make_folder, make_module
from tests.parity.test_low_precision_base import experts

pytestmark = NEEDS_GPU

ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
# Adam's steps of gradients that are 0 but for rounding would be as large as any other.
OF_MODULE: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3}


def text() -> DataLoader[Any]:
    """Return batches of random tokens."""
    return DataLoader(ROWS, batch_size=BATCH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of a Llama, in which is one of a larger teacher."""
    return make_folders(str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of a Llama whose rows are whole blocks of 8-bit formats."""
    path = tmp_path_factory.mktemp("wide")
    llama(intermediate_size=128).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "gpt-oss", "gpt2", "t5", "bert"])
def test_untouched_models(name: str) -> None:
    """SGD, which amplifies nothing."""
    assert_equals_cpu(
        lambda: hf_models.Untouched(name), {"micro_batch_size": 2}, lambda: hf_models.loader(name),
        gradient_clip_val=None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_untouched_models_in_bf16(name: str) -> None:
    def make() -> pl.LightningModule:
        return hf_models.Untouched(name)

    runs = [
        on_gpu(make, None, hf_models.loader(name), precision=precision, gradient_clip_val=None)
        for precision in ("bf16-mixed", "32-true")
    ]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=2 * BF16_RTOL)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_models_with_images(name: str) -> None:
    assert_equals_cpu(
        lambda: image_models.ImageModel(name), None, lambda: image_models.loader(name),
        gradient_clip_val=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt", "hub"])
def test_a_folder(folder: str, kind: str) -> None:
    """The strategy reads the weights of the folder onto the GPU."""
    assert_equals_cpu(_of_folder(kind, folder), None, text, built=False)


def _of_folder(kind: str, folder: str, **options: Any) -> Callable[[], pl.LightningModule]:
    def make() -> pl.LightningModule:
        if kind == "gpt":
            return GPTLightningModule(init_from_hf=folder, **OF_MODULE, **options)
        return HuggingFaceModule(folder, **OF_MODULE, **options)

    return make


ADAPTERS: Mapping[str, LoRA] = {
    "lora": LoRA(),
    "dora": LoRA(use_dora=True),
    "rslora": LoRA(use_rslora=True),
}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_adapters(kind: str, adapters: str) -> None:
    assert_equals_cpu(lambda: Tuned(kind, lora=ADAPTERS[adapters]), None, text)


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", ["gpt", "hub"])
def test_adapters_drawn_on_the_gpu(folder: str, kind: str, adapters: str) -> None:
    """The strategy builds model and adapters on the GPU, with the values of the CPU."""
    make = _of_folder(kind, folder, peft=ADAPTERS[adapters])
    assert_equals_cpu(make, None, text, built=False)


def test_adapters_of_experts() -> None:
    config = experts()
    rows = token_rows(3 * BATCH, 16, config.vocab_size)

    def data() -> DataLoader[Any]:
        return DataLoader(rows, batch_size=BATCH)

    def make() -> pl.LightningModule:
        return GPTLightningModule(config, **OF_MODULE, peft=LoRA(r=8))

    expected = assert_equals_cpu(make, None, data)
    run = on_gpu(make, None, data(), precision="bf16-mixed")
    assert run.losses == pytest.approx(expected.losses, rel=2 * BF16_RTOL)


BASES = ("mxfp8", "nvfp4", "blockwise")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["gpt", "hub"])
def test_adapters_beside_a_base_of_few_bits(wide: str, kind: str, base: Any) -> None:
    """Adapters are drawn, and the base is rounded, on the CPU."""
    run = assert_equals_cpu(_of_folder(kind, wide, peft=LoRA(r=4, base=base)), None, text)
    assert stored_weights(run.module)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["gpt", "hub"])
def test_the_gpu_rounds_a_base_as_the_cpu_does(wide: str, kind: str, base: Any) -> None:
    """To the same codes. B of adapters begins with zeros, so that A does not change the first
    loss."""
    make = _of_folder(kind, wide, peft=LoRA(r=4, base=base))
    runs = [train(each, make, None, text(), built=False, steps=1) for each in accelerators()]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=RTOL)
    expected, found = (stored_weights(run.module) for run in runs)
    assert found.keys() == expected.keys() and found
    for name, weight in found.items():
        for own, other in zip(plain_tensors(weight), plain_tensors(expected[name]), strict=True):
            assert torch.equal(own.cpu(), other.cpu()), name


@pytest.mark.parametrize("base", BASES)
def test_adapters_beside_a_base_of_few_bits_in_bf16(wide: str, base: Any) -> None:
    make = _of_folder("gpt", wide, peft=LoRA(r=4, base=base))
    run = on_gpu(make, None, text(), precision="bf16-mixed")
    assert stored_weights(run.module)
    expected = on_gpu(make, None, text())
    assert run.losses == pytest.approx(expected.losses, rel=BF16_RTOL)


def test_checkpoints_of_adapters_alone(folder: str, tmp_path: Path) -> None:
    """Saved on the GPU, resumed on the CPU."""
    only = {"checkpoint_options": CheckpointOptions(adapters_only=True)}
    make, path = _of_folder("gpt", folder, peft=LoRA(r=4)), str(tmp_path / "adapters.ckpt")
    whole = on_gpu(make, only, text(), steps=4)
    on_gpu(make, only, text(), steps=2).trainer.save_checkpoint(path)
    for accelerator in accelerators():
        resumed = train(accelerator, make, only, text(), built=False, steps=4, ckpt_path=path)
        assert resumed.losses == pytest.approx(whole.losses[2:], rel=RTOL)


def test_new_tokens(folder: str) -> None:
    """New rows of the embedding are drawn alike."""
    for kind in ("gpt", "hub"):

        def make(kind: str = kind) -> pl.LightningModule:
            module: Any = _of_folder(kind, folder)()
            module.new_tokens = {"<a>": 126, "<b>": 127}
            return module

        assert_equals_cpu(make, None, text, built=False)


@pytest.mark.parametrize("packing", ["none", "offline"])
@pytest.mark.parametrize("kind", ["gpt", "hf"])
def test_conversations(kind: str, packing: Any) -> None:
    path = make_folder()

    def data() -> FinetuneDataModule:
        return FinetuneDataModule(
            f"{path}/chats.jsonl", sequence_length=SEQUENCE, batch_size=4,
            tokenizer=None if kind == "hf" else path, packing=packing, val_fraction=0.2,
            cache_dir=f"{path}/cache",
        )  # fmt: skip

    assert_equals_cpu(
        lambda: make_module(kind, path), {"micro_batch_size": 2}, data, built=kind == "gpt",
        val_check_interval=3,
    )  # fmt: skip


@pytest.mark.parametrize("reference", ["model", "adapters", "scores"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_dpo(folder: str, kind: str, reference: str) -> None:
    rows: Any = scored() if reference == "scores" else PAIRS

    def make() -> pl.LightningModule:
        inner = template(kind, folder, adapters=reference == "adapters")
        return Preferred(inner, reference=reference)

    # Adapters are drawn on the CPU.
    built = reference == "adapters"
    assert_equals_cpu(make, None, lambda: DataLoader(rows, batch_size=4), built=built)


@pytest.mark.parametrize(
    "of_loss", [{"kind": "forward"}, {"kind": "top_k", "k": 8}], ids=["forward", "top_k"]
)
def test_distillation(folder: str, of_loss: dict[str, Any]) -> None:
    rows: Any = [{"tokens": pair["chosen"], "labels": pair["chosen_labels"]} for pair in PAIRS]

    def make() -> pl.LightningModule:
        student = template("gpt", folder, adapters=False)
        return Distilled(student, HuggingFaceModule(f"{folder}/teacher"), **of_loss)

    assert_equals_cpu(make, None, lambda: DataLoader(rows, batch_size=4), built=False)
