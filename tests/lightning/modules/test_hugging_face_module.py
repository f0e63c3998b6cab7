"""``HuggingFaceModule``: from the command line and from Python, its precision, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.cli import trainer_cli
from megatron_lightning.data.text.preprocess import preprocess
from megatron_lightning.errors import ConfigError, MissingCheckpointError
from megatron_lightning.modules import HuggingFaceModule, PretrainDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")

VOCABULARY, SEQUENCE, BATCH = 67, 12, 8
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("folder") / "llama"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def _rows(num_steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (num_steps * BATCH, SEQUENCE + 1), generator=generator)
    rows: list[dict[str, Tensor]] = []
    for index, line in enumerate(text):
        rows.append({"tokens": line[:-1], "labels": line[1:].clone()})
        rows[-1]["labels"][: index % 7] = -100
    data: Any = rows
    return DataLoader(data, batch_size=BATCH)


class Rates(pl.Callback):
    """Collects the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _fit(
    path: str, options: dict[str, Any] | None, settings: dict[str, Any], precision: str = "32-true"
) -> tuple[list[float], list[float], float, torch.dtype]:
    """Return losses, rates, how far a norm of ones has moved, and its dtype."""
    module = HuggingFaceModule(path, **settings)
    rates = Rates()
    run = fit(options, module, _rows(4), max_epochs=1, callbacks=[rates], precision=precision)
    norms = (x for name, x in module.named_parameters() if name.endswith("norm.weight"))
    weight = next(norms).detach()
    return run.losses, rates.rates, float((weight.float() - 1).abs().max()), weight.dtype


@pytest.mark.slow
def test_a_masked_training_under_a_pipeline_equals_plain_lightning(folder: str) -> None:
    settings = {"learning_rate": 1e-3, "warmup_steps": 0.5, "decay_steps": "max"}
    (plain,) = run_ranks(1, _fit, folder, None, settings)
    options = {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}
    for losses, rates, _, _ in run_ranks(2, _fit, folder, options, settings):
        assert losses == pytest.approx(plain[0], rel=1e-5)  # fp32, sums in another order
        assert rates == plain[1] == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("options", [None, {}])
def test_a_bf16_folder_moves_at_a_small_rate(
    folder: str, precision: str, options: dict[str, Any] | None
) -> None:
    """A step of 1e-5 is below half a unit of a bf16 weight of 1, so parameters have to be fp32, or
    have main params in fp32."""
    settings = {"weight_decay": 0.0}
    ((_, _, moved, dtype),) = run_ranks(1, _fit, folder, options, settings, precision)
    assert dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    if precision != "bf16-true":
        assert moved == pytest.approx(4e-5, rel=0.2)  # Adam moves by the rate in each of 4 steps


def test_the_command_line_trains_a_folder(folder: str) -> None:
    args = [
        "--model=HuggingFaceModule", f"--model.path={folder}", "--model.decay_steps=max",
        "--data.data_prefix=text", "--data.sequence_length=8", "--data.batch_size=2",
        "--trainer.accelerator=cpu", "--trainer.logger=false",
    ]  # fmt: skip
    module = trainer_cli(args, run=False).model
    assert isinstance(module, HuggingFaceModule)
    assert module.learning_rate == 1e-5


def test_what_cannot_work_is_refused_before_processes_start(folder: str, tmp_path: Path) -> None:
    def fit(path: object, **options: Any) -> None:
        strategy = MegatronStrategy(**options)
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False).fit(
            HuggingFaceModule(str(path)), _rows(1)
        )

    with pytest.raises(
        MissingCheckpointError, match="neither a file nor a folder nobody/no-such-model"
    ):
        fit("nobody/no-such-model")
    with pytest.raises(MissingCheckpointError, match=r"has no config\.json"):
        fit(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    with pytest.raises(ConfigError, match="describes a model of type 'unheard'"):
        fit(tmp_path)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="set trust_remote_code=True if you trust it"):
        fit(tmp_path)
    with pytest.raises(ConfigError, match="pipeline"):
        fit(folder, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4)


def test_a_resume_with_another_configuration_is_refused(folder: str, tmp_path: Path) -> None:
    saved = {
        "attention_dropout": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    }
    module = HuggingFaceModule(folder, config_overrides=saved)
    run = trainer("auto", max_steps=1)
    run.fit(module, _rows(1))
    run.save_checkpoint(path := str(tmp_path / "a.ckpt"))

    def resumed(**overrides: Any) -> Any:
        module = HuggingFaceModule("gone", config_overrides=overrides)
        module.loads_from = path  # as MegatronStrategy sets it
        return module._bridge().config

    for same in ({}, saved, {"attention_dropout": 0.25}):
        config = resumed(**same)
        assert config.attention_dropout == 0.25 and config.rope_parameters["rope_theta"] == 5e3
    for other, message in (
        (
            {**saved, "attention_dropout": 0.5},
            r"attention_dropout to 0\.5, and .* has 0\.25: .* Set",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            r"rope_parameters to .*10000\.0.* has .*5000\.0",
        ),
        ({"attention_dropuot": 0.5}, "has no such entry"),
    ):
        with pytest.raises(ConfigError, match=message):
            resumed(**other)


def test_documents_of_a_row_are_as_if_alone(folder: str) -> None:
    module = HuggingFaceModule(folder)
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
    packed = module(tokens, document_ids=ids)
    alone = [module(tokens[:1, :3]), module(tokens[:1, 3:])]
    torch.testing.assert_close(packed[:1], torch.cat(alone, 1), rtol=1e-5, atol=1e-5)  # fp32
    module.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="on 2 rows that hold several documents"):
        module(tokens, document_ids=ids)
    module.model.config.update({"_attn_implementation": "sdpa", "use_cache": True})
    with pytest.raises(ConfigError, match="lets the documents of a row see each other"):
        module(tokens, document_ids=ids)
    module.model.config.update({"use_cache": False, "model_type": "mamba"})
    with pytest.raises(ConfigError, match=r"\(mamba\) is not known to part documents"):
        module(tokens, document_ids=ids)


def test_positions_that_run_on_are_refused(folder: str, tmp_path: Path) -> None:
    """Megatron's reset_attention_mask without reset_position_ids."""
    prefixes = preprocess(str(tmp_path / "text"), str(Path(__file__)), vocab_size=400)
    data = PretrainDataModule(
        prefixes["text"], 8, 2, tokenizer_model=str(tmp_path / "text_tokenizer.model"),
        reset_attention_mask=True, split="1", vocab_size=400,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="Set reset_position_ids, too"):
        trainer("auto", max_steps=1).fit(HuggingFaceModule(folder), datamodule=data)


def test_schedules_that_cannot_be_are_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"the Trainer's are -?(inf|1)"):
        fit = trainer("auto", max_epochs=-1)
        fit.fit(HuggingFaceModule(folder, decay_steps="max"), _rows(1))
    with pytest.raises(ConfigError, match="it is a number of steps, or a fraction below 1"):
        HuggingFaceModule(folder, warmup_steps=1.5)
