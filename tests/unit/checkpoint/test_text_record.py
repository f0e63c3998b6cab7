"""The record of texts: what training taught, applied to the files of a folder; ends of answers,
dates of prompts, and templates for serving.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.checkpoint.text_record import TextRecord, end_tokens
from megatron_lightning.data.chat.template_texts import PromptDate, without_marks
from megatron_lightning.errors import CheckpointError, ConfigError, DataError
from megatron_lightning.inference.commands.load import find_codec, find_stops
from megatron_lightning.modules import FinetuneDataModule, PreferenceDataModule
from tests.helpers.chats import CHATML, CHATML_TOKENS, make_tokenizer, turn, write_rows

NAMES = {"eos_token": "<end>", "pad_token": "<end>"}


def _json(files: dict[str, bytes], name: str) -> Any:
    return json.loads(files[name])


def test_end_tokens_join_those_of_the_folder() -> None:
    record = TextRecord(end_of_turn=(7, 2))
    config = json.dumps({"eos_token_id": 2, "bos_token_id": 1}).encode()
    values = {"_from_model_config": True, "eos_token_id": [2, 5], "temperature": 0.6}
    old = json.dumps(values).encode()
    new = record.applied_to({"config.json": config, "generation_config.json": old})
    assert _json(new, "generation_config.json") == {"eos_token_id": [2, 5, 7], "temperature": 0.6}
    assert new["config.json"] == config
    assert record.applied_to(new) == new  # again, in a resumed run
    # Without the file, transformers reads config.json.
    made = record.applied_to({"config.json": config})
    assert _json(made, "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 7]}
    nested = {"config.json": json.dumps({"text_config": {"eos_token_id": 7}}).encode()}
    assert end_tokens(TextRecord(end_of_turn=(7,)).applied_to(nested)) == (7,)
    assert TextRecord(end_of_turn=(7,)).applied_to(nested) == nested
    assert _json(record.applied_to({}), "generation_config.json") == {"eos_token_id": [7, 2]}


def test_the_template_is_where_every_reader_looks(tmp_path: Path) -> None:
    """``transformers`` prefers the file, and llama.cpp the entry of the configuration."""
    tokenizer = make_tokenizer(template=None)
    tokenizer.chat_template = {"default": "old", "tool_use": "old tools"}
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x"}))
    files = dict(KeptFiles.of_folder(tmp_path).contents)
    assert any("tool_use" in name for name in files)
    new = TextRecord(chat_template=CHATML).applied_to(files)
    assert _json(new, "tokenizer_config.json")["chat_template"] == CHATML
    with KeptFiles(new).unpacked() as folder:
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    assert TextRecord().applied_to(files) == files


def test_another_tokenizer_takes_the_place_of_the_folder_s() -> None:
    files = {"tokenizer.model": b"old", "vocab.json": b"old", "config.json": b'{"eos_token_id": 1}'}
    record = TextRecord(tokenizer=KeptFiles({"tokenizer.json": b"new"}))
    assert record.applied_to(files) == {
        "tokenizer.json": b"new",
        "config.json": b'{"eos_token_id": 1}',
    }


def test_a_record_comes_back_from_a_checkpoint_and_a_damaged_one_is_refused() -> None:
    record = TextRecord(
        chat_template="{{ x }}",
        end_of_turn=(3,),
        ends_before=(1,),
        date="2026-11-28",
        tokenizer=KeptFiles({"tokenizer.json": b"{}"}),
    )
    assert TextRecord.of_checkpoint({"texts": record.state}, "c") == record
    assert TextRecord.of_checkpoint({}, "c") is None  # from before the record
    for damaged in ({"end_of_turn": ["3"]}, {"chat_template": 3}, [1], {"tokenizer": {"a": 1}}):
        with pytest.raises(CheckpointError, match="damaged"):
            TextRecord.of_checkpoint({"texts": damaged}, "c")


# ------------------------------------------------------------------------------------ answers' ends

GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "a line break behind the end": (CHATML, CHATML_TOKENS, ("<|im_end|>",)),
    "the next header": (GLM, ("<|user|>", "<|assistant|>"), ("<|user|>",)),
    "none": (PLAIN, CHATML_TOKENS, ()),
}


def _data(tmp_path: Path, template: str, special: tuple[str, ...], **options: Any) -> Any:
    tokenizer = make_tokenizer(("<end>", *special), template=template, **NAMES)
    turns = [turn("user", "what is"), turn("assistant", "sky"), turn("user", "why is blue")]
    rows = [{"messages": [*turns, turn("assistant", "red " * length)]} for length in range(1, 9)]
    settings = {"sequence_length": 256, "batch_size": 1, "cache_dir": str(tmp_path / "cache")}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = FinetuneDataModule(path, tokenizer=tokenizer, **{**settings, **options})
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.filterwarnings("ignore:.*end without a special token")
@pytest.mark.parametrize("case", ENDS)
def test_ends_of_answers_are_those_of_the_documents(tmp_path: Path, case: str) -> None:
    template, special, expected = ENDS[case]
    data = _data(tmp_path, template, special)
    ends = data.tokenizer.tokenizer.convert_ids_to_tokens(list(data.text_record().end_of_turn))
    assert tuple(ends) == expected


def test_cut_documents_and_masked_reasoning_end_no_answer(tmp_path: Path) -> None:
    template = CHATML.replace("{{ message.content }}", "<think>{{ message.content }}</think>a")
    special = ("<think>", "</think>", *CHATML_TOKENS)
    for options in ({"reasoning": "mask"}, {"truncation": "right", "sequence_length": 50}):
        data = _data(tmp_path, template, special, **options)
        ends = data.tokenizer.tokenizer.convert_ids_to_tokens(list(data.text_record().end_of_turn))
        assert ends == ["<|im_end|>"]


# -------------------------------------------------------------------------------------------- dates

DATED = (
    "\n  {%- macro today() -%}{{ strftime_now('%d %b %Y') if strftime_now is defined else 'x' }}"
    "{%- endmacro %}\n\n{{ today() }} {{ strftime_now('%Y-%m-%d %H:%M') }}|{{ date_string }}|"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_the_date_of_prompts_is_that_of_the_data(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [turn("user", "x")]}])
    other = write_rows(tmp_path / "b.jsonl", [])
    os.utime(path, (0, datetime.datetime(2026, 3, 1, 23, tzinfo=datetime.timezone.utc).timestamp()))
    os.utime(other, (0, 0))
    tokenizer = make_tokenizer(template=DATED)

    def text(**options: Any) -> tuple[str, Any]:
        data = FinetuneDataModule(
            [path, other], sequence_length=8, batch_size=1, tokenizer=tokenizer, **options
        )
        assert data.template is not None
        chat: Any = type("Chat", (), {"tools": None, "where": "row", "options": {}})()
        return data.template.render(chat, [turn("user", "hi")])[0], data

    from_files, data = text()
    assert from_files == "\n01 Mar 2026 2026-03-01 00:00||hi"
    later = text(date="2026-03-02")[1]
    assert later.template.identity != data.template.identity == text()[1].template.identity
    assert text(date="2025-12-24")[0] == "\n24 Dec 2025 2025-12-24 00:00|24 Dec 2025|hi"
    options = {"date_string": "now"}
    assert text(date="2025-12-24", template_options=options)[0].endswith("|now|hi")
    with pytest.raises(ConfigError, match="date='today' is no date"):
        text(date="today")
    # A template with a default date of its own keeps the default, as in serving.
    tokenizer.chat_template = "{{ date_string | default('26 Jul 2024') }}"
    assert text()[0] == "26 Jul 2024"
    assert text(date="2025-12-24")[0] == "24 Dec 2025"


def test_text_around_a_dated_template_stays() -> None:
    """As without the clock before the template, white space at its begin included."""
    for begin in (
        "",
        "\n",
        "\n\n",
        "  {% if true %}\n a{% endif %}",
        "{%- if true -%} b{% endif %}",
    ):
        template = begin + "{{ strftime_now('%B') }}"
        clock = PromptDate(datetime.date(2026, 2, 3)).preamble([template])
        expected = begin + "{{ month }}"
        texts = [
            render_jinja_template([[]], chat_template=text, month="February")[0][0]
            for text in (clock + template, expected)
        ]
        assert texts[0] == texts[1]
    assert not PromptDate(datetime.date(2026, 2, 3)).preamble(["{{ messages }}"])


def test_data_without_a_date_ask_for_one(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", [{"messages": [turn("user", "x"), turn("assistant", "y")]}]
    )
    data = PreferenceDataModule(
        "org/data", sequence_length=8, batch_size=1, tokenizer=make_tokenizer(template=DATED)
    )
    assert data.date is None  # texts without a conversation need none
    data = FinetuneDataModule(
        [path, "org/data"],
        sequence_length=8,
        batch_size=1,
        tokenizer=make_tokenizer(template=DATED),
    )
    with pytest.raises(DataError, match="set date of the data module, such as date=2026-11-28"):
        data.prepare_data()


def test_marks_of_training_are_left_out_of_the_served_template() -> None:
    """Marks trim white space as blocks do. Comments in their place do, too."""
    marked = (
        "{% for m in messages %}\n<{{ m.role }}>\n    {% generation %}\n"
        "{{ m.content }} {%- generation -%}  x  {%- endgeneration -%} \n {% endgeneration %}\n"
        "{%+ generation %}y{% endgeneration +%}\n\n{% endfor %}\n"
    )
    served = without_marks(marked)
    assert "generation" not in served
    messages = [[turn("user", "a"), turn("assistant", "b")]]
    texts = [render_jinja_template(messages, chat_template=text)[0] for text in (marked, served)]
    assert texts[0] == texts[1]
    assert without_marks(CHATML) == CHATML


# ---------------------------------------------------------------------------------------------- Hub


def test_a_hub_id_ends_its_texts_as_the_folder_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from the cache, without a word to the Hub. Tokenizers know one end."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    tokenizer = make_tokenizer(("<end>", *CHATML_TOKENS), **NAMES)
    tokenizer.save_pretrained(snapshot)
    ends = [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    for name in (str(snapshot), "org/tiny"):
        assert find_stops(name) == find_codec(name).stops == tuple(ends)
    assert find_stops("org/unknown") == ()
