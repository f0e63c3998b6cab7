"""Preference training from files: scores by a prediction, checkpoints, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers", "5")

from safetensors.torch import load_file

from megatron_lightning.checkpoint import read_full
from megatron_lightning.cli import main
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.load import read_config
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.modules import (
    DistillationModule,
    DPOModule,
    GPTLightningModule,
    HuggingFaceModule,
    PreferenceDataModule,
)
from megatron_lightning.modules.first_adapters import ENTRY, FirstAdapters
from megatron_lightning.modules.language_model import token_weights
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import CONFIG
from tests.helpers.chats import make_tokenizer, turn, write_rows
from tests.helpers.layouts import PP, VPP
from tests.helpers.preferences import Preferred
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

SMALL = replace(CONFIG, num_layers=2, vocab_size=320)
ROWS = [
    {
        "prompt": [turn("user", f"what is {number}")],
        "chosen": [turn("assistant", "the sky " * (1 + number % 3))],
        "rejected": [turn("assistant", "grass")],
    }
    for number in range(8)
]


def _data(folder: str, batch_size: int = 4, **options: Any) -> PreferenceDataModule:
    return PreferenceDataModule(
        f"{folder}/rows.jsonl",
        tokenizer=make_tokenizer(),
        sequence_length=32,
        batch_size=batch_size,
        cache_dir=f"{folder}/cache",
        **options,
    )


def _prepare(folder: Path) -> str:
    write_rows(folder / "rows.jsonl", ROWS)
    return str(folder)


def _scored(folder: str, options: dict[str, Any], name: str, size: int = 4) -> list[float]:
    """Predict on all ranks, and train by the file."""
    scores = f"{folder}/{name}.npz"
    module = Preferred(GPTLightningModule(SMALL), reference="scores")
    trainer(MegatronStrategy(**options)).predict(module, datamodule=_data(folder, scores=scores))
    record = Losses()
    fit = trainer(MegatronStrategy(**options), max_steps=2, callbacks=[record])
    module = Preferred(GPTLightningModule(SMALL), reference="scores")
    fit.fit(module, datamodule=_data(folder, size, scores=scores))
    return record.losses


@pytest.mark.slow
def test_scores_are_predicted_on_any_layout(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    [expected] = run_ranks(1, _scored, folder, {}, "one")
    assert expected[0] == pytest.approx(math.log(2), rel=1e-6)
    for losses in run_ranks(2, _scored, folder, {PP: 2, "micro_batch_size": 2}, "pp"):
        assert losses == pytest.approx(expected, rel=1e-6)
    first, second = run_ranks(2, _scored, folder, {}, "dp", 2)
    means = [sum(losses) / 2 for losses in zip(first, second, strict=True)]
    assert means == pytest.approx(expected, rel=1e-6)


def _saved(folder: str) -> tuple[set[str], set[str], dict[str, bool]]:
    """Train with a second model; return what a checkpoint, one of adapters, and optimizers hold."""
    names = []
    for adapters_only in (False, True):
        strategy = MegatronStrategy(
            **{PP: 2, VPP: 2, "micro_batch_size": 2},
            checkpoint_options=CheckpointOptions(adapters_only=adapters_only),
        )
        peft = LoRA() if adapters_only else None
        module = Preferred(GPTLightningModule(SMALL, peft=peft), reference="model")
        fit = trainer(strategy, max_steps=2)
        fit.fit(module, datamodule=_data(folder))
        path = f"{folder}/{adapters_only}.ckpt"
        fit.save_checkpoint(path)
        names.append(path)
        inside = {id(p) for group in fit.optimizers[0].param_groups for p in group["params"]}
        frozen = [id(p) for n, p in module.named_parameters() if ".frozen." in n]
    return {*names}, {str(module.training)}, {"frozen": any(one in inside for one in frozen)}


def _resumed(folder: str) -> dict[str, Any]:
    """Return the parameters after the checkpoint of adapters was loaded into another layout."""
    module = Preferred(GPTLightningModule(SMALL, peft=LoRA()), reference="model")
    fit = trainer(MegatronStrategy(), max_steps=2)
    fit.fit(module, datamodule=_data(folder), ckpt_path=f"{folder}/True.ckpt")
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.slow
def test_the_frozen_model_stays_and_is_in_no_optimizer(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    for _, _, held in run_ranks(2, _saved, folder, timeout_s=110):
        assert held == {"frozen": False}
    full, alone = (read_full(f"{folder}/{name}.ckpt") for name in (False, True))
    state = full["state_dict"]
    assert {name.split(".")[1] for name in state} == {"frozen", "trained"}
    fresh = GPTLightningModule(SMALL)
    fresh.configure_model()
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(state[f"model.frozen.{name}"], value)
        assert not torch.equal(state[f"model.trained.{name}"], value) or value.ndim < 2
    assert all(".trained." in name and ".adapters." in name for name in alone["state_dict"])
    [resumed] = run_ranks(1, _resumed, folder)
    assert all(torch.equal(resumed[name], value) for name, value in alone["state_dict"].items())


class _Seen(pl.Callback):
    """Records after every batch whether adapters leave out rows."""

    def __init__(self) -> None:
        self.found: set[int | None] = set()

    def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
        self.found |= {adapters.half_dim for adapters in adapted_layers(module).values()}

    on_validation_batch_end = on_train_batch_end


def _left_out(folder: str) -> tuple[list[float], set[int | None]]:
    """Train and validate with a reference in other rows of the same call."""
    module = Preferred(GPTLightningModule(SMALL, peft=LoRA()), reference="adapters")
    record, seen = Losses(), _Seen()
    strategy = MegatronStrategy(**{PP: 2, "micro_batch_size": 2})
    fit = trainer(strategy, max_steps=2, callbacks=[record, seen])
    fit.fit(module, datamodule=_data(folder, val_fraction=0.5))
    return record.losses, seen.found


def test_adapters_leave_out_the_rows_of_a_reference_during_a_step_alone(tmp_path: Path) -> None:
    """Callbacks after a batch, such as samples of text, see the adapted model."""
    for losses, found in run_ranks(2, _left_out, _prepare(tmp_path)):
        assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
        assert found == {None}


def test_a_distillation_predicts_nothing() -> None:
    model = GPTLightningModule(SMALL)
    with pytest.raises(ConfigError, match="Export the student"):
        DistillationModule(model, model).predict_step({}, 0)


def test_a_module_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    module = DPOModule(GPTLightningModule(SMALL, peft=LoRA()), loss="ipo", beta=0.3)
    fit = trainer(max_steps=1)
    fit.fit(module, datamodule=_data(folder))
    fit.save_checkpoint(f"{folder}/plain.ckpt")
    loaded = DPOModule.load_from_checkpoint(f"{folder}/plain.ckpt")
    assert loaded.reference == "adapters"
    assert loaded.preference_loss == module.preference_loss
    assert read_config(f"{folder}/plain.ckpt") == SMALL  # as `generate` does
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True)
    )


def _fit_by_preferences(folder: str, loss: Any, steps: int, start: str | None) -> dict[str, Any]:
    """Validate fresh adapters, train from a checkpoint, and return the checkpoint written."""
    module = DPOModule(GPTLightningModule(SMALL, peft=LoRA(), learning_rate=0.1), loss=loss)
    data = _data(folder, val_fraction=0.5)
    fit = trainer(max_steps=steps)
    fit.validate(module, datamodule=data, verbose=False)
    fit.fit(module, datamodule=data, ckpt_path=start)
    fit.save_checkpoint(f"{folder}/{steps}.ckpt")
    return dict(torch.load(f"{folder}/{steps}.ckpt", weights_only=True))


def test_the_first_adapters_are_the_checkpoints_also_after_a_validation(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    begun = _fit_by_preferences(folder, "orpo", 1, None)
    adapters = {k: v for k, v in begun["state_dict"].items() if ".adapters." in k}
    assert ENTRY not in begun and all(v.any() for v in adapters.values())
    for steps in (2, 3):  # the first begins from other training, the second resumes
        own = _fit_by_preferences(folder, "sigmoid", steps, f"{folder}/{steps - 1}.ckpt")
        assert own[ENTRY].keys() == adapters.keys()
        assert all(torch.equal(own[ENTRY][name], adapters[name]) for name in adapters)
        assert not any(torch.equal(own["state_dict"][name], adapters[name]) for name in adapters)


def test_the_reference_of_a_checkpoint_without_first_adapters() -> None:
    """Before first values were saved, "adapters" meant the model without adapters."""
    full, adapted = (GPTLightningModule(SMALL, peft=peft) for peft in (None, LoRA()))
    saved = GPTLightningModule(SMALL, peft=LoRA(modules_to_save=["output_layer"]))
    module = DPOModule(adapted)
    for options, expected in (
        ({"model": adapted}, {}),
        ({"model": adapted, "reference": "adapters", "loss": "ipo"}, {}),
        ({"model": adapted, "reference": "base"}, None),
        ({"model": adapted, "reference": "scores"}, None),
        ({"model": adapted, "reference": "model"}, None),
        ({"model": adapted, "loss": "orpo"}, None),
        ({"model": adapted, "loss": "simpo"}, None),
        ({"model": saved}, None),
        ({"model": full}, None),
    ):
        module.on_load_checkpoint({"hyper_parameters": dict(DPOModule(**options).hparams)})
        assert module._loaded == expected, options
    for settings in (dict(adapted.hparams), {"label_smoothing": 0.1, "loss": "mine"}):
        module.on_load_checkpoint({"hyper_parameters": settings})
        assert module._loaded is None


def test_layers_forget_the_first_values_of_another_start() -> None:
    module = GPTLightningModule(SMALL, peft=LoRA())
    module.configure_model()
    values = {k: v for k, v in module.state_dict().items() if ".adapters." in k}
    for first in (values, {}):
        FirstAdapters(module, None, first).set_first_values()
        assert all(bool(x.first) == bool(first) for x in adapted_layers(module).values())


def test_wrong_references_are_refused() -> None:
    full, adapted = (GPTLightningModule(SMALL, peft=peft) for peft in (None, LoRA()))
    saved = GPTLightningModule(SMALL, peft=LoRA(modules_to_save=["output_layer"]))
    assert DPOModule(full).reference == DPOModule(saved).reference == "scores"
    assert DPOModule(adapted).reference == "adapters"
    assert DPOModule(full, loss="simpo").reference is None
    for options, message in (
        ({"model": full, "reference": "adapters"}, "has no adapters"),
        ({"model": full, "reference": "base"}, "has no adapters"),
        ({"model": saved, "reference": "adapters"}, "trained in place"),
        ({"model": adapted, "reference": "scores", "loss": "orpo"}, "the loss orpo has none"),
        ({"model": full, "loss": "kto", "reference": "scores"}, "mismatched rows"),
        ({"model": full, "reference_model": full}, 'Set reference to "model"'),
        ({"model": torch.nn.Linear(1, 1)}, "GPTLightningModule or a HuggingFaceModule"),
    ):
        with pytest.raises(ConfigError, match=message):
            DPOModule(**options)


def test_batches_of_another_kind_are_named() -> None:
    rows = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"no labels, but chosen.*train a DPOModule"):
        token_weights({"chosen": rows, "rejected": rows})
    with pytest.raises(ConfigError, match=r"no labels, but tokens. Set data whose batches"):
        token_weights({"tokens": rows})
    module = DPOModule(GPTLightningModule(CONFIG), loss="orpo")
    with pytest.raises(ConfigError, match=r"no pairs of answers, but tokens, labels. Set Pref"):
        module._loss({"tokens": rows, "labels": rows})


def test_scores_are_asked_for_before_the_start(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    module = DPOModule(GPTLightningModule(SMALL))
    with pytest.raises(ConfigError, match="scores to a file, which `predict` writes"):
        trainer(MegatronStrategy(), devices=1).fit(module, datamodule=_data(folder))


def _write_model(path: Path, *special: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=320)
    LlamaForCausalLM(config).save_pretrained(path)
    names = ("<|im_start|>", "<|im_end|>", *special)
    make_tokenizer(names, eos_token="<|im_end|>").save_pretrained(path)
    return str(path)


def test_tokenizers_of_teacher_and_student_are_compared(tmp_path: Path) -> None:
    student = HuggingFaceModule(_write_model(tmp_path / "student"))
    other = HuggingFaceModule(_write_model(tmp_path / "other", "<tool>"))
    DistillationModule(student, student).check_tokenizers()
    with pytest.raises(ConfigError, match=r"tokens have another id in the teacher, such as '.*':"):
        trainer(MegatronStrategy(), devices=1).fit(
            DistillationModule(student, other), datamodule=_data(_prepare(tmp_path))
        )


YAML = """
trainer:
  accelerator: cpu
  devices: 4
  strategy:
    class_path: megatron_lightning.strategies.MegatronStrategy
    init_args:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: 2
      micro_batch_size: 2
      start_method: fork
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
model:
  class_path: megatron_lightning.modules.DPOModule
  init_args:
    model:
      class_path: megatron_lightning.modules.HuggingFaceModule
      init_args: {path: %(model)s, learning_rate: 1.0e-4}
    reference: model
data:
  class_path: megatron_lightning.modules.PreferenceDataModule
  init_args: {path: %(rows)s, sequence_length: 32, batch_size: 4, cache_dir: %(cache)s}
"""


@pytest.mark.slow
def test_a_configuration_file_trains_by_preferences(tmp_path: Path) -> None:
    config = tmp_path / "dpo.yaml"
    names = {
        "model": _write_model(tmp_path / "model"),
        "rows": f"{_prepare(tmp_path)}/rows.jsonl",
        "cache": str(tmp_path / "cache"),
    }
    config.write_text(YAML % names)
    main(["fit", f"--config={config}"])


def test_what_is_exported_is_the_trained_model(tmp_path: Path) -> None:
    """A checkpoint of two models of a folder has one to give back."""
    source = _write_model(tmp_path / "model")
    module = DPOModule(HuggingFaceModule(source, learning_rate=1e-2), reference="model")
    fit = trainer(MegatronStrategy(), devices=1, max_steps=2)
    fit.fit(module, datamodule=_data(_prepare(tmp_path)))
    fit.save_checkpoint(tmp_path / "pair.ckpt")
    module.save_hf_pretrained(str(tmp_path / "live"))
    main(["convert", "export", str(tmp_path / "pair.ckpt"), str(tmp_path / "folder")])
    name = "model.layers.0.self_attn.q_proj.weight"
    base, live, exported = (
        load_file(tmp_path / folder / "model.safetensors")[name]
        for folder in ("model", "live", "folder")
    )
    trained = read_full(tmp_path / "pair.ckpt")["state_dict"][f"model.trained.{name}"]
    assert torch.equal(exported, trained)
    assert torch.equal(live, trained)
    assert not torch.equal(base, trained)


def test_a_misspelt_target_is_named_before_the_start(tmp_path: Path) -> None:
    folder = _prepare(tmp_path)
    module = DPOModule(GPTLightningModule(SMALL, peft=LoRA(target_modules=["linear_qkw"])))
    with pytest.raises(ConfigError, match="did you mean 'linear_qkv'"):
        trainer(MegatronStrategy(), devices=1).fit(module, datamodule=_data(folder))
