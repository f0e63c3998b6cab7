"""Conversations train on every layout as in one process: our model and an untouched one, with
documents apart and packed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule, HuggingFaceModule
from tests.helpers.chats import chats, make_tokenizer, write_rows
from tests.helpers.layouts import CP, MICRO, PP, TP, fit, tiny_config
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers")

STEPS, BATCH, SEQUENCE, VOCABULARY = 3, 4, 64, 320
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.1,
}  # fmt: skip
Case = tuple[str, str, dict[str, Any] | None]
"""Model, packing, and options of the strategy; None: plain Lightning."""


@cache
def make_folder() -> str:
    """Return a folder with a model, its tokenizer and chats."""
    folder = Path(mkdtemp())
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    write_rows(folder / "chats.jsonl", chats(60))
    return str(folder)


def make_module(kind: str, folder: str) -> Any:
    if kind == "hf":
        return HuggingFaceModule(folder, learning_rate=1e-3)
    config = tiny_config(num_query_groups=2, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    return GPTLightningModule(config, learning_rate=1e-3)


def _train(case: Case, folder: str, settings: dict[str, Any]) -> Any:
    kind, packing, options = case
    tokenizer = None if kind == "hf" else folder  # the model brings its own
    batch_size = settings.pop("batch_size")
    data = FinetuneDataModule(
        f"{folder}/chats.jsonl",
        sequence_length=SEQUENCE,
        batch_size=batch_size,
        tokenizer=tokenizer,
        packing=packing,  # type: ignore[arg-type]
        val_fraction=0.2,
        cache_dir=f"{folder}/cache",
    )
    settings |= {"steps": STEPS, "val_check_interval": STEPS}
    run = fit(options, make_module(kind, folder), data, **settings)
    return run.losses, run.norms, run.logged["val_loss"]


def _train_all(cases: list[Case], folder: str, settings: dict[str, Any]) -> list[Any]:
    return [_train(case, folder, dict(settings)) for case in cases]


def _compare(
    world: int, options: dict[str, Any], kinds: list[tuple[str, str]], accumulated: int = 1
) -> None:
    """Compare gradient norms and validation, and losses of equal batches; fp32, sums in another
    order: 1e-5. Plain Lightning accumulates nothing here: it would weigh batches alike."""
    batch = BATCH * accumulated
    plain = [(*kind, None) for kind in kinds]
    (expected,) = run_ranks(1, _train_all, plain, make_folder(), {"batch_size": batch})
    replicas = world // (options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1))
    settings = {"batch_size": BATCH // replicas, "accumulate_grad_batches": accumulated}
    cases = [(*kind, options) for kind in kinds]
    found = run_ranks(world, _train_all, cases, make_folder(), settings, timeout_s=240)
    for number, kind in enumerate(kinds):
        losses, norms, value = expected[number]
        for rank in found:
            assert rank[number][1] == pytest.approx(norms, rel=1e-5), kind
            assert rank[number][2] == pytest.approx(value, rel=1e-5), kind
            if replicas == accumulated == 1:
                assert rank[number][0] == pytest.approx(losses, rel=1e-5), kind


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, {PP: 2, MICRO: 2}, id="pp2"),
        pytest.param(4, {TP: 2, PP: 2, MICRO: 2}, id="tp2-pp2", marks=pytest.mark.slow),
    ],
)
def test_tensor_and_pipeline_parallel(world: int, options: dict[str, Any]) -> None:
    _compare(world, options, [("gpt", "offline"), ("hf", "offline")])


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_context_parallel_and_accumulated() -> None:
    _compare(2, {CP: 2, MICRO: 2}, [("gpt", "online"), ("hf", "online")], accumulated=2)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(4, {TP: 2, PP: 2, MICRO: 2}, id="tp2-pp2"),
        pytest.param(2, {"data_parallel": "ddp"}, id="ddp"),
        pytest.param(2, {}, id="zero1"),
        pytest.param(2, {"data_parallel": "fsdp"}, id="fsdp"),
    ],
)
def test_layouts(world: int, options: dict[str, Any]) -> None:
    kinds = [("gpt", "online"), ("hf", "online"), ("gpt", "none"), ("hf", "none")]
    _compare(world, options, kinds)
