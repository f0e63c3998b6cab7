"""Text written about images: ids and texts are those of ``transformers``."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import warnings
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.data.images import processor_parts
from megatron_lightning.data.images.image_prompts import prompts_if_any
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.inference.commands import generate as generate_command
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.load import find_codec, find_image_prompts
from megatron_lightning.inference.commands.model_options import ModelOptions
from tests.helpers.image_folders import USUAL, draw_image, make_image_folder, part, words
from tests.helpers.sound_folders import make_sound_folder, write_sound

NUM_NEW = 5
KINDS = ("image", "audio")


@cache
def _folder(family: str) -> Path:
    return make_image_folder(family, Path(mkdtemp(prefix="images-")))


def _stock(family: str, content: list[Any], pictures: list[Any]) -> str:
    """Return the text of ``transformers`` alone, by the processor and ``generate`` of the model."""
    from transformers import AutoModelForImageTextToText

    folder = _folder(family)
    maker = find_image_prompts(folder, find_codec(folder))
    processor: Any = maker.processor._processor
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        chat_template=processor.tokenizer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt"},
    )
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return str(processor.tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("family", USUAL)
def test_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    names = [draw_image(tmp_path / f"{n}.png", 20, 36 - 16 * n, n) for n in range(2)]
    pickle.dumps(
        find_image_prompts(_folder(family), find_codec(_folder(family))).of_question(
            "what", [str(tmp_path / names[0])]
        )
    )
    pictures = [Image.open(tmp_path / name) for name in names]
    stock_parts = [{"type": "image", "image": one} for one in pictures]
    expected = _stock(family, [*stock_parts, words("what color")], pictures)
    options = ModelOptions(checkpoint=str(_folder(family)))
    paths = [str(tmp_path / name) for name in names]
    asked = {"chat": True, "temperature": 0.0, "max_new_tokens": NUM_NEW}
    [found] = generate(options, "what color", images=paths, **asked)  # type: ignore[arg-type]
    assert found == expected
    messages = [{"role": "user", "content": [*map(part, names), words("what color")]}]
    text_only = [{"role": "user", "content": "what color"}]
    rows = tmp_path / "asked.jsonl"
    rows.write_text("".join(f"{json.dumps({'messages': one})}\n" for one in (messages, text_only)))
    both = generate(options, messages=str(rows), temperature=0.0, max_new_tokens=NUM_NEW)
    assert both == [expected, _stock(family, [words("what color")], [])]
    assert both[0] != both[1]


def test_answers_about_sounds_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2AudioForConditionalGeneration

    folder = make_sound_folder(tmp_path)
    name = str(tmp_path / write_sound(tmp_path / "a.wav", 0.4))
    maker = find_image_prompts(folder, find_codec(folder))
    question = maker.of_question("what is it", [name])
    assert question.entries is not None
    sent = pickle.loads(pickle.dumps(question))  # to the ranks of a layout
    assert sent.entries.keys() == question.entries.keys()
    stock = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()
    given = {"input_ids": torch.tensor([question.ids]), **question.entries}
    ids = stock.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)[0, len(question.ids) :]
    tokenizer: Any = maker.processor._processor.tokenizer
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    options = ModelOptions(checkpoint=str(folder))
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
    assert generate(options, "what is it", audio=[name], chat=True, **wanted) == [expected]
    encoded = base64.b64encode(Path(name).read_bytes()).decode()
    sound = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    turns = [{"role": "user", "content": [sound, words("what is it")]}]
    rows = tmp_path / "asked.jsonl"
    rows.write_text(json.dumps({"messages": turns}))
    assert generate(options, messages=str(rows), **wanted) == [expected]
    with pytest.raises(ConfigError, match="and the model reads sounds"):
        generate(options, "what", images=[name], chat=True)
    with pytest.raises(ConfigError, match="images and audio are both set"):
        generate(options, "what", images=[name], audio=[name], chat=True)
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": [_url(_png())]}]}))
    with pytest.raises(DataError, match="message 0 has an image, and sounds alone are read"):
        generate(options, messages=str(rows))
    slow = str(tmp_path / write_sound(tmp_path / "b.wav", 0.4, rate=8_000))
    with pytest.raises(DataError, match="8,000 samples a second"):
        generate(options, "what", audio=[slow], chat=True)

    pytest.importorskip("fastapi")
    from megatron_lightning.inference.serving.api_images import chat_with_images
    from megatron_lightning.inference.serving.api_models import ApiError, ChatBody, validated

    def asked(part: Any) -> Any:
        body = {"messages": [{"role": "user", "content": [part, words("what is it")]}]}
        return chat_with_images(validated(ChatBody, body), body, maker, lambda *_: None)

    assert asked(sound).ids == question.ids
    for wrong in ({"data": "AAAA", "format": "mp3"}, {"data": "/etc/passwd", "format": "wav"}):
        with pytest.raises(ApiError, match="is no WAV file"):
            asked({"type": "input_audio", "input_audio": wrong})


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    options = ModelOptions(checkpoint=str(_folder("llava")))
    with pytest.raises(ConfigError, match="set chat, and prompts"):
        generate(options, "what", images=["a.png"])
    with pytest.raises(ConfigError, match="nothing to continue"):
        generate(options)
    with pytest.raises(ConfigError, match="both set"):
        generate(options, "what", messages="a.jsonl")
    with pytest.raises(DataError, match="there is no image"):
        generate(options, "what", chat=True, images=["/a.png"])
    with pytest.raises(DataError, match="the prompt has <image> as words"):
        generate(options, "<image>", chat=True, images=[str(_drawn(tmp_path))])


def test_every_row_of_messages_keeps_its_fields(tmp_path: Path) -> None:
    folder = _folder("qwen2_5_vl")
    options = ModelOptions(checkpoint=str(folder))
    asked = {"messages": [{"role": "user", "content": "what color"}]}
    system = {"role": "system", "content": "be brief"}
    rows = tmp_path / "asked.jsonl"
    wanted = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
    turns = ({**asked, "system": "be brief"}, {"messages": [system, *asked["messages"]]}, asked)
    rows.write_text("".join(f"{json.dumps(one)}\n" for one in turns))
    first, same, without = generate(options, messages=str(rows), **wanted)  # type: ignore[arg-type]
    assert first == same != without
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    rows.write_text(json.dumps({**asked, "tools": [tool]}))
    with pytest.raises(DataError, match="does not write the row's tools"):
        generate(options, messages=str(rows))


def test_the_template_and_settings_of_training_write_the_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    files = {one.name: one.read_bytes() for one in _folder("qwen2_5_vl").iterdir()}
    options = {"size": {"shortest_edge": 256, "longest_edge": 512}}
    record = TextRecord(processor_options=options)
    assert TextRecord.of_checkpoint({"texts": record.state}, "a") == record
    folder.mkdir()
    for name, content in record.applied_to(files).items():
        (folder / name).write_bytes(content)
    codec, image = find_codec(folder), [draw_image(tmp_path / "a.png", 40, 24)]
    paths = [str(tmp_path / one) for one in image]
    small = find_image_prompts(folder, codec).of_question("what", paths)
    full = find_image_prompts(_folder("qwen2_5_vl"), codec).of_question("what", paths)
    assert len(small.ids) < len(full.ids)
    trained: Any = find_codec(folder)  # such as of adapters
    trained.tokenizer.chat_template = f"Look: {trained.tokenizer.chat_template}"
    own = find_image_prompts(folder, trained).of_question("what", paths)
    assert codec.decode(own.ids).startswith("Look: ")


def test_a_broken_processor_is_no_model_of_text(tmp_path: Path) -> None:
    def load(name: str) -> None:
        folder = tmp_path / name
        codec = find_codec(folder)
        assert prompts_if_any(lambda: find_image_prompts(folder, codec)) is None

    for name in ("broken", "text"):
        folder = tmp_path / name
        folder.mkdir()
        for one in _folder("llava").iterdir():
            if one.name != "preprocessor_config.json" and one.suffix != ".safetensors":
                (folder / one.name).write_bytes(one.read_bytes())
    for one in ("processor_config.json", "config.json"):
        (tmp_path / "text" / one).unlink()
    with pytest.warns(UserWarning, match="text alone: .* has no image processor"):
        load("broken")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load("text")


def test_a_model_that_sees_and_hears_is_asked_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*parts: str) -> None:
        kind = SimpleNamespace(get_attributes=lambda: [*parts, "tokenizer"])
        monkeypatch.setattr(processor_parts, "processor_class", lambda *_, **__: kind)

    both = ("image_processor", "feature_extractor")
    for parts, found in ((both, KINDS), (both[:1], ("image",) * 2), (both[1:], ("audio",) * 2)):
        reads(*parts)
        assert tuple(processor_parts.kind_of_folder(tmp_path, kind) for kind in KINDS) == found
    asked: list[str] = []
    maker = SimpleNamespace(of_chat=lambda chat, _: chat.images[0].kind)
    monkeypatch.setattr(
        generate_command, "find_image_prompts", lambda _, __, kind: asked.append(kind) or maker
    )
    rows = tmp_path / "rows.jsonl"
    kinds = ["audio", "image", "audio"]
    turns = ([{"role": "user", "content": [{"type": kind, kind: "a"}]}] for kind in kinds)
    rows.write_text("".join(f"{json.dumps({'messages': one})}\n" for one in turns))
    codec = find_codec(_folder("llava"))
    assert generate_command._conversations("", codec, str(rows)) == kinds  # type: ignore[comparison-overlap]
    assert asked == ["audio", "image"]


def test_a_processor_without_its_package_reads_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder of transformers stands for its class."""

    def fail() -> None:
        raise ImportError("PixtralProcessor requires the Torchvision library")

    kind = SimpleNamespace(get_attributes=fail)
    monkeypatch.setattr(processor_parts, "processor_class", lambda *_, **__: kind)
    folder = _folder("llava")
    codec = find_codec(folder)
    with pytest.warns(UserWarning, match="text alone: .* Install torchvision"):
        assert prompts_if_any(lambda: find_image_prompts(folder, codec)) is None


def test_words_of_images_are_refused_wherever_a_template_writes_them(tmp_path: Path) -> None:
    folder = _folder("gemma3")
    maker = find_image_prompts(folder, find_codec(folder))
    image = {"type": "image", "image": _drawn(tmp_path).read_bytes()}
    asked: dict[str, Any] = {"role": "user", "content": [image]}
    for word in maker.processor.words:
        with pytest.raises(DataError, match=f"the request has {word} as words"):
            maker.of_messages("the request", [asked, {"role": word, "content": "a"}])
    assert maker.of_messages("the request", [asked]).entries is not None


def test_a_prompt_that_the_model_refuses_ends_no_server() -> None:
    from megatron_lightning.inference.commands.load import load_engine
    from megatron_lightning.inference.engine.uncached_loop import Sampling
    from megatron_lightning.inference.serving.own_stepping import OwnStepping
    from megatron_lightning.inference.serving.serving_thread import start

    folder = _folder("gemma3")
    maker = find_image_prompts(folder, find_codec(folder))
    image = Image.new("RGB", (16, 16))
    prompt = maker.of_text(maker.processor.placeholder, [image])
    ids, images = prompt.ids, prompt.images
    stepping = OwnStepping(load_engine(folder), 4)
    thread = start(stepping, lambda: None)
    told: Queue[Any] = Queue()
    sampling = Sampling(max_new_tokens=1, temperature=0.0)
    try:
        stepping.add([*ids, *ids], sampling, 0, told.put, images)
        assert "the model cannot answer this prompt (ValueError" in str(told.get(timeout=20))
        stepping.add(ids, sampling, 0, told.put, images)
        assert told.get(timeout=20).tokens[:-1] == ids
    finally:
        stepping.end()
        thread.join()
    assert stepping.failure is None


def test_a_text_that_nobody_reads_ends_and_waiting_images_are_bytes() -> None:
    from megatron_lightning.inference.commands.load import load_engine
    from megatron_lightning.inference.engine.uncached_loop import Sampling
    from megatron_lightning.inference.serving.own_stepping import OwnStepping
    from megatron_lightning.inference.serving.serving_thread import start

    folder = _folder("qwen2_5_vl")
    maker = find_image_prompts(folder, find_codec(folder))
    picture = {"type": "image", "image": _png()}
    prompt = maker.of_messages("the request", [{"role": "user", "content": [picture]}])
    assert prompt.images is not None and prompt.images.num_bytes == len(_png())
    stepping = OwnStepping(load_engine(folder), 4)
    told: Queue[Any] = Queue()
    long = Sampling(max_new_tokens=400, temperature=0.0)
    first, second = (stepping.add(prompt.ids, long, 0, told.put, prompt.images) for _ in range(2))
    assert stepping.image_bytes == len(_png())  # shared by the texts of a prompt
    stepping.give_up(second)
    assert stepping.image_bytes == len(_png())
    thread = start(stepping, lambda: None)
    try:
        request = told.get(timeout=20)
        assert stepping.image_bytes == 0
        stepping.give_up(first)
        stepping.add(prompt.ids, Sampling(max_new_tokens=1), 0, told.put, prompt.images)
        while told.get(timeout=20) is request:
            pass
    finally:
        stepping.end()
        thread.join()
    assert request.reason == "abort" and len(request.new_tokens) < 400
    assert stepping.failure is None


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (36, 20), "red").save(buffer, "PNG")
    return buffer.getvalue()


def _drawn(folder: Path) -> Path:
    return folder / draw_image(folder / "a.png", 20, 36)


def _url(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def _bomb() -> bytes:
    header = b"IHDR" + struct.pack(">II5B", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT"


def test_a_server_answers_about_data_urls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    from megatron_lightning.inference.commands.load import load_engine
    from megatron_lightning.inference.serving.own_stepping import OwnStepping
    from megatron_lightning.inference.serving.server import Server, ServerSettings
    from megatron_lightning.inference.serving.serving_thread import start

    folder = _folder("qwen2_5_vl")
    codec = find_codec(folder)
    engine = load_engine(folder, stops=codec.stops, decode=codec.decode)
    stepping = OwnStepping(engine, 4)
    thread = start(stepping, lambda: None)
    images = find_image_prompts(folder, codec, max_images=2, max_pixels=1_000_000)
    settings = ServerSettings(name="tiny", longest=engine.longest)
    server = Server(stepping, codec, settings, images)
    client = TestClient(server.app())
    name = draw_image(tmp_path / "a.png", 20, 36)

    def asked(*content: Any, **options: Any) -> Any:
        messages = [{"role": "user", "content": [*content, words("what color")]}]
        body = {"messages": messages, "temperature": 0, "max_tokens": NUM_NEW, **options}
        return client.post("/v1/chat/completions", json=body)

    try:
        image = _url((tmp_path / name).read_bytes())
        expected = _stock(
            "qwen2_5_vl",
            [{"type": "image", "image": Image.open(tmp_path / name)}, words("what color")],
            [],
        )
        answer = asked(image).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert asked(image, stream=True).text.endswith("data: [DONE]\n\n")
        assert asked().status_code == 200
        with monkeypatch.context() as patch:  # no pixel of a prompt that is too long is decoded
            blind: Any = replace(images.processor.medium, decoded=None)
            patch.setattr(images.processor, "medium", blind)
            assert "longer than the 512" in asked(image, max_tokens=510).text
            patch.setattr(stepping, "max_queue", 0)
            assert asked(image).status_code == 429
        with monkeypatch.context() as patch:
            patch.setattr(server, "_settings", replace(settings, max_waiting_bytes=200))
            assert "holds 200. Try again later" in asked(image).text
        draw_image(tmp_path / "large.png", 1_001, 1_000)
        for content, match in (
            (
                [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a"}}],
                "fetches nothing",
            ),
            ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "opens no file"),
            ([{"type": "image_url", "image_url": {"url": str(tmp_path / name)}}], "opens no file"),
            ([{"type": "image", "image": str(tmp_path / name)}], "messages"),
            ([{"type": "image_url", "image_url": "a"}], "messages"),
            ([_url(_bomb())], "exceeds limit"),
            ([_url((tmp_path / "large.png").read_bytes())], "at most 1,000,000"),
            ([_url(b"no image")], "cannot be decoded"),
            ([image, image, image], "at most 2"),
            ([image, words("<|image_pad|>")], "as words"),
            ([image, words("a " * 5000)], "longer than the 512 tokens"),
        ):
            refused = asked(*content)
            assert refused.status_code == 400, content
            assert match in refused.json()["error"]["message"]
    finally:
        stepping.end()
        thread.join()
    assert stepping.failure is None


def _write_task(folder: Path) -> None:
    """Write a task of the drawn picture."""
    pictures = folder / "pictures" / "test"
    pictures.mkdir(parents=True)
    drawn = Path(_drawn(folder)).rename(pictures / "drawn.png")
    row = {"file_name": drawn.name, "question": "what color", "answer": "red"}
    (pictures / "metadata.jsonl").write_text(json.dumps(row))
    task = {
        "task": "colors", "dataset_path": "imagefolder", "test_split": "test",
        "dataset_kwargs": {"data_dir": str(pictures.parent), "cache_dir": str(folder / "cache")},
        "output_type": "generate_until", "doc_to_image": ["image"], "doc_to_target": "answer",
        "doc_to_text": "<image>{{question}}", "generation_kwargs": {"max_gen_toks": NUM_NEW},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    (folder / "colors.yaml").write_text(json.dumps(task))  # YAML has JSON's values


def test_tasks_with_images_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")  # set by the harness
    pytest.importorskip("lm_eval.evaluator")
    from megatron_lightning.inference.commands.evaluate import sharing_of
    from megatron_lightning.inference.commands.harness import HarnessModel, evaluate_tasks
    from megatron_lightning.inference.commands.load import image_prompts_of, load_engine

    folder = _folder("qwen2_5_vl")
    codec = find_codec(folder)
    engine = load_engine(folder, stops=codec.stops, decode=codec.decode)
    images = image_prompts_of(engine, folder, codec)
    model = HarnessModel(engine, codec, sharing_of(engine), images)
    assert model.MULTIMODAL
    picture = Image.open(_drawn(tmp_path))
    expected = _stock("qwen2_5_vl", [{"type": "image", "image": picture}, words("what color")], [])
    prompt = model.apply_chat_template([{"role": "user", "content": "<image>what color"}])
    asked = SimpleNamespace(args=(prompt, {"max_gen_toks": NUM_NEW}, {"visual": [picture]}))
    text = SimpleNamespace(args=("what color", {"max_gen_toks": NUM_NEW}))
    found = model.generate_until([asked, text])
    assert found[0] == expected
    _write_task(tmp_path)
    results = evaluate_tasks(
        model, ["colors"], apply_chat_template=True, include_path=str(tmp_path), log_samples=True
    )
    assert [one["resps"] for one in results["samples"]["colors"]] == [[[expected]]]
    with pytest.raises(ConfigError, match="output_type generate_until"):
        model.loglikelihood([SimpleNamespace(args=("<image>", "a", {"visual": [picture]}))])
    sound: dict[str, Any] = {"audio": [{"array": torch.zeros(8), "sampling_rate": 16_000}]}
    for score, second in ((model.generate_until, {}), (model.loglikelihood, "a")):
        with pytest.raises(ConfigError, match=r"asks about sounds \(doc_to_audio\)"):
            score([SimpleNamespace(args=("what is it", second, sound))])
    heard = make_sound_folder(tmp_path)
    sounds = find_image_prompts(heard, find_codec(heard))
    assert not HarnessModel(engine, codec, sharing_of(engine), sounds).MULTIMODAL
