"""Cards of models: broken rules and folders fail at logits, and nothing passes unmeasured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", "5")

from benchmarks import machine
from megatron_lightning.bridge.families.llama import OURS, THEIRS, Llama
from megatron_lightning.bridge.family_rules.family import table
from megatron_lightning.bridge.family_rules.position_settings import Rope
from megatron_lightning.bridge.tensors.tensor_ops import Copied
from megatron_lightning.cards import command, items
from megatron_lightning.cards.card import Card, Item, check, problems, read_card
from megatron_lightning.cards.command import make_card
from megatron_lightning.cards.header import read_record, with_header
from megatron_lightning.cards.layouts import layout_of
from megatron_lightning.cards.subject import Subject, digest_of, reduce_model
from megatron_lightning.cards.trainings import Curve, FitError, Job
from megatron_lightning.cli import main
from megatron_lightning.errors import ConfigError, DataError
from tests.helpers.gpt_folders import make_folder

_O_PROJ = f"{OURS}.self_attention.linear_proj.*"


class TransposedRule(Llama):
    """A square matrix the other way round."""

    weights = table(
        Llama.weights, {_O_PROJ: (Copied(transposed=True), f"{THEIRS}.self_attn.o_proj.*")}
    )


class _WrongBase(Rope):
    def read(self, settings: Any) -> dict[str, Any]:
        return {**super().read(settings), "rotary_base": 12345}

    def write(self, ours: Any) -> dict[str, Any]:
        return super().write({**ours, "rotary_base": 700.0})


class WrongBaseRule(Llama):
    """Positions turn at another speed than the folder says."""

    settings = tuple(_WrongBase() if isinstance(row, Rope) else row for row in Llama.settings)


class DroppedRule(Llama):
    """No row for the norm before the feed-forward layers."""

    weights = table({
        name: row for name, row in Llama.weights.items() if "pre_mlp_layernorm" not in name
    })  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama-tied", tmp_path_factory.mktemp("folder"), head_dim=8)


def _card(folder: Path, *items: str, **options: Any) -> Card:
    options = {"layouts": ["tp2"], "command": f"megatron-lightning verify-card {folder}", **options}
    return make_card(Subject.of(str(folder), None, trusts=False), items=items, **options)


def _item(folder: Path, item: str, **options: Any) -> Item:
    [found] = _card(folder, item, **options).items
    return found


@pytest.mark.parametrize("rule", [None, TransposedRule, WrongBaseRule, DroppedRule])
def test_a_broken_rule_of_a_family_fails_at_logits(folder: Path, rule: type[Llama] | None) -> None:
    family = None if rule is None else f"{__name__}.{rule.__name__}"
    found = _item(folder, "logits", family=family)
    assert found.status == ("passed" if rule is None else "failed")
    assert found.details.get("hf", 0.0) < 1e-5  # the untouched model has no rules
    if rule is DroppedRule:
        assert "pre_mlp_layernorm" in found.why or "post_attention_layernorm" in found.why
    elif rule is not None:
        assert found.measured is not None and found.measured > 1e-2


def _broken(folder: Path, how: str, path: Path) -> Path:
    """Return a copy of a folder in one file, with one fault."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    config = json.loads((folder / "config.json").read_text())
    name = "model.layers.1.self_attn.o_proj.weight"
    if how == "transposed":
        tensors[name] = tensors[name].T.contiguous()
    elif how == "base":
        config["rope_parameters"]["rope_theta"] = 12345.0
    else:
        del tensors[name]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("how", ["transposed", "base", "dropped"])
def test_a_broken_folder_fails_beside_a_reference(folder: Path, how: str, tmp_path: Path) -> None:
    broken = _broken(folder, how, tmp_path / how)
    beside = f"{folder}@{digest_of(folder)[:8]}"
    assert _item(broken, "logits", reference=beside).status == "failed"
    # Beside transformers on the same folder both read the same fault, unless a tensor lacks.
    assert _item(broken, "logits").status == ("failed" if how == "dropped" else "passed")
    with pytest.raises(ConfigError, match=r"have the digest \w+: it is another folder"):
        _item(broken, "logits", reference=f"{broken}@{digest_of(folder)[:8]}")


def test_recorded_logits_are_a_reference(folder: Path, tmp_path: Path) -> None:
    tokens = torch.tensor([[3, 5, 7, 11]])
    model = Subject.of(str(folder), None, trusts=False).bridge().reference_model()
    with torch.no_grad():
        logits = model.eval()(tokens).logits[:, -1]
    file = tmp_path / "logits.json"
    values = {"tokens": tokens.tolist(), "logits": logits.tolist()}
    file.write_text(json.dumps(values))
    assert _item(folder, "logits", reference=str(file)).status == "passed"
    other = {**values, "logits": (logits * 1.01).tolist()}
    file.write_text(json.dumps(other))
    assert _item(folder, "logits", reference=str(file)).status == "failed"
    file.write_text(json.dumps({**other, "tolerance": 0.05, "reason": "bf16 on a GPU"}))
    found = _item(folder, "logits", reference=str(file))
    assert (found.status, found.reason) == ("passed", "bf16 on a GPU")
    for wrong in (
        {"tokens": [3, 5]},
        {**values, "tokens": tokens[0].tolist()},
        {**values, "reason": "none"},
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=r"logits\.json"):
            _item(folder, "logits", reference=str(file))


def _passed(**changes: Any) -> dict[str, Any]:
    item = {
        "id": "folder", "command": "x", "expected": "none", "measured": 0, "tolerance": 0,
        "reason": "exact", "status": "passed", "why": "", "details": {}, "seconds": 1.0,
    }  # fmt: skip
    header = {**machine.describe("x"), "model": "m", "revision": "r", "reduced": None}
    return {"header": header, "items": [item | changes]}


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"measured": None}, "passed without a measured value"),
        ({"measured": "equal"}, "passed without a measured value"),
        ({"measured": float("nan")}, "passed without a measured value"),
        ({"measured": 1}, "passed with 1, above its tolerance of 0"),
        ({"reason": ""}, "why its tolerance"),
        ({"command": ""}, "no command"),
        ({"id": "fit"}, "is none of"),
        ({"id": "speed"}, "is none of"),
        ({"id": "folder:tp2"}, "is none of"),
        ({"status": "verified"}, "has status 'verified'"),
        ({"status": "failed", "why": "x"}, "within its tolerance"),
        ({"status": "skipped", "measured": None}, "without saying why"),
        ({"status": "skipped", "why": "x"}, "was skipped and has a measured value"),
        ({"speed": 3}, "exactly the fields"),
    ],
)
def test_the_validator_refuses(changes: dict[str, Any], refusal: str) -> None:
    assert not list(problems(_passed()))
    assert any(refusal in problem for problem in problems(_passed(**changes)))


def test_the_validator_reads_headers_and_lists() -> None:
    values = _passed()
    values["items"] *= 2
    with pytest.raises(DataError, match="folder appears twice"):
        check(values, "the card")
    del values["header"]["commit"]
    values["header"]["schema"] = 2
    assert {"the header lacks commit", "the schema is 2, not 1"} <= set(problems(values))
    assert list(problems({"header": values["header"], "items": []}))
    assert list(problems({}))


class _Trainings:
    """Takes the place of trainings: the first step of a layout may differ."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.jobs: list[Job] = []

    def __call__(self, job: Job) -> Curve:
        self.jobs.append(job)
        fault = self.faults.get("alone" if job.strategy is None else "layout", 1.0)
        if isinstance(fault, Exception):
            raise fault
        begin = 0 if job.ckpt_path is None else job.steps // 2
        losses = [4.0 - step for step in range(begin, job.steps)]
        return Curve([loss * fault for loss in losses], [1.0] * len(losses))


@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        (1.0, "passed", ""),
        (1.001, "failed", "is above"),
        (float("nan"), "failed", "nan is above"),
        (ConfigError("no such layout"), "skipped", "refused: no such layout"),
        (FitError("ended with exit code 1"), "failed", "FitError: ended with exit code 1"),
    ],
)
def test_trainings_are_judged_beside_one_process(
    folder: Path, fault: Any, status: str, why: str
) -> None:
    trainings = _Trainings(layout=fault)
    card = _card(folder, "fit:tp2", "resume", "lora", run=trainings)
    assert [item.status for item in card.items] == [status] * 3
    assert all(why in item.why for item in card.items)
    if status == "passed":
        whole, half = trainings.jobs[0], trainings.jobs[2]
        assert (whole.steps, half.steps, half.save_to) == (4, 2, trainings.jobs[3].ckpt_path)
        assert whole.peft is None and trainings.jobs[-1].peft is not None


def test_a_card_is_written_read_and_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    options = ["--item", "folder", "text", "--output", str(tmp_path)]
    main(["verify-card", str(folder), *options, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert [(item["id"], item["status"]) for item in shown["items"]] == [
        ("folder", "passed"), ("text", "passed"),
    ]  # fmt: skip
    assert shown["header"]["revision"] == digest_of(folder)
    assert shown["items"][0]["command"].endswith("--layouts tp2 pp2 zero1 --item folder")
    [yaml] = tmp_path.glob("*.yaml")
    assert read_card(yaml).values() == shown
    page = yaml.with_suffix(".md")
    assert read_record(page)["header"] == shown["header"]
    main(["verify-card", str(yaml)])
    assert capsys.readouterr().out == page.read_text() + "\n"
    yaml.write_text(yaml.read_text().replace("measured: 0", "measured: null", 1))
    with pytest.raises(SystemExit, match="2"):
        main(["verify-card", str(yaml)])
    assert "folder passed without a measured value" in capsys.readouterr().err
    # A failed item ends with code 1, and is named.
    monkeypatch.setattr(items.Verification, "_folder", lambda self: 1 / 0)
    with pytest.raises(SystemExit, match="1"):
        main(["verify-card", str(folder), "--item", "folder", "--output", str(tmp_path)])
    assert "failed: folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--item", "speed"], "which is none of folder, logits, fit:tp2"),
        (["--layouts", "tp2-xp3"], "'xp3' is no part of a layout"),
        (["--reference", "nowhere"], "neither a file nor a folder"),
    ],
)
def test_wrong_options_are_refused(
    folder: Path, options: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["verify-card", str(folder), *options])
    assert refusal in capsys.readouterr().err


def test_a_folder_without_a_configuration_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="2"):
        main(["verify-card", str(tmp_path), "--item", "folder"])
    assert "has no config.json" in capsys.readouterr().err


def test_ranks_of_a_launcher_are_refused(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="starts the ranks of its layouts itself"):
        command.verify_card(str(folder))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one", 1), ("tp2", 2), ("tp2-pp2", 4), ("zero1", 2), ("fsdp-dp4", 4), ("ep2", 2),
        ("tp2-ep2-etp1", 2), ("tp2-ep2", 4), ("cp2-fsdp", 4), ("pp2-vpp2", 2), ("tp2-sp", 2),
    ],
)  # fmt: skip
def test_names_of_layouts_have_ranks(name: str, ranks: int) -> None:
    assert layout_of(name).ranks == ranks


def test_a_reduced_model_has_the_first_layers(tmp_path: Path) -> None:
    path = make_folder(
        "ministral", tmp_path, num_hidden_layers=6,
        layer_types=["full_attention", "sliding_attention"] * 3,
    )  # fmt: skip
    found, what = reduce_model(Subject.of(str(path), None, trusts=False), tmp_path / "reduced")
    config = found.bridge().config
    assert config.num_hidden_layers == len(config.layer_types) == 4 and "4 of 6 layers" in what
    assert _item(found.path, "logits").status == "passed"


def test_one_reader_reads_what_benchmarks_keep(tmp_path: Path) -> None:
    header = {**machine.describe("python -m benchmarks.x"), "load_average_at_end": [0.5]}
    page = machine.keep(tmp_path, "x_cpu", header, "# Title\n\ntext\n", {"seconds": [1.0]})
    assert read_record(page) == {"header": header, "page": "# Title\n\ntext\n"}
    assert read_record(page.with_suffix(".json")) == {"header": header, "seconds": [1.0]}
    for text, refusal in (
        ("# Title\n", "has no header"),
        (with_header("", header | {"schema": 9}), "schema 9, and this version reads schema 1"),
        (with_header("", {"schema": 1}), "lacks date, commit"),
        ("---\n{: [\n---\n", "cannot be read"),
    ):
        page.write_text(text)
        with pytest.raises(DataError, match=refusal):
            read_record(page)
