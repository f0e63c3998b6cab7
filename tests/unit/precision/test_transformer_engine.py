"""The Transformer Engine backend without its library: imports that fail, recipes, modules with the
real package's names and shapes, and what layers keep."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import MoEConfig, RecomputeOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.state.recompute import apply_recompute
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.transformer_engine.backend import TransformerEngine
from megatron_lightning.precision.transformer_engine.library import Library, load
from megatron_lightning.precision.transformer_engine.recipes import check_recipe, te_recipe
from megatron_lightning.precision.transformer_engine.state import load_state, read_state
from megatron_lightning.strategies import MegatronFP8Precision
from megatron_lightning.strategies.checks.plugins import check_compiled_precision, check_recipe_of
from tests.helpers.fake_transformer_engine import installed
from tests.helpers.fake_transformer_engine_modules import Linear
from tests.helpers.te_contract import State
from tests.helpers.transformer_engine_cases import CASES, GPT, LLAMA, config, describe_cases

RECORDED = json.loads((Path(__file__).parents[2] / "oracles" / "te_modules.json").read_text())


@pytest.fixture
def fake() -> Iterator[State]:
    """The fake package, installed."""
    with installed() as state:
        yield state


@pytest.fixture
def library(fake: State) -> Library:
    """The fake package, imported."""
    return load(has_gpu=True)


def _attached(
    library: Library, recipe: FP8Recipe | None = None, model: GPTModel | None = None
) -> tuple[GPTModel, TransformerEngine]:
    model = GPTModel(config(**LLAMA)) if model is None else model
    backend = TransformerEngine(recipe or FP8Recipe(scaling="current"), library)
    backend.attach(model, ParallelContext(ParallelLayout()), caches_weights=True)
    return model, backend


def _tokens() -> Tensor:
    return torch.randint(0, 40, (2, 32), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------ imports


def _package(folder: Path, init: str, pytorch: str = "", recipe: str = "") -> None:
    for name, text in (
        ("", init),
        ("pytorch", pytorch),
        ("pytorch/tensor", ""),
        ("pytorch/tensor/utils", ""),
        ("common", ""),
        ("common/recipe", recipe),
    ):
        path = folder / "transformer_engine" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(text)


FAILURES = {
    "no extension": (
        '__version__ = "2.20.2"',
        "import transformer_engine_torch",
        "ModuleNotFoundError.*transformer_engine_torch.*pip install",
    ),
    "meta package only": (
        'raise RuntimeError("Found empty `transformer-engine` meta package installed.")',
        "",
        "RuntimeError.*meta package.*core library",
    ),
    "no libraries": (
        '__version__ = "2.20.2"',
        'raise OSError("libcudnn.so.9: cannot open shared object file")',
        "OSError.*libcudnn",
    ),
    "no file": ('raise FileNotFoundError("no shared object")', "", "FileNotFoundError"),
    "unlike parts": ('raise AssertionError("versions differ")', "", "AssertionError.*versions"),
    "old": ('__version__ = "1.13.0"', "", r"1\.13\.0 is installed.*2\.20 up to.*>=2\.20,<2\.21"),
    "new": ('__version__ = "3.0"', "", r"transformer_engine 3\.0 is installed"),
    "no version": ("", "", "unknown is installed"),
    "no names": ('__version__ = "2.20.0"', "", "2.20.0 has no Linear, LayerNormLinear"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_imports_that_fail(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init, pytorch, message = FAILURES[case]
    _package(tmp_path, init, pytorch)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            load(has_gpu=True)
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert "set backend to native" in str(caught.value)


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"transformer_engine is not installed.*pip install"):
        load(has_gpu=True)


def test_a_cpu_is_refused_before_launch() -> None:
    with pytest.raises(
        ConfigError, match=r"CUDA devices only.*Run on a GPU, or set backend to emulation"
    ):
        MegatronFP8Precision(FP8Recipe(), backend="transformer_engine")


# ------------------------------------------------------------------------------------------ recipes


def test_every_field_of_a_recipe_is_given(library: Library) -> None:
    def fields(**options: Any) -> dict[str, Any]:
        recipe = te_recipe(FP8Recipe(**options), library, reduces=True)
        own = {key: getattr(value, "name", value) for key, value in vars(recipe).items()}
        return {"": type(recipe).__name__} | own

    delayed = fields(
        scaling="delayed", format="hybrid", margin=1, amax_history_len=4,
        amax_compute_algo="most_recent",
    )  # fmt: skip
    assert delayed[""] == "DelayedScaling"
    assert delayed["fp8_format"] == "HYBRID"
    assert [delayed[name] for name in ("margin", "amax_history_len", "amax_compute_algo")] == [
        1, 4, "most_recent",
    ]  # fmt: skip
    assert delayed["reduce_amax"] is True
    for scaling, kind in (("current", "Float8CurrentScaling"), ("blockwise", "Float8BlockScaling")):
        for rounds in (True, False):
            own = fields(scaling=scaling, power_of_two_scales=rounds)
            assert own[""] == kind
            assert own["fp8_format"] == "E4M3"
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                assert own[name].power_2_scale is rounds
    assert fields(scaling="blockwise")["use_f32_scales"] is False
    assert fields(scaling="mxfp8")[""] == "MXFP8BlockScaling"
    nvfp4 = fields(scaling="nvfp4", random_hadamard_transform=False, stochastic_rounding=True)
    assert nvfp4[""] == "NVFP4BlockScaling"
    names = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    assert [nvfp4[name] for name in names] == [True, False, False]


def test_recipes_that_transformer_engine_has_not() -> None:
    with pytest.raises(ConfigError, match=r"scaling is rowwise.*current or blockwise"):
        check_recipe(FP8Recipe(scaling="rowwise"))
    with pytest.raises(ConfigError, match="scaling is rowwise"):
        check_recipe(FP8Recipe(modules={"**.linear_fc1": {"scaling": "rowwise"}}))
    with pytest.raises(ConfigError, match="delayed scales are not rounded"):
        check_recipe(FP8Recipe(scaling="delayed", power_of_two_scales=True))


def test_a_recipe_that_the_gpu_cannot_run(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_mxfp8_available(return_reason: bool) -> tuple[bool, str]:
        return False, "Device compute capability 10.x required for MXFP8 execution."

    monkeypatch.setattr(library.pytorch, "is_mxfp8_available", is_mxfp8_available)
    plugin = MegatronFP8Precision(FP8Recipe(scaling="mxfp8"), backend="transformer_engine")
    context = ParallelContext(ParallelLayout())
    with pytest.raises(ConfigError, match=r"scaling is mxfp8.*10\.x required"):
        plugin.quantize_layers(GPTModel(config(**LLAMA)), context, None)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ modules


def test_modules_are_those_of_the_real_package(library: Library) -> None:
    """Classes, names, shapes and attributes as the real package's constructors made them."""
    built = describe_cases(library)
    assert built.keys() == RECORDED.keys() == CASES.keys()
    for name, modules in RECORDED.items():
        assert built[name] == modules, name


def test_keywords_that_the_real_package_has_not_fail(fake: State) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence_dim'"):
        Linear(16, 16, sequence_dim=0)


@pytest.mark.parametrize("options", [LLAMA, GPT], ids=["llama", "gpt"])
def test_layers_compute_the_same(library: Library, options: dict[str, Any]) -> None:
    """Names, values and copies are those without engines; so are outputs and gradients, in fp32 to
    1e-5 (norms and activations are other kernels)."""
    plain = GPTModel(config(**options))
    model, backend = _attached(library, model=copy.deepcopy(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    expected = plain(_tokens(), labels=_tokens()).mean()
    with backend.step():
        actual = model(_tokens(), labels=_tokens()).mean()
    for loss in (expected, actual):
        loss.backward()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)
    duplicate = copy.deepcopy(model)
    assert all(getattr(layer, "engine", None) is None for layer in duplicate.modules())
    assert torch.equal(duplicate(_tokens()), plain(_tokens()))
    backend.detach(model)
    assert [type(layer) for layer in model.modules()] == [type(x) for x in plain.modules()]
    assert torch.equal(model(_tokens()), plain(_tokens()))


def test_rows_of_a_recipe_have_a_context_of_their_own(library: Library, fake: State) -> None:
    recipe = FP8Recipe(
        scaling="current", modules={"**.linear_proj": "bf16", "**.mlp.*": {"scaling": "mxfp8"}}
    )
    model, backend = _attached(library, recipe)
    assert [path.rpartition("0.")[2] for path in backend.engines] == [
        "self_attention.linear_qkv", "mlp",
    ]  # fmt: skip
    fake.calls.clear()
    with backend.step():
        model(_tokens())
    assert [type(given["recipe"]).__name__ for name, given in fake.calls if name == "autocast"] == [
        "Float8CurrentScaling",
        "MXFP8BlockScaling",
    ]


def test_recomputed_norms_stay_torchs(library: Library) -> None:
    """A norm whose output is dropped is a module of its own, and so are activations."""
    model = GPTModel(config(**LLAMA))
    names = ("layernorm", "activation")
    apply_recompute(
        model, RecomputeOptions(recompute_granularity="selective", recompute_modules=names)
    )
    _, backend = _attached(library, model=model)
    kinds = {path: type(engine.module).__name__ for path, engine in backend.engines.items()}
    assert set(kinds.values()) == {"Linear"}
    assert len(kinds) == 4


def test_layers_without_a_counterpart(library: Library) -> None:
    with pytest.raises(ConfigError, match=r"OutputLinear computes the loss.*remove its row"):
        _attached(library, FP8Recipe(scaling="current", modules={"output_layer": {}}))
    with pytest.raises(ConfigError, match=r"144 x 64.*multiples of 32.*'bf16'") as caught:
        narrow = GPTModel(config(**LLAMA | {"ffn_hidden_size": 72}))
        _attached(library, FP8Recipe(scaling="mxfp8"), narrow)
    assert "linear_fc1" in str(caught.value)
    moe = MoEConfig(num_experts=4, grouped_gemm=False)
    with pytest.raises(ConfigError, match=r"linear_fc1.*grouped_gemm=False.*grouped_gemm to True"):
        _attached(library, FP8Recipe(scaling="current"), GPTModel(config(**LLAMA, moe=moe)))


def test_sizes_are_refused_before_the_launch(fake: State) -> None:
    """Plain layers may become others over tensor ranks, which is not known then."""
    plugin = MegatronFP8Precision(FP8Recipe(scaling="mxfp8"), backend="transformer_engine")
    narrow, plain = GPTModel(config(**LLAMA | {"ffn_hidden_size": 72})), nn.Sequential()
    plain.append(nn.Linear(64, 40))
    for model in (narrow, plain):
        with pytest.raises(ConfigError, match=r"(144|40) x 64.*multiples of 32 on every rank"):
            check_recipe_of(plugin, model, ParallelLayout())
        check_recipe_of(plugin, model, ParallelLayout(tensor_model_parallel_size=2))


def test_linear_layers_that_are_recomputed_alone(library: Library) -> None:
    model = GPTModel(config(**LLAMA))
    apply_recompute(
        model,
        RecomputeOptions(recompute_granularity="selective", recompute_modules=("linear_proj",)),
    )
    with pytest.raises(ConfigError, match=r"linear_proj, a linear layer.*Name the module around"):
        _attached(library, model=model)


def test_compiled_blocks_are_refused(fake: State) -> None:
    plugin = MegatronFP8Precision(FP8Recipe(scaling="current"), backend="transformer_engine")
    with pytest.raises(ConfigError, match="Leave compile out, or set backend to native"):
        check_compiled_precision(plugin, "zero1")


def test_plugins_are_pickled_without_the_library(fake: State) -> None:
    """As launchers send them to the processes that they start."""
    plugin = MegatronFP8Precision(FP8Recipe(scaling="current"), backend="transformer_engine")
    assert pickle.loads(pickle.dumps(plugin)).backend == "transformer_engine"


# -------------------------------------------------------------------------------------------- state


def test_state_is_tensors_and_json(library: Library) -> None:
    """What delayed scaling has noted survives a checkpoint that loads no pickle."""
    recipe = FP8Recipe(scaling="delayed", amax_history_len=4)
    model, backend = _attached(library, recipe)
    for _ in range(2):
        with backend.step():
            model(_tokens()).sum().backward()
    state = read_state(backend.engines, library.version)
    assert json.loads(state["about"])["version"] == library.version
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = TransformerEngine(recipe, library)
    other.load_state_dict(loaded)
    other.attach(GPTModel(config(**LLAMA)), ParallelContext(ParallelLayout()), caches_weights=True)
    again = read_state(other.engines, library.version)
    histories = [name for name in state if name.endswith("amax_history_fwd")]
    assert len(histories) == 3
    assert all(state[name][1, 0] > 0 for name in histories)
    assert all(torch.equal(again[name], state[name]) for name in state if name != "about")
    with pytest.raises(CheckpointError, match=r"none of decoder.layers.0.mlp"):
        load_state({}, {"about": '{"num_gemms": {}}'}, {"decoder.layers.0.mlp": None})
