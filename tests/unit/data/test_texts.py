"""Texts without a template: one begin, one end, and the first token of a completion."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from megatron_lightning.data.chat.chat_encoding import Encoder, SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.documents import Documents
from megatron_lightning.data.rows.preference import PairEncoder
from megatron_lightning.data.rows.row_report import describe_documents, warning_of
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.modules import FinetuneDataModule
from megatron_lightning.modules.model_facts import ModelFacts
from tests.helpers.chats import CHATML, CHATML_TOKENS, make_tokenizer, turn, write_rows


def _tokenizer(*, adds_begin: bool = True) -> ChatTokenizer:
    from tokenizers import processors

    made = make_tokenizer(
        ("<s>", "</s>", *CHATML_TOKENS, "<stop>"), bos_token="<s>", eos_token="</s>"
    )
    if adds_begin:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return ChatTokenizer(made)


def _shown(
    row: dict[str, Any],
    tokenizer: ChatTokenizer | None = None,
    kind: type[Encoder] = Encoder,
    template: str | None = CHATML,
    ends: Collection[int] = (),
) -> list[str]:
    """Return the tokens of every document of a row, with a star before a trained token."""
    tokenizer = tokenizer or _tokenizer()
    chat = None if template is None else ChatTemplate(template, tokenizer.special_tokens)
    encoder = kind(tokenizer, chat, SupervisedOptions(sequence_length=99), ends)
    return [
        "|".join(
            "*" * int(mark) + tokenizer.decode([token])
            for token, mark in zip(one.ids.tolist(), one.trained.tolist(), strict=True)
        )
        for one in encoder.documents([Row("row", row)])
    ]


def test_a_text_that_is_rendered_already_has_one_begin_and_one_end() -> None:
    assert _shown({"text": "<s>blue</s>"}) == ["<s>|*bl|*ue|*</s>"]
    assert _shown({"text": "blue"}) == ["<s>|*bl|*ue|*</s>"]
    assert _shown({"text": "blue"}, _tokenizer(adds_begin=False)) == ["bl|*ue|*</s>"]
    # The end of a turn, with the line break of the template behind it.
    assert _shown({"text": "blue<|im_end|>\n"}) == ["<s>|*bl|*ue|*<|im_end|>|*\n"]
    assert _shown({"text": "blue<|im_end|>\n"}, template=None) == [
        "<s>|*bl|*ue|*<|im_end|>|*\n|*</s>"
    ]
    # An id of the generation configuration.
    stop = _tokenizer().vocabulary["<stop>"]
    assert _shown({"text": "blue<stop>"}, ends=[stop]) == ["<s>|*bl|*ue|*<stop>"]
    assert _shown({"text": "blue<stop>"}) == ["<s>|*bl|*ue|*<stop>|*</s>"]
    row = {"prompt": "<s>blue", "completion": " red<|im_end|>"}
    assert _shown(row) == ["<s>|bl|ue|* red|*<|im_end|>"]
    pair = {"prompt": "<s>blue", "chosen": " red</s>", "rejected": " red<|im_end|>\n"}
    assert _shown(pair, kind=PairEncoder) == [
        "<s>|bl|ue|* red|*</s>", "<s>|bl|ue|* red|*<|im_end|>|*\n"
    ]  # fmt: skip


def test_an_answer_begins_at_the_first_id_that_differs() -> None:
    whole = "<s>|the| sky|* blue|*</s>"
    assert _shown({"prompt": "the sky ", "completion": "blue"}) == [whole]
    assert _shown({"prompt": "the sky", "completion": " blue"}) == [whole]
    pair = {"prompt": "the sky ", "chosen": "blue", "rejected": "red"}
    assert _shown(pair, kind=PairEncoder) == [whole, "<s>|the| sky|* red|*</s>"]
    # A space that stays a token is of the prompt.
    assert _shown({"prompt": "the sky ", "completion": "<stop>"}) == [
        "<s>|the| sky| |*<stop>|*</s>"
    ]
    assert _shown({"prompt": "the", "completion": ""}) == ["<s>|the|*</s>"]


def test_the_answer_of_a_template_that_begins_in_the_prompt_is_trained() -> None:
    """As transformers marks answers: with the token of an answer's first character."""
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    tokenizer = _tokenizer(adds_begin=False)
    messages = [turn("user", "what"), turn("assistant", "blue")]
    oracle = tokenizer.tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    shown = "|".join(
        "*" * mark + tokenizer.decode([token])
        for token, mark in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True)
    )
    assert _shown({"messages": messages}, tokenizer, template=template) == [shown]
    assert "|* blue|*</s>" in shown


@pytest.mark.parametrize("trims", [True, False])
def test_characters_of_a_token_have_its_spaces(trims: bool) -> None:
    """Tokenizers of RoBERTa's kind cut spaces off the characters of a token."""
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    ((_, characters),) = ChatTokenizer(tokenizer).encode(["the sky"])
    assert characters.tolist() == [[0, 3], [3, 7]]


def test_answers_in_a_token_of_the_prompt_are_counted_and_said_once(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    encoder = Encoder(tokenizer, None, SupervisedOptions(sequence_length=99))
    rows = [Row("row", {"prompt": "the sky ", "completion": text}) for text in ("blue", "<stop>")]
    documents = Documents.build(tmp_path / "d", encoder.documents(rows), encoder.counts)
    assert "in their first token: 1" in describe_documents("rows", documents)
    assert "rows: 1 answers begin inside of a token" in str(warning_of("rows", documents))


def test_ends_of_the_generation_configuration_reach_the_documents(tmp_path: Path) -> None:
    tokenizer = _tokenizer().tokenizer
    tokenizer.save_pretrained(tmp_path / "model")
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    for ends, found in ((stop, (stop,)), ([1, stop], (1, stop)), (None, ())):
        text = json.dumps({"eos_token_id": ends})
        (tmp_path / "model" / "generation_config.json").write_text(text)
        assert ModelFacts().generation_ends(tmp_path / "model") == found
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "what is blue<stop>"}])
    for ends, num_ids in (([stop], 5), ([], 6)):
        text = json.dumps({"eos_token_id": ends})
        (tmp_path / "model" / "generation_config.json").write_text(text)
        data = FinetuneDataModule(
            path,
            sequence_length=20,
            batch_size=1,
            tokenizer=str(tmp_path / "model"),
            cache_dir=str(tmp_path / "cache"),
        )
        data.prepare_data()
        assert len(data._documents(path)[0].ids) == num_ids + 1


def test_only_a_file_that_is_absent_is_missing_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the Hub whose request fails has end tokens that nobody has read."""
    httpx2 = pytest.importorskip("httpx2")  # of recent versions of huggingface_hub
    import huggingface_hub
    from huggingface_hub import errors

    from megatron_lightning.inference.commands.text_codec import end_tokens_of

    seen: list[str | None] = []

    def fails(error: Exception, cause: Exception | None = None) -> None:
        def download(path: str, name: str, revision: str | None) -> None:
            seen.append(revision)
            raise error from cause

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    request = httpx2.Request("GET", "https://x")
    answers = {code: httpx2.Response(code, request=request) for code in (404, 500)}
    absent = errors.LocalEntryNotFoundError("not in the cache")
    for error, cause in (
        (errors.RemoteEntryNotFoundError("no file", response=answers[404]), None),
        (absent, None),
        (absent, errors.OfflineModeIsEnabled("offline")),
    ):
        fails(error, cause)
        with warnings.catch_warnings(action="error"):
            assert end_tokens_of("nobody/none", revision="r") == ()
    for error, cause, words in (
        (absent, httpx2.ConnectTimeout("too slow"), "ConnectTimeout: too slow"),
        (TimeoutError("slow"), None, "TimeoutError: slow"),
        (errors.HfHubHTTPError("broken", response=answers[500]), None, "HfHubHTTPError: broken"),
    ):
        fails(error, cause)
        with pytest.warns(UserWarning, match=f"none has generation_config.* revision r .*{words}"):
            assert end_tokens_of("nobody/none", revision="r") == ()
    assert set(seen) == {"r"}
