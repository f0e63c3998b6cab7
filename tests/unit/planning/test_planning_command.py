"""``megatron-lightning plan``: text and JSON, errors in words, and speed without torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.cli import main
from megatron_lightning.config import StrategySettings
from megatron_lightning.models import num_parameters
from megatron_lightning.recipe_reading.sections import _merged, _nested
from megatron_lightning.strategies import MegatronStrategy

ROOT = Path(__file__).parents[3]
LLAMA = ROOT / "configs" / "llama3_8b.yaml"
FOLDERS = {
    "qwen2_5_vl_7b_lora": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 128000, "sliding_window": 32768, "use_sliding_window": False,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
            "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
            "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }
}  # fmt: skip
"""Configurations of folders on the Hub that recipes name."""
KEYS = ["grid", "stages", "bytes", "flops", "bubble", "errors"]


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    main(["plan", *options, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def wrong(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """Return the errors of a wrong configuration, which all keys but one leave empty."""
    with pytest.raises(SystemExit) as exit_:
        main(["plan", f"--config={path}", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 2 and list(found) == KEYS
    assert all(found[key] is None for key in KEYS[:-1]) and found["errors"]
    errors: list[str] = found["errors"]
    return errors


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["plan", f"--config={LLAMA}", "--search", "--device=h9"], "device is 'h9'"),
        (["checkpoint", "inspect", "nowhere.ckpt"], "not found: nowhere.ckpt"),
    ],
)
def test_json_says_what_ends_a_command(
    command: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--json"])
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["errors"]
    assert error in found and found in printed.err


def changed(tmp_path: Path, **changes: Any) -> Path:
    """Write a recipe whose values at dotted paths are others."""
    recipe = yaml.safe_load(LLAMA.read_text())
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        section = recipe
        for key in sections:
            section = section[key]
        section[name] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


STRATEGY, CONFIG = "trainer__strategy__init_args__", "model__init_args__config__"


def test_a_plan_counts_codes_of_quantized_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(**recipe: Any) -> float:
        plugin = {
            "class_path": "megatron_lightning.strategies.MegatronFP8Precision",
            "init_args": {"recipe": recipe},
        }
        path = changed(tmp_path, trainer__precision=None, trainer__plugins=[plugin])
        size: float = plan(capsys, f"--config={path}")["bytes"]["fullest_rank"]["weights"]
        return size

    autocast = plan(capsys, f"--config={changed(tmp_path, trainer__precision='bf16-mixed')}")
    assert weights() == autocast["bytes"]["fullest_rank"]["weights"]
    assert 0.25 < weights(fp8_param_gather=True) / weights() < 0.6  # embeddings stay in fp32
    plugin = {"class_path": "MegatronFP8Precision", "init_args": {"recipe": {"scalin": "mxfp8"}}}
    found = wrong(changed(tmp_path, trainer__plugins=[plugin]), capsys)
    assert found == ["trainer.plugins.recipe has no option 'scalin'. Did you mean 'scaling'?"]


def test_a_plan_counts_rounded_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second copy of the blocks' weights stays during a pipeline run, in the GEMM's dtype."""

    def activations(**changes: Any) -> float:
        path = changed(tmp_path, trainer__precision="bf16-mixed", **changes)
        found = plan(capsys, f"--config={path}")
        size: float = found["bytes"]["fullest_rank"]["activations"]
        return size

    layout = STRATEGY + "{}_model_parallel_size"
    options = {layout.format(axis): 1 for axis in ("tensor", "pipeline")}
    added = activations(model__init_args__qat="nvfp4", **options) - activations(**options)
    assert added / 2 == pytest.approx(32 * (4096 * 6144 + 4096**2 + 3 * 4096 * 14336))
    options[f"{STRATEGY}data_parallel"] = "fsdp"
    assert activations(model__init_args__qat="nvfp4", **options) == activations(**options)


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, f"--config={LLAMA}")
    assert list(found) == KEYS and found["errors"] == []
    grid = found["grid"]
    assert (grid["world_size"], grid["tp"], grid["pp"], grid["dp"]) == (32, 8, 2, 2)
    assert grid["ranks_of_rank_0"] == {"tp": list(range(8)), "dp": [0, 8], "pp": [0, 16]}
    first, last = found["stages"]
    assert (first["pp_rank"], first["layers"][-1], first["other_units"]) == (1, 15, ["embedding"])
    assert (last["pp_rank"], last["layers"][0]) == (0, 16)
    ranks = found["bytes"]["pp_ranks"]
    assert [rank["in_flight"] for rank in ranks] == [1, 2]
    assert ranks[1]["weights"] == 2 * first["parameters"]
    assert ranks[1]["gradients"] == 4 * first["parameters"]
    assert ranks[1]["optimizer"] == 6 * first["parameters"]
    assert found["flops"]["step"] == 5.397062776101274e16  # of the oracle: 128 samples
    assert found["flops"]["step_and_rank"] * 32 == found["flops"]["step"]
    bubble = found["bubble"]
    assert (bubble["schedule"], bubble["num_microbatches"]) == ("1f1b", 64)
    # 1 of 65, and what the output layer adds to one of two stages.
    assert 1 / 65 < bubble["share"] < 0.08


def test_a_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", str(LLAMA), "--world-size", "64"])
    text = capsys.readouterr().out
    for part in (
        "64 ranks: tp 8 x cp 1 x dp 4 x pp 2, sequence parallel on",
        "tp  group of rank 0: 0, 1, 2, 3, 4, 5, 6, 7",
        "16-31, final_layernorm, output_layer",
        "GiB a rank  weights  gradients  optimizer  activations  total",
        "FLOPs a step of 256 samples",
        "schedule 1f1b (each of the 2 pipeline ranks holds one model chunk), 64 micro-batches",
    ):
        assert part in text
    whole = "--trainer.strategy.pipeline_model_parallel_size=1"
    main(["plan", "--config", str(LLAMA), "--world-size", "64", whole])
    text = capsys.readouterr().out
    assert "\nno pipeline, " in text and "bubble" not in text


@pytest.mark.spread(7)
@pytest.mark.parametrize(
    "path",
    [
        # Its modules are looked at one by one, as bert's are.
        pytest.param(path, id=path.stem)
        for path in sorted((ROOT / "configs").glob("*.yaml"))
    ],
)
def test_every_recipe_is_planned(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--config={path}"]
    if path.stem in FOLDERS:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(FOLDERS[path.stem]))
        options.append(f"--model.path={tmp_path}")
    assert plan(capsys, *options)["errors"] == []


def test_a_recipe_with_images_has_the_published_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    name = "qwen2_5_vl_7b_lora"
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS[name]))
    recipe = f"--config={ROOT / 'configs' / name}.yaml"
    found = plan(capsys, recipe, f"--model.path={tmp_path}", "--device=h100")
    assert found["stages"][0]["parameters"] == 8_292_166_656
    assert found["device"]["fits"]


def test_16384_ranks_take_less_than_2_s_and_no_torch() -> None:
    program = (
        "import sys; from megatron_lightning.cli import main; main(); "
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    options = ["plan", f"--config={LLAMA}", "--world-size=16384", "--json"]
    times = []
    for _ in range(3):  # other processes may take the cores for a while
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", program, *options],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        times.append(time.perf_counter() - start)
    assert json.loads(result.stdout)["grid"]["world_size"] == 16384
    assert min(times) < 2.0


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({f"{STRATEGY}tensor_model_parallel_size": 7}, ["32 ranks cannot be divided"]),
        ({f"{STRATEGY}tensor_parallel_size": 8, "data__init_args__batch_size": 0},
         ["no option 'tensor_parallel_size'. Did you mean", "data.batch_size is 0"]),
        ({f"{CONFIG}hidden_sise": 64}, ["no option 'hidden_sise'. Did you mean 'hidden_size'?"]),
        ({"model__init_args__config": {"num_layers": 2}}, ["lacks hidden_size, num_attention"]),
        ({f"{CONFIG}num_layers": "two"}, ["num_layers is 'two'; it must be a positive integer"]),
        ({f"{CONFIG}moe": {"num_experts": 8, "router_topk": 9}}, ["router_topk=9 is above"]),
        ({f"{STRATEGY}pipeline_schedule": "zbw"}, ["'zbw', which names no schedule"]),
        ({f"{STRATEGY}virtual_pipeline_model_parallel_size": 32}, ["are fewer than the 64"]),
        ({f"{STRATEGY}data_parallel": "zero3"}, ["data_parallel is 'zero3', which is unknown"]),
        ({f"{STRATEGY}recompute": {"recompute_granularity": "full"}}, ["which layers?"]),
        ({"data__init_args__sequence_length": 8190}, ["8190 tokens cannot be split equally"]),
        ({f"{CONFIG}attention_backend": "flash", "trainer__precision": "32-true"},
         ["attention_backend=flash takes bf16 and fp16 only on GPUs"]),
        ({"trainer__devices": "auto"}, ["Set --world-size"]),
        ({"trainer__precision": "transformer-engine"}, ["whose memory is not known"]),
        ({"trainer__strategy": "ddp"}, ["trainer.strategy is 'ddp', and a plan describes"]),
        ({"model__class_path": "my.Model"}, ["model.class_path is 'my.Model'"]),
        ({"trainer__num_nodes": 0}, ["the number of ranks is 0; it must be a positive integer"]),
        ({"trainer__strategy": 5}, ["trainer.strategy is 5, which holds no options"]),
        ({"trainer": [1], "data": "x"}, ["trainer is [1], which holds no options"]),
        ({f"{STRATEGY}recompute": "full"}, ["strategy.recompute is 'full', which is no group"]),
        ({f"{STRATEGY}pipeline_options": 5}, ["strategy.pipeline_options is 5, which holds no"]),
        ({f"{STRATEGY}compile": "model"}, ["compile is 'model', which is unknown"]),
        ({f"{STRATEGY}fused_loss": "maybe", f"{CONFIG}moe": {"num_experts": 8, "topk": 2},
          f"{STRATEGY}guards": "of"},
         ["trainer.strategy.fused_loss is 'maybe', which is no bool.",
          "mode of guards is 'of', which is unknown. Set it to one of refuse, warn, ignore",
          "model.config.moe has no option 'topk'"]),
        ({f"{STRATEGY}compile": "block", f"{STRATEGY}compile_options": {"mod": 1}},
         ["no option 'mod'. Did you mean 'mode'?"]),
        ({"model__init_args__config": 5}, ["model.config is 5, which holds no options"]),
    ],
)  # fmt: skip
def test_errors_are_listed_in_words(
    changes: dict[str, Any],
    messages: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = wrong(changed(tmp_path, **changes), capsys)
    for message in messages:
        assert any(message in error for error in errors), errors


def test_a_recipe_without_a_strategy_has_that_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = {"trainer__devices": 2, "trainer__num_nodes": 1}
    path = changed(tmp_path, trainer__strategy=None, **own)
    assert plan(capsys, f"--config={path}")["grid"]["dp"] == 2
    assert (
        "describes MegatronStrategy"
        in wrong(changed(tmp_path, trainer__strategy="auto"), capsys)[0]
    )


def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be read" in wrong(tmp_path / "missing.yaml", capsys)[0]
    path = tmp_path / "list.yaml"
    path.write_text("- 1")
    assert "holds no sections" in wrong(path, capsys)[0]
    with pytest.raises(SystemExit):
        main(["plan", f"--config={path}"])
    assert capsys.readouterr().out.startswith("error: --config ")


@pytest.mark.parametrize(
    ("guards", "message"),
    [
        ("warn", ""),
        ({"mode": "ignore"}, ""),
        ({"mod": "warn"}, "strategy.guards has no option 'mod'"),
    ],
)
def test_a_group_may_be_a_word(
    guards: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path, **{f"{STRATEGY}guards": guards})
    if message:
        assert message in wrong(path, capsys)[0]
    else:
        assert plan(capsys, f"--config={path}")["errors"] == []


def test_numbers_with_exponents_and_short_strategies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LLAMA.read_text().replace("rotary_base: 500000.0", "rotary_base: 5e5")
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert plan(capsys, f"--config={path}")["errors"] == []
    short = changed(tmp_path, trainer__strategy="megatron")
    assert plan(capsys, f"--config={short}")["grid"]["dp"] == 32


def test_settings_are_the_parameters_of_the_strategy() -> None:
    hints = get_type_hints(MegatronStrategy.__init__)
    parameters = {
        name: (hints[name], one.default)
        for name, one in inspect.signature(MegatronStrategy).parameters.items()
    }
    kinds = get_type_hints(StrategySettings)
    settings = {one.name: (kinds[one.name], one.default) for one in fields(StrategySettings)}
    # The type of a plan needs torch.
    assert settings["sharding_plan"] == (object, parameters["sharding_plan"][1])
    settings["sharding_plan"] = parameters["sharding_plan"]
    assert list(parameters.items()) == list(settings.items())


def test_options_and_files_are_merged_as_for_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "more.yaml"
    path.write_text("trainer:\n  strategy: {init_args: {tensor_model_parallel_size: 4}}\n")
    name = "--trainer.strategy.pipeline_model_parallel_size"
    files = [f"--config={LLAMA}", "--config", str(path)]
    found = plan(capsys, *files, f"{name}=4", "--trainer.devices", "8", "--trainer.num_nodes=2")
    grid = found["grid"]
    assert (grid["tp"], grid["pp"], grid["dp"], grid["world_size"]) == (4, 4, 1, 16)
    errors = wrong(path, capsys, "--data.batch_size=1e2", "--model.config.moe.num_experts=0")
    assert "data.batch_size is 100.0; it must be a positive integer." in errors
    assert "moe.num_experts is 0; it must be a positive integer." in errors


def test_merged_sections() -> None:
    files = _merged({"a": {"class_path": "A", "init_args": {"x": 1}}}, {"a": {"y": 2}})
    assert files == {"a": {"class_path": "A", "init_args": {"x": 1, "y": 2}}}
    assert _merged(files, {"a": "A"}) == files
    assert _merged(files, {"a": {"class_path": "B"}}) == {"a": {"class_path": "B"}}
    assert _merged(files, {"a": None}) == {"a": None}
    assert _nested("a.b=[1, 2]") == {"a": {"b": [1, 2]}} and _nested("a=: [") == {"a": ": ["}
    assert _nested("a=2026-01-01") == {"a": "2026-01-01"}  # text, as for fit
    # Arguments of a class that an option names, and of the last object of a list.
    named = _merged({"a": "A"}, {"a": {"x": 1}})
    assert named == {"a": {"class_path": "A", "init_args": {"x": 1}}}
    appended = _merged({"a": ["A"]}, {"a+": "B"})
    assert appended == {"a": ["A", "B"]} and _merged({}, {"a+": "A"}) == {"a": ["A"]}
    last = {"class_path": "B", "init_args": {"x": 1}}
    assert _merged(appended, {"a": {"x": 1}}) == {"a": ["A", last]}


@pytest.mark.parametrize("option", ["--trainer.plugins", "--trainer.plugins+"])
def test_a_plan_reads_plugins_from_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    def activations(precision: str, *options: str) -> int:
        found = plan(capsys, f"--config={LLAMA}", f"--trainer.precision={precision}", *options)
        size: int = found["bytes"]["fullest_rank"]["activations"]
        return size

    plugin = f"{option}=megatron_lightning.strategies.MegatronFP8Precision"
    blocks = activations("null", plugin, "--trainer.plugins.recipe.scaling=mxfp8")
    # Scales of 32 values instead of tensors, and weights have two sets of codes.
    assert activations("null", plugin) < blocks != activations("null")


def test_a_plan_reads_the_sizes_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.helpers.gpt_folders import make_folder

    folder = str(make_folder("llama", tmp_path))
    sizes = AutoBridge.from_hf_pretrained(folder).to_config()
    modules = "megatron_lightning.modules."
    models: list[dict[str, Any]] = [
        {"class_path": f"{modules}GPTLightningModule", "init_args": {"init_from_hf": folder}},
        {"class_path": f"{modules}HuggingFaceModule", "init_args": {"path": folder}},
    ]
    layout = {
        "trainer__num_nodes": 1, "trainer__devices": 2, "data__init_args__sequence_length": 8,
        f"{STRATEGY}tensor_model_parallel_size": 1, f"{STRATEGY}pipeline_model_parallel_size": 2,
    }  # fmt: skip
    for model in models:
        found = plan(capsys, f"--config={changed(tmp_path, model=model, **layout)}")
        assert sum(stage["parameters"] for stage in found["stages"]) == num_parameters(sizes)
    missing = {"class_path": f"{modules}HuggingFaceModule", "init_args": {"path": "not/there"}}
    assert "not/there" in wrong(changed(tmp_path, model=missing, **layout), capsys)[0]
    other = {"class_path": "mine.Module"}
    assert "cannot be imported" in wrong(changed(tmp_path, model=other, **layout), capsys)[0]
