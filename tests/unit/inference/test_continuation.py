"""Text of new tokens behind a prompt, stop strings, and bytes of tokens, by three tokenizers."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers")
import transformers

from megatron_lightning.data.text.tokenizer_kinds import ByteTokenizer, JsonTokenizer
from megatron_lightning.data.text.tokenizers import SentencePieceTokenizer, train_sentencepiece
from megatron_lightning.inference.commands.text_codec import Codec, HuggingFaceCodec, PlainCodec
from megatron_lightning.inference.engine.continuation import final_text, text_behind, text_so_far
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.requests import RequestMaker
from megatron_lightning.inference.engine.uncached_loop import Sampling
from tests.helpers.llama_tokenizer import llama_tokenizer
from tests.helpers.spoken import make_tokenizer

END, FACE = "<|im_end|>", "\U0001f600"


@pytest.fixture(scope="module")
def llama() -> Any:
    return HuggingFaceCodec(llama_tokenizer(), "llama")


@pytest.fixture(scope="module")
def codecs(llama: Codec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    folder = tmp_path_factory.mktemp("tokenizers")
    byte_level = make_tokenizer()
    byte_level.save_pretrained(folder / "json")
    train_sentencepiece(["Hello world how are you. "] * 50, 285, folder / "sp.model")
    return {
        "llama": llama,
        "byte level": HuggingFaceCodec(byte_level, "byte level"),
        "json": PlainCodec(JsonTokenizer(folder / "json"), "json"),
        "sentencepiece": PlainCodec(SentencePieceTokenizer(folder / "sp.model"), "sp"),
        "bytes": PlainCodec(ByteTokenizer(), "bytes"),
    }


TEXT = f"Hello world. a{FACE}{FACE} how 日本 you you\n b  a"


@pytest.mark.parametrize("name", ["llama", "byte level", "json", "sentencepiece", "bytes"])
def test_new_tokens_are_what_the_whole_text_has_more(name: str, codecs: dict[str, Codec]) -> None:
    codec = codecs[name]
    ids = codec.encode(TEXT)
    assert codec.decode(ids) == TEXT
    for place in range(1, len(ids)):
        prompt, new = ids[:place], ids[place:]
        before = codec.decode(prompt)
        expected = TEXT[len(before) :] if TEXT.startswith(before) else None
        text = text_behind(codec.decode, prompt, new)
        assert expected is None or text == expected, (place, text)
        assert final_text(codec.decode, prompt, new, ()) == text
        # A stream is a growing begin of the text, whatever the last token is a part of.
        sent = ""
        for count in range(len(new) + 1):
            now = text_so_far(codec.decode, codec, prompt, new[:count], ["how", "you\n"])
            assert now.startswith(sent) and text.startswith(now)
            sent = now
    joined = b"".join(map(codec.bytes_of, ids)).decode()
    assert joined.removeprefix("<s>").removeprefix(" ") == TEXT


def test_a_run_of_bytes_is_held_until_it_ends(llama: Codec) -> None:
    """An incomplete character in a run of bytes spoils the text of the run."""
    ids = llama.ids(f"a{FACE}", special=False)
    incomplete = [*ids, ids[-4]]
    whole = final_text(llama.decode, [1], incomplete, ())
    assert whole == "a" + "\ufffd" * 5
    assert text_so_far(llama.decode, llama, [1], incomplete, ()) == "a"
    assert text_so_far(llama.decode, llama, [1], ids, ()) == "a"
    assert [llama.bytes_of(one) for one in ids[-4:]] == [bytes([x]) for x in FACE.encode()]


def test_a_character_begun_by_the_prompt_is_of_the_continuation(codecs: dict[str, Codec]) -> None:
    codec = codecs["byte level"]
    ids = codec.ids(f"a{FACE}b", special=False)
    assert text_behind(codec.decode, ids[:3], ids[3:]) == f"{FACE}b"


def _written(codec: Codec, prompt: list[int], new: list[int], stop: str) -> tuple[str, int]:
    """Return the text of a model that writes ``new``, and the number of its tokens."""
    maker = RequestMaker(longest=999, decode=codec.decode)
    sampling = Sampling(max_new_tokens=len(new), stop=(stop,))
    request: Request = maker.one(prompt, sampling=sampling)
    for token in new:
        request.take([(token, -1.0, -1.0)])
    tokens = request.new_tokens
    return final_text(codec.decode, prompt, tokens, (stop,)), len(tokens)


def test_stop_texts_with_special_tokens_and_first_spaces(llama: Any) -> None:
    ids = llama.tokenizer.convert_tokens_to_ids
    prompt = llama.encode("Hello")
    new = ids(["▁world", "a", END, "▁how", "b"])
    spelled = [*ids(["▁world", "a"]), *llama.ids(END, special=False)]
    as_text = [260 - 256 + byte for byte in END.encode()]  # the same text, in other tokens
    assert llama.decode(as_text) == END and spelled != as_text
    for stop, text, count in (
        (END, " worlda", 3),
        (f"a{END}", " world", 3),
        (f"{END} h", " worlda", 4),
        ("end|>", " worlda", 3),
        (" world", "", 1),
        (" how", " worlda", 4),
        ("how", " worlda ", 4),
        ("x", " worlda howb", 5),
    ):
        assert _written(llama, prompt, new, stop) == (text, count), stop
    assert _written(llama, prompt, [*ids(["▁world"]), *as_text, *new], END)[0] == " world"
    # The part that a stop text may begin with is held, special tokens included.
    for count, text in ((1, " world"), (2, " world"), (3, " world"), (4, " worlda how")):
        so_far = text_so_far(llama.decode, llama, prompt, new[:count], [f"a{END}x"])
        assert so_far == text, count


def test_a_plain_decode_has_one_form(llama: Any) -> None:
    tokenizer = llama.tokenizer
    prompt, new = llama.encode("Hello"), tokenizer.convert_tokens_to_ids(["▁world", END])
    for decode in (tokenizer.decode, lambda ids: tokenizer.decode(ids)):
        maker = RequestMaker(longest=99, decode=decode)
        request = maker.one(prompt, sampling=Sampling(stop=(END,)))
        request.take([(token, -1.0, -1.0) for token in new])
        assert request.reason == "stop"


def test_special_ids_of_own_tokenizers_have_names_and_no_text(codecs: dict[str, Codec]) -> None:
    for name in ("json", "sentencepiece"):
        codec = codecs[name]
        ids = [*codec.ids("how", special=False), *codec.stops]
        assert codec.decode(ids) == "how"
        assert codec.decode(ids, special=True) == "how</s>"
        assert codec.bytes_of(codec.stops[0]) == b"</s>"


def test_random_ids_stream_to_their_text(codecs: dict[str, Codec]) -> None:
    """Undertrained models write bytes that are no characters."""
    draws = random.Random(0)
    for codec in codecs.values():
        for _ in range(10):
            ids = [draws.randrange(codec.vocab_size) for _ in range(24)]
            prompt, new = ids[:6], ids[6:]
            whole = final_text(codec.decode, prompt, new, ["a"])
            pieces = [
                text_so_far(codec.decode, codec, prompt, new[:count], ["a"]) for count in range(18)
            ]
            for text, longer in zip(pieces, [*pieces[1:], whole], strict=True):
                assert longer.startswith(text)


def test_transformers_agrees(llama: Any) -> None:
    tokenizer: transformers.PreTrainedTokenizerFast = llama.tokenizer
    prompt, new = llama.encode("Hello"), llama.ids("Hello world", special=False)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    assert "Hello" + text_behind(llama.decode, prompt, new) == whole == "Hello Hello world"
