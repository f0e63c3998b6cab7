"""``MaskedLanguageModule`` on ``MaskedDataModule``: every layout equals one process, with unequal
numbers of labels; resumes, refusals, and the command line."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data.indexed.indexed_files import IndexedDatasetWriter
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import MaskedDataModule, MaskedLanguageModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")

BERT = {
    "model_type": "bert", "architectures": ["BertForPreTraining"], "vocab_size": 128,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 128,
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip
MODELS = {"bert": BERT, "t5": T5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "zero1": {"data_parallel": "zero1", "micro_batch_size": 2},
    "fsdp": {"data_parallel": "fsdp", "micro_batch_size": 1},
}
STEPS, BATCH = 3, 8


def sentence(document: int, number: int) -> list[int]:
    length = 2 + (document * 7919 + number * 31) % 14
    return [10 + (document * 131 + number * 37 + i * 17) % 90 for i in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences, and a tokenizer of word pieces with sentinels."""
    path = tmp_path_factory.mktemp("masked")
    with IndexedDatasetWriter(path / "text", np.int32) as writer:
        for document in range(40):
            sentences = [sentence(document, number) for number in range(1 + document % 6)]
            writer.add_document([*chain(*sentences)], [len(one) for one in sentences])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"##w{i}" if i % 3 == 0 else f"w{i}" for i in range(5, 108)]
    pieces = [*special, *words, *(f"<extra_id_{i}>" for i in range(20))]
    model = {
        "type": "WordPiece", "vocab": {piece: i for i, piece in enumerate(pieces)},
        "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]"}))
    return path


def data_of(folder: Path, kind: Any, batch_size: int, **options: Any) -> MaskedDataModule:
    if kind == "t5":
        options["sequence_length_decoder"] = 24
    defaults = {"split": "80,20,0", "num_train_samples": STEPS * BATCH, "num_val_samples": BATCH}
    return MaskedDataModule(
        str(folder / "text"), kind, 32, batch_size,
        tokenizer_model=str(folder), tokenizer_type="json", **{**defaults, **options},
    )  # fmt: skip


def module_of(kind: str, **options: Any) -> MaskedLanguageModule:
    torch.manual_seed(3)
    return MaskedLanguageModule(
        config=MODELS[kind], **{"learning_rate": 1e-2, "eps": 1e-3} | options
    )


def fit(
    folder: Path, kind: str, layout: dict[str, Any] | None, world: int = 1
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the weights after the fit, and the logged values."""
    replicas = (
        1
        if layout is None
        else world
        // (
            layout.get("tensor_model_parallel_size", 1)
            * layout.get("pipeline_model_parallel_size", 1)
            * layout.get("context_parallel_size", 1)
        )
    )
    module, data = module_of(kind), data_of(folder, kind, BATCH // replicas)
    strategy: Any = "auto" if layout is None else MegatronStrategy(**layout)
    run = trainer(strategy, max_steps=STEPS, limit_val_batches=1, val_check_interval=STEPS)
    run.fit(module, data)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    if isinstance(run.strategy, MegatronStrategy):
        state = run.strategy.full_state_dict()
    else:
        state = module.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}, logged


def fits(folder: Path, kind: str, names: list[str]) -> dict[str, Any]:
    return {name: fit(folder, kind, LAYOUTS[name], 2) for name in names}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("bert", ["pp2", "zero1"]),
        ("t5", ["fsdp", "cp2"]),
        pytest.param("bert", [name for name in LAYOUTS if name != "cp2"], marks=pytest.mark.slow),
        pytest.param("t5", list(LAYOUTS), marks=pytest.mark.slow),
    ],
)
def test_every_layout_equals_one_process(folder: Path, kind: str, layouts: list[str]) -> None:
    ((expected, logged),) = run_ranks(1, fit, folder, kind, None)
    (found, _) = run_ranks(2, fits, folder, kind, layouts)
    for name, (state, values) in found.items():
        assert state.keys() == expected.keys(), name
        for key, tensor in state.items():
            # fp32, sums in another order; Adam with an eps of 1e-3 does not enlarge them
            assert torch.allclose(tensor, expected[key], rtol=0, atol=2e-6), (name, key)
        if (kind == "t5" and "data_parallel" in LAYOUTS[name]) or name == "dp2":
            del values["train_loss"]  # of each rank's own tokens
        assert values == pytest.approx({key: logged[key] for key in values}, rel=1e-5), name
    names = {"train_loss", "val_loss"}
    if kind == "bert":
        names |= {"lm_loss", "class_loss", "val_lm_loss", "val_class_loss"}
    assert logged.keys() == names


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_is_that_of_transformers(folder: Path, kind: str) -> None:
    data, module = data_of(folder, kind, BATCH), module_of(kind)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))  # type: ignore[arg-type]
    module.configure_model()
    if kind == "bert":
        inputs = {
            "input_ids": batch["text"], "attention_mask": batch["padding_mask"],
            "token_type_ids": batch["types"], "next_sentence_label": batch["is_random"],
        }  # fmt: skip
    else:
        inputs = {
            "input_ids": batch["text_enc"], "attention_mask": batch["enc_mask"],
            "decoder_input_ids": batch["text_dec"],
        }  # fmt: skip
        assert len(set(batch["loss_mask"].sum(1).tolist())) > 1
    labels = batch["labels"].masked_fill(batch["labels"] == -1, -100)
    expected = module.model(**inputs, labels=labels).loss
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    assert float(module._loss(batch)[0].detach()) == pytest.approx(
        float(expected.detach()), rel=1e-6
    )
    assert module.predict_step(batch, 0).shape == batch["labels"].shape


def test_a_mean_of_means_is_megatrons(folder: Path) -> None:
    batch = {"labels": torch.tensor([[1, -1], [2, 3]]), "loss_mask": torch.tensor([[1, 0], [1, 1]])}
    assert module_of("t5").num_items(batch) == 3
    assert module_of("t5", calculate_per_token_loss=False).num_items(batch) == 2


def resumed(folder: Path, path: str, layout: str, steps: int, resume: bool) -> dict[str, Any]:
    world = 2 if layout in ("dp2", "fsdp", "zero1") else 1
    run = trainer(MegatronStrategy(**LAYOUTS[layout]), max_steps=steps, limit_val_batches=0)
    run.fit(
        module_of("bert"),
        data_of(folder, "bert", BATCH // world),
        ckpt_path=path if resume else None,
    )
    assert isinstance(run.strategy, MegatronStrategy)
    if not resume and steps < STEPS:
        run.save_checkpoint(path)
    return run.strategy.full_state_dict()


def resume_on_another_layout(folder: Path, path: str) -> tuple[Any, Any]:
    expected = resumed(folder, path, "pp2", STEPS, False)
    resumed(folder, path, "pp2", STEPS - 1, False)
    found = resumed(folder, path, "fsdp", STEPS, True)
    with pytest.raises(CheckpointError, match=r"masking_probability: 0\.3 here, 0\.15 there"):
        trainer(MegatronStrategy(), max_steps=STEPS).fit(
            module_of("bert"),
            data_of(folder, "bert", BATCH // 2, masking_probability=0.3),
            ckpt_path=path,
        )
    return expected, found


@pytest.mark.slow  # test_bridge_kept has a model of transformers that resumes
def test_a_run_resumes_on_another_layout(folder: Path, tmp_path: Path) -> None:
    expected, found = run_ranks(2, resume_on_another_layout, folder, str(tmp_path / "c.ckpt"))[0]
    for key, tensor in found.items():
        assert torch.allclose(tensor, expected[key], rtol=0, atol=2e-6), key  # as above


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gpt"}, "must be one of bert, t5"),
        ({"kind": "bert", "sequence_length_decoder": 9}, 'an option of kind="t5"'),
        ({"kind": "t5"}, "sequence_length_decoder is left out"),
        ({"kind": "bert", "global_batch_size": 8}, "Set one of the two"),
        ({"kind": "bert", "num_train_samples": 0}, "positive integer"),
    ],
)
def test_wrong_options_of_the_data_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskedDataModule(
            str(folder / "text"), sequence_length=32, batch_size=4,
            tokenizer_model=str(folder), tokenizer_type="json", **options,
        )  # fmt: skip


def test_model_and_data_that_do_not_belong_together_are_refused(folder: Path) -> None:
    def check(module: MaskedLanguageModule, kind: str, **options: Any) -> None:
        trainer(max_steps=1).fit(module, data_of(folder, kind, BATCH, **options))

    with pytest.raises(ConfigError, match='kind="t5", and the model is a BertForPreTraining'):
        check(module_of("bert"), "t5")
    with pytest.raises(ConfigError, match="classification_head=False none are"):
        check(module_of("bert"), "bert", classification_head=False)
    small = MaskedLanguageModule(config={**BERT, "vocab_size": 100})
    with pytest.raises(ConfigError, match=r"the data have 128 ids, and the embedding .* has 100"):
        check(small, "bert")
    with pytest.raises(ConfigError, match="path is None and config is None"):
        MaskedLanguageModule()
    with pytest.raises(ConfigError, match="needs model_type and architectures"):
        MaskedLanguageModule(config={"model_type": "bert"}).configure_model()


def test_blends_and_validation_sets(folder: Path) -> None:
    prefix = str(folder / "text")
    data = MaskedDataModule(
        {"train": [[1.0, prefix]], "validation": {"a": prefix}}, "bert", 32, 4,
        tokenizer_model=str(folder), tokenizer_type="json", num_train_samples=8, num_val_samples=4,
    )  # fmt: skip
    run = trainer(max_steps=1, limit_val_batches=1, val_check_interval=1)
    run.fit(module_of("bert"), data)
    assert {"val_loss", "val_loss/a"} <= run.callback_metrics.keys()
    assert float(run.callback_metrics["val_loss/a"]) == pytest.approx(
        float(run.callback_metrics["val_lm_loss"])
    )


def test_the_model_goes_back_to_a_folder(folder: Path, tmp_path: Path) -> None:
    module = module_of("bert")
    module.configure_model()
    module.save_hf_pretrained(str(tmp_path / "bert"))
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "bert")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, module.model.state_dict()[name]), name
    masked = MaskedLanguageModule(str(tmp_path / "bert"))
    masked.configure_model()
    assert masked.has_class and masked.num_items({"labels": torch.zeros(3, 4)}) == 3
