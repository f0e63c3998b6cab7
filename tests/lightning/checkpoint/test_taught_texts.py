"""What training taught about texts travels with the weights: template, end of a turn, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers", "5")

from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_lightning.bridge.commands import export as export_model
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.data.chat.template_texts import without_marks
from megatron_lightning.errors import CheckpointError
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.load import find_codec, find_stops
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.live.live_codec import find_codec as find_codec_of_fit
from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.peft.commands import export, import_, merge
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import llama
from tests.helpers.chats import CHATML_TOKENS, make_tokenizer, turn, write_rows
from tests.helpers.layouts import tiny_config
from tests.helpers.trainers import trainer

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION, ANSWER = "what is the color of sky", "blue"
EOS, END = 0, 2


class Paths(NamedTuple):
    base: str
    rows: str


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A base model that ends texts by <end>, without a template."""
    folder = tmp_path_factory.mktemp("texts")
    model = llama(vocab_size=320, num_hidden_layers=2, eos_token_id=EOS, bos_token_id=None)
    model.save_pretrained(folder / "base")
    names = {"eos_token": "<end>", "pad_token": "<end>"}
    make_tokenizer(("<end>", *CHATML_TOKENS), template=None, **names).save_pretrained(
        folder / "base"
    )
    messages = [turn("user", QUESTION), turn("assistant", ANSWER)]
    return Paths(
        str(folder / "base"), write_rows(folder / "rows.jsonl", [{"messages": messages}] * 8)
    )


def _fit(
    module: pl.LightningModule, data: pl.LightningDataModule, path: Path, steps: int, **options: Any
) -> pl.Trainer:
    strategy = MegatronStrategy(checkpoint_options=CheckpointOptions(**options))
    run = trainer(strategy, max_steps=steps)
    run.fit(module, datamodule=data)
    run.save_checkpoint(path)
    return run


def _data(paths: Paths, **options: Any) -> FinetuneDataModule:
    settings = {"sequence_length": 32, "batch_size": 8, "cache_dir": f"{paths.rows}-cache"}
    return FinetuneDataModule(paths.rows, **{"chat_template": MARKED, **settings, **options})


def _check(folder: str | Path) -> None:
    """Check that a folder stops where training taught it, and renders as served."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == without_marks(MARKED)
    assert tokenizer.eos_token_id == EOS
    generation = json.loads((Path(folder) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [EOS, END]


@pytest.mark.slow
def test_a_fully_tuned_base_model_stops_wherever_it_goes(paths: Paths, tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint, written = tmp_path / "x.ckpt", [tmp_path / name for name in ("a", "b", "c")]
    module = HuggingFaceModule(paths.base, learning_rate=1e-2)
    run = _fit(module, _data(paths), checkpoint, 30, also_save_hf="every")
    export_model(str(checkpoint), str(written[0]))
    run.strategy.save_hf_pretrained(written[1])  # type: ignore[attr-defined]
    module.save_hf_pretrained(str(written[2]))
    for folder in (*written, checkpoint / "hugging_face"):
        _check(folder)
    assert json.loads((written[0] / "config.json").read_text())["eos_token_id"] == EOS
    # The oracle writes the answer and stops. So do our engine and the model of the fit.
    tokenizer = AutoTokenizer.from_pretrained(written[0])
    question = [turn("user", QUESTION)]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    length = prompt["input_ids"].shape[1]
    for model in (AutoModelForCausalLM.from_pretrained(written[0]), module.model):
        text = model.generate(**prompt, max_new_tokens=9, do_sample=False, pad_token_id=EOS)
        assert text[0, length:].tolist() == [*tokenizer.encode(ANSWER), END]
    for source in (checkpoint, written[0]):
        model_of = ModelOptions(checkpoint=str(source), device="cpu")
        answers = generate(model_of, QUESTION, chat=True, max_new_tokens=9, temperature=0.0)
        assert answers == [ANSWER]
    # A further run on other data keeps what the first one taught.
    again = HuggingFaceModule(str(checkpoint))
    again.configure_model()
    again.save_hf_pretrained(str(tmp_path / "again"))
    _check(tmp_path / "again")


@pytest.mark.spread(1)
@pytest.mark.parametrize("adapters_only", [True, False])
def test_adapters_bring_what_they_were_taught(
    paths: Paths, tmp_path: Path, adapters_only: bool
) -> None:
    checkpoint = str(tmp_path / "x.ckpt")
    module = HuggingFaceModule(paths.base, peft=LoRA(r=2))
    _fit(module, _data(paths), Path(checkpoint), 1, adapters_only=adapters_only)
    folders = {name: str(tmp_path / name) for name in ("adapters", "merged", "imported.ckpt")}
    export(checkpoint, folders["adapters"])
    templates = Path(paths.base) / "additional_chat_templates"
    templates.mkdir(exist_ok=True)
    (templates / "tool_use.jinja").write_text("of the base")
    merge(checkpoint, folders["merged"], base=None if adapters_only else paths.base)
    shutil.rmtree(templates)
    import_(folders["adapters"], folders["imported.ckpt"], base=paths.base)
    export(folders["imported.ckpt"], str(tmp_path / "again"))
    for folder in (folders["adapters"], folders["merged"], tmp_path / "again"):
        _check(folder)
    sources = [(paths.base, checkpoint)] if adapters_only else [(checkpoint, None)]
    sources += [(paths.base, folders["adapters"]), (paths.base, folders["imported.ckpt"])]
    for model, adapters in sources:
        codec = find_codec(model, adapters)
        assert {EOS, END} == {*codec.stops, *find_stops(model, adapters)}
        assert codec.chat_text([turn("user", "a")]).endswith("<|im_start|>assistant\n")
    assert find_stops(paths.base) == (EOS,)


def test_a_model_without_a_folder_keeps_the_tokenizer_of_its_data(
    paths: Paths, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "x.ckpt")
    module = GPTLightningModule(tiny_config(num_layers=2, vocab_size=320, max_sequence_length=32))
    data = _data(paths, tokenizer=paths.base)
    _fit(module, data, Path(checkpoint), 1)
    for codec in (find_codec(checkpoint), find_codec_of_fit(module, data, None, "sentencepiece")):
        assert codec.stops == (EOS, END)
        assert codec.chat_text([turn("user", "a")]).endswith("<|im_start|>assistant\n")
    export_model(checkpoint, str(tmp_path / "folder"))
    _check(tmp_path / "folder")


def test_a_tokenizer_of_the_data_takes_the_place_of_the_model_s(
    paths: Paths, tmp_path: Path
) -> None:
    """As the instruct model's tokenizer with a base model. The same tokenizer changes nothing."""
    names = {"eos_token": "<stop>", "pad_token": "<stop>"}
    make_tokenizer(("<stop>", *CHATML_TOKENS), **names).save_pretrained(tmp_path / "other")
    for source, expected in ((paths.base, "<end>"), (str(tmp_path / "other"), "<stop>")):
        module = HuggingFaceModule(paths.base)
        data = _data(paths, tokenizer=source)
        _fit(module, data, tmp_path / "x.ckpt", 1)
        assert (data.text_record().tokenizer is None) == (source == paths.base)
        target = tmp_path / expected
        module.save_hf_pretrained(str(target))
        assert AutoTokenizer.from_pretrained(target).eos_token == expected
        _check(target)


def test_a_resume_reads_the_same_rows_and_names_another_date(paths: Paths, tmp_path: Path) -> None:
    """The first run ends a text behind a header, and so does the next one, whose checkpoint says
    that generation stops at headers.
    """
    template = (
        "{{ strftime_now('%d') }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    )
    turns = [turn("user", "a"), turn("assistant", "not why sky")] * 2
    rows = [{"text": "sky<|im_start|>"}] * 4 + [{"messages": turns}] * 4
    path = write_rows(tmp_path / "rows.jsonl", rows)
    records = []
    for steps, date in ((1, "27"), (2, "27"), (2, "28")):
        data = _data(Paths(paths.base, path), chat_template=template, date=f"2026-11-{date}")
        run = trainer(MegatronStrategy(), max_steps=steps)
        start = tmp_path / "1.ckpt" if steps > 1 else None
        if date == "28":
            with pytest.raises(CheckpointError, match="date: 2026-11-28 here, 2026-11-27 there"):
                run.fit(HuggingFaceModule(paths.base), datamodule=data, ckpt_path=start)
            continue
        run.fit(HuggingFaceModule(paths.base), datamodule=data, ckpt_path=start)
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        records.append(data.text_record())
    assert records[0] == records[1]
    assert {*records[0].end_of_turn} == {EOS, 1} and records[0].ends_before == (EOS,)
