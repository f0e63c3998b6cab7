"""Conversations with images as documents and rows: ids, marks, lengths, cuts, files and entries."""

from __future__ import annotations

import base64
import importlib.util
import pickle
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from megatron_lightning.assembly.sharded_modules import find_sharded
from megatron_lightning.config import PipelineOptions
from megatron_lightning.data.images.image_files import picture, size_of
from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.images.row_entries import batch_entries, joined
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.models.plans.hf_towers import mark_towers, towers_of
from megatron_lightning.modules import (
    FinetuneDataModule,
    GPTLightningModule,
    HuggingFaceModule,
)
from megatron_lightning.modules.data_modules.data_checks import check_images
from megatron_lightning.optim import ParamGroup
from megatron_lightning.peft import LoRA
from tests.helpers.chats import write_rows
from tests.helpers.image_folders import (
    USUAL,
    draw_image,
    image_chats,
    make_image_folder,
    part,
    words,
    write_image_rows,
)
from tests.helpers.layouts import tiny_config


@cache
def _folder(family: str) -> Path:
    return make_image_folder(family, Path(mkdtemp(prefix="images-")))


def _data(
    family: str, folder: Path, rows: Sequence[Any] | None = None, **options: Any
) -> FinetuneDataModule:
    """Return data that are set up."""
    rows = image_chats(folder) if rows is None else rows
    path = write_rows(folder / "chats.jsonl", rows)
    options = {
        "sequence_length": 256, "batch_size": 2, "images": ImageOptions(),
        "cache_dir": str(folder / "cache"), **options,
    }  # fmt: skip
    data = FinetuneDataModule(path, **options)
    data.use_model(HuggingFaceModule(str(_folder(family))))
    data.prepare_data()
    data.setup("fit")
    return data


def _with_pictures(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [
        {"type": "image", "image": Image.open(folder / one["image"])} if "image" in one else one
        for one in content
    ]
    return {**message, "content": parts}


_OTHERS = ("qwen2_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "llava_next", "llava_onevision",
           "internvl", "aya_vision", "vipllava", "deepseek_vl")  # fmt: skip


@pytest.mark.parametrize(
    "family", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)]
)
def test_ids_labels_and_entries_equal_the_processors_own(family: str, tmp_path: Path) -> None:
    rows = image_chats(tmp_path)
    rows[0]["messages"].insert(0, {"role": "system", "content": "Be brief \U0001f600."})
    data = _data(family, tmp_path, rows)
    assert data.processor is not None
    theirs = data.processor._processor
    dataset, documents = data.train_dataset(), data._documents(data.paths[0])
    for number, row in enumerate(rows):
        messages = [_with_pictures(message, tmp_path) for message in row["messages"]]
        wanted = theirs.apply_chat_template(
            [messages],
            chat_template=data.tokenizer.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"return_tensors": "pt"},
        )
        ids, marks = wanted.pop("input_ids")[0], wanted.pop("assistant_masks")[0]
        assert documents[number].ids.tolist() == ids.tolist()
        assert documents[number].trained.tolist() == [bool(mark) for mark in marks]
        sample = dataset[(number,)]
        length = len(ids)
        labels = torch.where(torch.tensor(documents[number].trained), ids, -100)[1:]
        assert sample["labels"][: length - 1].tolist() == labels.tolist()
        for name, value in sample["images"].items():
            if name in wanted:  # the processor makes no entry of pixels without an image
                dims = data.processor.dims[name]
                own = value.narrow(1, 0, length) if "token" in dims.values() else value
                assert torch.equal(own, wanted[name]), name
            else:
                assert not value.any()


def _chat(*content: Any, answer: Any = "a red one") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": list(content)},
            {"role": "assistant", "content": answer},
        ]
    }


def _ids(data: FinetuneDataModule, number: int = 0) -> list[int]:
    ids: list[int] = data._documents(data.paths[0])[number].ids.tolist()
    return ids


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>"


def test_ids_and_answers_are_those_written_by_hand(tmp_path: Path) -> None:
    """Images first, between words and two in a row; a system's message, emoji, tools, turns."""
    names = [draw_image(tmp_path / f"{n}.png", 20, 36, n) for n in range(2)]
    one, two = map(part, names)
    seen = "<image>" * 16
    first = [
        {"role": "system", "content": "Be brief \U0001f600."},
        {"role": "user", "content": [one, words("what \U0001f408?")]},
        {"role": "assistant", "content": "a \u00fc \U0001f408"},
    ]
    between = [
        {"role": "user", "content": [words("look "), one, two, words(" and at "), one]},
        {"role": "assistant", "content": "red"},
    ]
    again = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    texts = (
        (
            first,
            _turn("system", "Be brief \U0001f600.")
            + _turn("user", f"{seen}what \U0001f408?")
            + _turn("assistant", "a \u00fc \U0001f408"),
            "a \u00fc \U0001f408<|im_end|>",
        ),
        (
            between,
            _turn("user", f"look {seen}{seen} and at {seen}") + _turn("assistant", "red"),
            "red<|im_end|>",
        ),
    )
    data = _data("llava", tmp_path, [{"messages": turns} for turns, _, _ in texts])
    for document, (_, text, answer) in zip(data._documents(data.paths[0]), texts, strict=True):
        assert data.tokenizer.decode(document.ids) == text
        assert data.tokenizer.decode(document.ids[document.trained]) == answer
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    template = data.tokenizer.chat_template
    data = _data(
        "llava", tmp_path, [{"messages": between + again, "tools": [tool]}], batch_size=1,
        split_turns=True,
        chat_template="{% if tools %}{{ tools[0].function.name }}\n{% endif %}" + str(template),
    )  # fmt: skip
    texts_of_turns = [data.tokenizer.decode(one.ids) for one in data._documents(data.paths[0])]
    begin = f"look\n{texts[1][1]}"
    assert texts_of_turns == [begin, begin + _turn("user", "sure?") + _turn("assistant", "yes")]


def test_one_image_is_named_in_many_ways(tmp_path: Path) -> None:
    draw_image(tmp_path / "a.png", 20, 36)
    (tmp_path / "sub").mkdir()
    draw_image(tmp_path / "sub" / "a b.png", 20, 36)
    data = (tmp_path / "a.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    text = words(" what color")
    question = {"role": "user", "content": "<image> what color"}
    answer = {"role": "assistant", "content": "a red one"}
    rows = [
        _chat(part("a.png"), text),
        _chat(part("sub/a b.png"), text),
        _chat(part(str(tmp_path / "a.png")), text),
        _chat({"type": "image_url", "image_url": {"url": url}}, text),
        _chat({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, text),
        _chat({"type": "image", "path": "a.png"}, text),
        {**_chat({"type": "image"}, text), "images": ["a.png"]},
        {"messages": [question, answer], "image": "a.png"},
        {"messages": [question, answer], "images": [{"path": "a.png"}]},
        {"instruction": "<image> what color", "output": "a red one", "image": "a.png"},
        {
            "conversations": [
                {"from": "human", "value": "<image> what color"},
                {"from": "gpt", "value": "a red one"},
            ],
            "image": "a.png",
        },
    ]
    data_module = _data("qwen2_5_vl", tmp_path, rows)
    dataset = data_module.train_dataset()
    first = dataset[(0,)]
    for number in range(len(rows)):
        assert _ids(data_module, number) == _ids(data_module), rows[number]
        assert torch.equal(
            dataset[(number,)]["images"]["pixel_values"], first["images"]["pixel_values"]
        )


def test_bytes_of_parquet_are_copied_once(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw_image(tmp_path / "a.png", 20, 36)
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    turns = [
        {"role": "user", "content": "<image> what color"},
        {"role": "assistant", "content": "a red one"},
    ]
    table = arrow.Table.from_pylist([{"messages": turns, "images": [image]}] * 3)
    parquet.write_table(table, tmp_path / "rows.parquet")
    data = FinetuneDataModule(
        str(tmp_path / "rows.parquet"), sequence_length=64, batch_size=1, images=ImageOptions(),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    data.use_model(HuggingFaceModule(str(_folder("llava"))))
    (tmp_path / "a.png").unlink()
    data.prepare_data()
    data.setup("fit")
    (copied,) = (tmp_path / "cache").rglob("image_bytes.bin")
    assert copied.read_bytes() == image["bytes"]
    assert data.train_dataset()[(2,)]["images"]["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("RGBA", "a.png"), ("L", "a.png"), ("P", "a.gif"), ("CMYK", "a.jpg"), ("I;16", "a.png")],
)
def test_any_kind_of_image_is_read_as_rgb(mode: str, name: str, tmp_path: Path) -> None:
    if mode == "I;16":
        values = np.full((20, 36), 257 * 200, np.uint16)
        Image.fromarray(values).save(tmp_path / name)
    else:
        Image.new("RGB", (36, 20), (200, 200, 200)).convert(mode).save(tmp_path / name)
    data = _data("qwen2_5_vl", tmp_path, [_chat(part(name))])
    (image,) = data._documents(data.paths[0])[0].images.images
    assert image.size == (20, 36)
    (upright,) = data._documents(data.paths[0])[0].images.decoded(picture)
    assert upright.mode == "RGB"
    assert abs(np.asarray(upright).mean() - 200) <= 4  # a palette rounds


def test_an_image_of_another_format_runs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    def ran(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ran)
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "EPS")
    with pytest.raises(DataError, match="a client: an image cannot be decoded"):
        picture("a client", file.getvalue())


@pytest.mark.parametrize("orientation", [float("inf"), (1, 1)])
def test_any_value_in_exif_is_an_error_of_the_image(orientation: object) -> None:
    exif = Image.Exif()
    exif[0x0112] = 1
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", exif=exif)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Exif, "get", lambda *_: orientation)
        with pytest.raises(DataError, match="cannot be decoded"):
            size_of("a client", file.getvalue())


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (36, 20)).save(tmp_path / "a.jpg", exif=exif)
    data = _data("qwen2_5_vl", tmp_path, [_chat(part("a.jpg"))])
    (image,) = data._documents(data.paths[0])[0].images.images
    assert image.size == (36, 20)


def _refused(match: str, folder: Path, rows: Sequence[Any], **options: Any) -> None:
    with pytest.raises((ConfigError, DataError), match=match):
        _data("llava", folder, rows, **options)


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    draw_image(tmp_path / "a.png", 20, 36)
    (tmp_path / "note.png").write_text("no image")
    (tmp_path / "rows").mkdir()
    draw_image(tmp_path / "rows" / "b.png", 20, 36)
    rows = tmp_path / "rows"
    where = r"chats.jsonl:1: message 0"
    for match, content in (
        (f"{where}.*there is no image .*rows/c.png", part("c.png")),
        (f"{where}.*note.png: an image cannot be decoded", part("note.png")),
        (f"{where}.*outside of", part("../a.png")),
        (f"{where}.*outside of", part("/etc/passwd")),
        (f"{where}.*nothing is downloaded", part("http://127.0.0.1:9/a.png")),
        (f"{where}.*of the kind file", part("file:///etc/passwd")),
        (f"{where}.*no base64", part("data:image/png;base64,%%%")),
        (f"{where}.*data:image/png", part("data:text/html;base64,AAAA")),
        (f"{where} has <image> as words", words("the tag <image> in HTML")),
        (f"{where}.*part of the type 'video'", {"type": "video", "video": "b.mp4"}),
        (f"{where} has a place for an image", {"type": "image"}),
    ):
        (rows / "note.png").write_text("no image")
        _refused(match, rows, [_chat(content, words(" what"))])
    _refused("more images than", rows, [{**_chat(words("what")), "images": ["b.png"]}])
    both = {"image": "b.png", "images": ["b.png"]}
    _refused("columns image and images", rows, [{**_chat(words("<image> what")), **both}])
    _refused("beside text that no template", rows, [{"text": "a", "image": "b.png"}])
    _refused("message 0 has an image, and only text", rows, [_chat(part("b.png"))], images=None)
    _refused(
        "does not know",
        rows,
        [_chat(part("b.png"))],
        images=ImageOptions(processor_options={"sizes": 3}),
    )


def test_processors_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    for family, match in (
        ("pixtral", "requires the Torchvision library.*--index-url"),
        ("smolvlm", "num2words"),
        ("paligemma", "PaliGemmaProcessor adds tokens of its own"),
    ):
        folder = make_image_folder(family, tmp_path)
        data = FinetuneDataModule(
            write_image_rows(tmp_path, 1), sequence_length=64, batch_size=1, images=ImageOptions()
        )
        data.use_model(HuggingFaceModule(str(folder)))
        if family == "pixtral" and importlib.util.find_spec("torchvision"):
            continue
        if family == "smolvlm" and importlib.util.find_spec("num2words"):
            continue
        with pytest.raises(ConfigError, match=match):
            _ = data.template


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    for size, match in ((20_000, "exceeds limit"), (10_000, "10000 x 10000 pixels, more than")):
        header = b"IHDR" + struct.pack(">II5B", size, size, 8, 2, 0, 0, 0)
        chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
        (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT")
        _refused(match, tmp_path, [_chat(part("bomb.png"))])


def test_rows_with_missing_images_are_dropped_and_counted(tmp_path: Path) -> None:
    draw_image(tmp_path / "a.png", 20, 36)
    rows = [_chat(part("b.png")), _chat(part("a.png"))]
    with pytest.warns(UserWarning, match="1 of 2 rows are left out, since an image is missing"):
        data = _data("llava", tmp_path, rows, images=ImageOptions(missing="drop"), batch_size=1)
    assert "rows left out for a missing image: 1" in data.describe()
    assert len(data.train_dataset()) == 1


def test_a_file_that_changes_after_the_documents_is_refused(tmp_path: Path) -> None:
    rows = [_chat(part(draw_image(tmp_path / "a.png", 20, 36)))]
    data = _data("llava", tmp_path, rows, batch_size=1)
    dataset = data.train_dataset()
    draw_image(tmp_path / "a.png", 20, 36, seed=5)
    with pytest.raises(DataError, match=r"chats.jsonl:1: message 0: .*a.png has changed"):
        dataset[(0,)]
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"chats.jsonl:1: message 0: .*a.png was there"):
        dataset[(0,)]


def test_an_image_with_lost_bytes_is_refused_by_its_row(tmp_path: Path) -> None:
    draw_image(tmp_path / "a.png", 40, 40)
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:900])
    data = _data("llava", tmp_path, [_chat(part("a.png"))], batch_size=1)
    with pytest.raises(DataError, match=r"chats.jsonl:1: message 0: .*a.png: an image cannot"):
        data.train_dataset()[(0,)]


@pytest.mark.parametrize(
    ("family", "step"),
    [
        ("qwen2_5_vl", 9),
        ("idefics3", 27),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "idefics3")),
    ],
)
def test_a_cut_never_leaves_a_part_of_an_image(family: str, step: int, tmp_path: Path) -> None:
    rows = image_chats(tmp_path, 2)
    full = _data(family, tmp_path, rows)
    longest = len(_ids(full, 1))
    for length in range(2, longest, step):
        for truncation in ("right", "left"):
            try:
                cut = _data(
                    family, tmp_path, rows, sequence_length=length, batch_size=1,
                    truncation=truncation,
                )  # fmt: skip
            except DataError as error:
                assert "no document with a trained token" in str(error)
                continue
            documents, dataset = cut._documents(cut.paths[0]), cut.train_dataset()
            for number, document in enumerate(documents):
                row = dataset[(number,)]["images"]  # the processor makes these ids
                kept = () if document.images is None else document.images.images
                sizes = [image.place[1] - image.place[0] for image in kept]
                tokens = full.processor.word_ids
                assert sum(np.isin(document.ids, tokens)) == sum(
                    np.isin(document.ids[slice(*image.place)], tokens).sum() for image in kept
                )
                assert all(size > 1 for size in sizes)
                if family == "qwen2_5_vl" and kept:
                    assert len(row["image_grid_thw"]) == len(kept)


def test_images_in_answers_are_not_trained(tmp_path: Path) -> None:
    name = draw_image(tmp_path / "a.png", 20, 36)
    row = _chat(words("draw"), answer=[words("here"), part(name), words("it is")])
    data = _data("llava", tmp_path, [row], batch_size=1)
    document = data._documents(data.paths[0])[0]
    (image,) = document.images.images
    assert not document.trained[slice(*image.place)].any()
    assert document.trained[image.place[0] - 1]
    assert document.trained[image.place[1]]


def test_split_turns_have_the_images_of_their_messages(tmp_path: Path) -> None:
    names = [draw_image(tmp_path / f"{n}.png", 16, 16 + 8 * n, n) for n in range(2)]
    messages = _chat(part(names[0]))["messages"] + _chat(part(names[1]))["messages"]
    data = _data("qwen2_5_vl", tmp_path, [{"messages": messages}], split_turns=True)
    dataset = data.train_dataset()
    assert [len(dataset[(n,)]["images"]["image_grid_thw"]) for n in range(2)] == [1, 2]


def test_a_template_of_text_alone_gets_the_placeholder(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    draw_image(tmp_path / "a.png", 20, 36)
    row = _chat(words("look "), part("a.png"))
    data = _data("llava", tmp_path, [row], chat_template=template, batch_size=1)
    assert data.tokenizer.decode(_ids(data)).startswith("user: look <image><image>")
    data.train_dataset()[(0,)]


def test_batches_and_workers(tmp_path: Path) -> None:
    data = _data("qwen2_5_vl", tmp_path, num_workers=2)
    other = _data("qwen2_5_vl", tmp_path)
    for batch, again in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        length = batch["tokens"].shape[1]
        assert len(batch["images"]) == 2
        for row, same in zip(batch["images"], again["images"], strict=True):
            assert row["mm_token_type_ids"].shape == (1, length)
            assert all(torch.equal(value, same[name]) for name, value in row.items())
        parts = data.split_batch(batch, 1)
        assert [len(one["images"]) for one in parts] == [1, 1]
        for one, row in zip(parts, batch["images"], strict=True):
            count = len(row.get("image_grid_thw", ()))
            assert len(one["images"][0].get("image_grid_thw", ())) == count
    copied = pickle.loads(pickle.dumps(data.train_dataset()))
    assert torch.equal(copied[(0,)]["tokens"], data.train_dataset()[(0,)]["tokens"])


def test_entries_are_joined_along_growing_dims_and_padded_elsewhere() -> None:
    one, two = torch.ones(1, 2, 3), torch.full((1, 1, 4), 2.0)
    rows = batch_entries([{"pixels": one}, {"pixels": two}])["pixels"]
    assert rows.tolist() == [[[1, 1, 1, 0], [1, 1, 1, 0]], [[2, 2, 2, 2], [0, 0, 0, 0]]]
    blocks = joined([torch.ones(1, 2, 1), torch.full((1, 1, 2), 3.0)], (1, 2))
    assert blocks.tolist() == [[[1, 0, 0], [1, 0, 0], [0, 3, 3]]]
    empty = joined([torch.zeros(0, 9), torch.ones(2, 3)], (0,))
    assert empty.tolist() == torch.ones(2, 3).tolist()


def test_data_show_prints_images_by_their_size(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    from io import StringIO

    from rich.console import Console

    from megatron_lightning.data.shown_samples import show_samples

    draw_image(tmp_path / "a.png", 20, 36)
    row = _chat(words("look"), part("a.png"), words(" and"))
    data = _data("qwen2_5_vl", tmp_path, [row], batch_size=1)
    output = StringIO()
    show_samples(Console(file=output, width=200), data, 1)
    assert (
        "look<|vision_start|>[image 20 \u00d7 36, 8 tokens]<|vision_end|> and" in output.getvalue()
    )


def test_models_of_text_are_refused() -> None:
    check_images(HuggingFaceModule(str(_folder("llava"))))
    with pytest.raises(ConfigError, match="GPTLightningModule trains text"):
        check_images(GPTLightningModule(tiny_config()))


@pytest.mark.parametrize(
    ("family", "tower", "projector"),
    [
        ("qwen2_5_vl", "model.visual", "**.visual.merger**"),
        ("llava", "model.vision_tower", "**.multi_modal_projector**"),
        ("gemma3", "model.vision_tower", "**.multi_modal_projector**"),
        ("idefics3", "model.vision_model", "**.connector**"),
    ],
)
def test_towers_are_found_for_adapters_and_rates(family: str, tower: str, projector: str) -> None:
    module = HuggingFaceModule(str(_folder(family)), peft=LoRA(r=2))
    module.configure_model()
    assert list(towers_of(module.model)) == [tower]
    note = module._tower_note
    assert note is not None and f" in {tower}." in note
    pattern = "**." + tower.rpartition(".")[2] + ".**"
    assert pattern in note
    without = HuggingFaceModule(str(_folder(family)), peft=LoRA(r=2, exclude_modules=[pattern]))
    without.configure_model()
    assert without._tower_note is None
    groups = [
        ParamGroup(name="projector", params=[projector], lr_mult=0.5),
        ParamGroup(name="tower", params=[pattern], lr_mult=0.1),
        ParamGroup(name="text"),
    ]
    rated = HuggingFaceModule(str(_folder(family)), learning_rate=1.0, param_groups=groups)
    rated.configure_model()
    optimizer: Any = rated.configure_optimizers()
    used = [group for group in optimizer.param_groups if group["params"]]
    rates = {group["name"]: group["lr"] for group in used}
    assert rates == pytest.approx({"projector": 0.5, "tower": 0.1, "text": 1.0})
    assert sum(len(group["params"]) for group in used) == len(list(rated.parameters()))


def test_parts_of_a_tower_are_no_units_of_fsdp(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(make_image_folder("mllama", tmp_path))
    model = AutoModelForImageTextToText.from_config(config)
    mark_towers(model)
    found = find_sharded(model, PipelineOptions())
    assert not any("vision" in unit for unit in found.units)
    assert "model.language_model" in found.units
