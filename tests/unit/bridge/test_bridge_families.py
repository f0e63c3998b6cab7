"""Families of ``GPTModel``: configurations and weights of folders, both ways, proven by logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.families import FAMILIES, family_like, family_of
from megatron_lightning.bridge.family_rules.family import (
    _WITHOUT_EFFECT,
    Family,
    missing_fields,
    to_config,
    to_theirs,
)
from megatron_lightning.bridge.family_rules.settings import (
    TRAINING,
    Settings,
    build_config,
    differing,
    flat,
)
from megatron_lightning.bridge.tensors.inverse import assembled
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models import GPTModel

pytest.importorskip("transformers")
import transformers

from tests.helpers.gpt_folders import (
    FOLDERS,
    LENGTH,
    make_folder,
    make_model,
    make_predicting_folder,
    tokens,
)
from tests.helpers.layouts import tiny_config
from tests.helpers.versions import since


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    parent = tmp_path_factory.mktemp("folders")
    yield {name: make_folder(name, parent) for name in FOLDERS}
    shutil.rmtree(parent)


def _logits(path: Path) -> Tensor:
    logits: Tensor = AutoBridge.from_hf_pretrained(path).to_model("gpt").eval()(tokens(2, LENGTH))
    return logits


def _assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Compare fp32 values; sums in another order, relative to the largest one."""
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.spread(20)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=since("transformers", "5.23", "its Mamba-2 on CPUs was mended"))
        if name == "mamba2"
        else name
        for name in FOLDERS
    ],
)
def test_logits_and_gradients_are_those_of_transformers(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    theirs, inputs = make_model(name), tokens(2, LENGTH + 1)
    hidden, labels = inputs[:, :-1], inputs[:, 1:]
    ours = AutoBridge.from_hf_pretrained(folders[name]).to_model("gpt").eval()
    expected = theirs(hidden).logits
    assert expected.std() > 1
    _assert_close(ours(hidden), expected)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours(hidden, labels=labels).mean().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")  # by the rules, in our layout
    gradients = AutoBridge.from_hf_pretrained(tmp_path / "gradients").to_model("gpt")
    for key, parameter in ours.named_parameters():
        gradient = gradients.get_parameter(key)
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 2e-5, f"{key}: relative error {error}"  # fp32, sums in another order


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_field_that_a_row_says_decides_the_logits(
    folders: dict[str, Path], name: str
) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders[name])
    folder, expected = bridge.gpt_folder(), _logits(folders[name])
    settings = Settings(bridge.config.to_dict())
    said = {key: v for row in bridge.family.settings for key, v in row.read(settings).items()}
    assert build_config(said) == bridge.to_config()
    unused = {"max_sequence_length", "rope_scaling.short_factor"}  # of shorter rows
    if "attention" not in bridge.to_config().layer_kinds and bridge.to_config().hybrid:
        unused |= {"num_attention_heads", "position_embedding_type"}
    for field in said.keys() - TRAINING - unused:
        try:
            config = build_config(said | {field: _other(field, said)})
            tensors = folder.tensors(config)
        except (ConfigError, CheckpointError):
            continue
        model = GPTModel(config).eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if key in tensors:
                    tensor.copy_(tensors[key].read())
        difference = (model(tokens(2, LENGTH)) - expected).abs().max()
        assert difference > 1e-4 * expected.abs().max(), f"{field} has no effect"


def _other(field: str, said: dict[str, Any]) -> Any:
    """Return another value of a field."""
    value = said[field]
    if isinstance(value, bool):
        return not value
    words = {
        "activation": {
            "swiglu": "geglu", "gelu_tanh": "gelu", "geglu_tanh": "geglu", "quick_geglu": "swiglu",
            "squared_relu": "gelu",
        },
        "softmax_type": {"learnable": "vanilla"},
        "normalization": {"RMSNorm": "LayerNorm", "LayerNorm": "RMSNorm"},
        "position_embedding_type": {"learned_absolute": "rope", "none": "rope"},
        "norm_placement": {"post": "sandwich", "sandwich": "pre", "parallel": "pre"},
        "moe.router_score_function": {"sigmoid": "sqrtsoftplus"},
        "rope_scaling.rope_type": {
            "llama3": "yarn", "yarn": "llama3", "linear": "llama3",
            "longrope": "yarn",
        },
    }  # fmt: skip
    if field in words:
        return words[field][value]
    if field == "layer_pattern":
        return value + "M"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.5
    if field == "moe.layer_freq":
        return (1 - value[0], *value[1:])
    if field == "window_attn_skip_freq":
        return value[::-1]
    if isinstance(value, tuple):
        return (value[0] + 1, *value[1:])
    assert value is None
    others = {
        "window_size": (3, 0), "mla.q_lora_rank": 9, "mtp_num_layers": 1, "num_query_groups": 2,
        "moe.router_topk_scaling_factor": 1.5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
    }  # fmt: skip
    return others[field]


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_no_key_of_a_folder_is_overlooked(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """A key with another value makes another configuration, or is refused by name."""
    bridge = AutoBridge.from_hf_pretrained(folders[name])
    config, theirs = bridge.to_config(), bridge.config.to_dict()
    base = transformers.PretrainedConfig().to_dict()
    for key, value in theirs.items():
        other = _changed(key, value)
        if key in _WITHOUT_EFFECT | set(base) or other is None:
            continue
        path = _copy(folders, name, tmp_path, **{key: other})
        try:
            changed = AutoBridge.from_hf_pretrained(path)
            is_overlooked = changed.to_config() == config
        except Exception:  # refused, by us or by the class of transformers
            continue
        finally:
            shutil.rmtree(path)
        if is_overlooked:  # so does transformers, such as a switch of a window that is not set
            model, inputs = type(make_model(name))(changed.config).eval(), tokens(2, LENGTH)
            model.load_state_dict(make_model(name).state_dict())
            with suppress(ValueError, RuntimeError):  # refused in the forward
                assert torch.equal(model(inputs).logits, make_model(name)(inputs).logits), key


def _changed(key: str, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2
    if isinstance(value, dict):
        return value | {"rope_theta": 77.0}
    if key == "layer_types":
        return ["sliding_attention", *["full_attention"] * (len(value) - 1)]
    return {"hidden_act": "gelu", "sliding_window": 3}.get(key)


def _fills(model: torch.nn.Module) -> dict[str, Any]:
    def fill_of(tensor: Tensor) -> Any:
        return lambda box, out: out.copy_(tensor[box.slices])

    return {key: fill_of(tensor) for key, tensor in model.state_dict().items()}


@pytest.mark.spread(13)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_way_back_gives_the_folder(folders: dict[str, Path], name: str) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders[name])
    gpt, model = bridge.gpt_folder(), bridge.to_model("gpt")
    pieces = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    made = assembled(gpt.folder, pieces, _fills(model))
    for key, tensor in gpt.folder.tensors.items():
        assert torch.equal(made[key].read(), tensor.read()), key
    assert family_like(gpt.config) in FAMILIES.values()
    assert bridge.family.__name__ == FOLDERS[name][0]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_configuration_comes_back(folders: dict[str, Path], name: str) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders[name])
    config, family = bridge.to_config(), bridge.family
    written = to_theirs(family, config)
    assert not differing(flat(to_config(family, written, "")), flat(config))
    assert missing_fields(family, config) == []
    # Several ways to say the same; and None for one group.
    said_otherwise = {"max_window_layers", "head_dim", "decoder_sparse_step", "mlp_only_layers"}
    base, found = set(transformers.PretrainedConfig().to_dict()), written.to_dict()
    for key, value in bridge.config.to_dict().items():
        if key in found and key not in _WITHOUT_EFFECT | base | said_otherwise:
            is_same = found[key] == value or (value, found[key]) == (None, 1)
            assert is_same or found[key] == pytest.approx(value), key


@pytest.mark.parametrize(
    ("name", "keys", "p"),
    [
        ("seed-oss", {"residual_dropout": 0.3}, 0.0),
        ("phi3", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, 0.0),
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, 0.2),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.2}, 0.2),
        ("starcoder2", {"residual_dropout": 0.3, "embedding_dropout": 0.2}, 0.2),
    ],
)
def test_dropout_acts_where_transformers_drops(
    name: str, keys: dict[str, float], p: float, tmp_path: Path
) -> None:
    """Both draw equal masks from torch's generator, in the same order, for a single row."""
    theirs, inputs = make_model(name, **keys).train(), tokens(1, LENGTH)
    bridge = AutoBridge.from_hf_pretrained(make_folder(name, tmp_path, **keys))
    config, ours = bridge.to_config(), bridge.to_model("gpt").train()
    assert (config.embedding_dropout_p, ours.embedding.dropout.p) == (p, p)
    torch.manual_seed(3)
    expected = theirs(inputs).logits
    torch.manual_seed(3)
    _assert_close(ours(inputs), expected)
    assert (theirs.eval()(inputs).logits - expected).abs().max() > 0.1  # something was dropped
    written = to_theirs(bridge.family, config).to_dict()
    without_effect = {"embd_pdrop"} if name == "phi3" else set()
    for key in keys.keys() - without_effect:
        assert written[key] == keys[key], key


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_layers_of_multi_token_prediction_are_those_behind_the_last(
    name: str, tmp_path: Path
) -> None:
    """DeepSeek's paper by the parts of a model of ``transformers`` with one layer more."""
    path = make_predicting_folder(tmp_path, name)
    gpt = AutoBridge.from_hf_pretrained(path).gpt_folder()
    assert gpt.config.mtp_num_layers == 1
    ours: Any = AutoBridge.from_hf_pretrained(path).to_model("gpt")
    theirs = make_model(name, num_hidden_layers=3)
    tensors = load_file(path / "model.safetensors")
    inputs, states = tokens(2, LENGTH), list[Tensor]()
    ours.mtp.layers["0"].register_forward_hook(lambda _, __, out: states.append(out))
    ours.train()(inputs)
    positions = torch.arange(LENGTH)[None]
    rotary = theirs.model.rotary_emb(torch.zeros(1), positions)
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    hidden = theirs.model.embed_tokens(inputs)
    arguments = {"position_embeddings": rotary, "attention_mask": mask}
    for layer in theirs.model.layers[:2]:
        hidden = layer(hidden, **arguments)

    def norm(name: str, x: Tensor) -> Tensor:
        weight = tensors[f"model.layers.2.{name}.weight"]
        return F.rms_norm(x, (32,), weight, theirs.config.rms_norm_eps)

    ahead = theirs.model.embed_tokens(inputs.roll(-1, 1))
    joined = torch.cat([norm("enorm", ahead), norm("hnorm", theirs.model.norm(hidden))], -1)
    joined = F.linear(joined, tensors["model.layers.2.eh_proj.weight"])
    expected = norm("shared_head.norm", theirs.model.layers[2](joined, **arguments))
    # The last position has no token ahead.
    _assert_close(states[0].transpose(0, 1)[:, :-1], expected[:, :-1])
    pieces = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    made = assembled(gpt.folder, pieces, _fills(ours))
    assert made.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(made[key].read(), tensor), key
    without = replace(gpt.config, mtp_num_layers=None)  # heads are carried
    pieces = gpt.pieces(without, gpt.tensors(gpt.check(without)))
    assert tensors.keys() - pieces.keys() == {key for key in tensors if ".layers.2." in key}


@pytest.mark.parametrize(
    ("name", "settings"), [("qwen3-next", {}), ("nemotron-3", {"num_nextn_predict_layers": 1})]
)
def test_layers_that_transformers_does_not_read_are_carried(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Folders of Qwen3-Next and Nemotron 3 have layers of multi-token prediction."""
    path = make_folder(name, tmp_path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    head = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.mlp.gate.weight": torch.ones(4, 32)}
    _rewritten(path, dict(head))
    bridge = AutoBridge.from_hf_pretrained(path)
    gpt, model = bridge.gpt_folder(), bridge.to_model("gpt")
    pieces = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    made = assembled(gpt.folder, pieces, _fills(model))
    for key, tensor in gpt.folder.tensors.items():
        assert torch.equal(made[key].read(), tensor.read()), key
    assert head.keys() <= made.keys()


# ---------------------------------------------------------------------------------------- refusals


def _copy(folders: dict[str, Path], name: str, parent: Path, **settings: Any) -> Path:
    shutil.copytree(folders[name], parent / name)
    file = parent / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return parent / name


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"attention_bias": True}, "sets attention_bias=True.*no field for.*untouched"),
        ("llama", {"hidden_act": "gelu"}, "sets hidden_act='gelu'"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            "rope_parameters.rope_type='dynamic'",
        ),
        (
            "qwen2-window", {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types=",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq'"),
        ("llama", {"architectures": ["OPTForCausalLM"]}, "architectures.*OPTFor.*has rules"),
        # A parallel block, and norms without a bias.
        ("llama", {"architectures": ["GPTNeoXForCausalLM"]}, "architectures.*GPTNeoX.*has rules"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias=False"),
        ("qwen3-next", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3-next", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ],
)  # fmt: skip
def test_what_the_model_lacks_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    path = _copy(folders, name, tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        AutoBridge.from_hf_pretrained(path).to_config()


def _rewritten(path: Path, changes: dict[str, Tensor | None]) -> Path:
    """Write the tensors of a folder into one file, some of them changed or left out."""
    tensors: dict[str, Tensor] = {}
    for file in path.glob("model*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    found = {k: v for k, v in (tensors | changes).items() if v is not None}
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_tensors_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    layer = "model.layers.1"
    for changes, message in (
        ({f"{layer}.mlp.up_proj.weight": None}, r"1 tensors are missing \(.*1.mlp.up_proj"),
        ({f"{layer}.mlp.up_proj.weight": torch.ones(3, 32)}, r"have other shapes \(.*up_proj"),
        ({f"{layer}.mlp.gate_proj.weight": torch.tensor(1.0)}, r"have other shapes \(.*gate_proj"),
        ({"model.norm.weight": torch.ones(3)}, r"have other shapes \(model.norm.weight\)"),
        ({"extra": torch.ones(3)}, r"1 tensors are unexpected \(extra\)"),
    ):
        path = _rewritten(_copy(folders, "llama", tmp_path), changes)
        with pytest.raises(CheckpointError, match=message):
            AutoBridge.from_hf_pretrained(path).to_model("gpt")
        shutil.rmtree(path)


def test_a_tied_folder_may_repeat_its_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    path = _copy(folders, "qwen2", tmp_path)
    words = make_model("qwen2").get_input_embeddings().weight.detach()
    _rewritten(path, {"lm_head.weight": words.clone()})
    assert torch.equal(_logits(path), _logits(folders["qwen2"]))
    gpt = AutoBridge.from_hf_pretrained(path).gpt_folder()
    pieces = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    assert pieces["lm_head.weight"] == pieces["model.embed_tokens.weight"]
    with torch.device("meta"):  # as before processes start
        assert AutoBridge.from_hf_pretrained(path).to_model("gpt").output_layer.weight.is_meta
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": words * 2}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model"):
        AutoBridge.from_hf_pretrained(path).to_model("gpt")


def test_gpt2_as_the_hub_has_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """Names without prefix, and masks that the class ignores."""
    path = _copy(folders, "gpt2", tmp_path)
    tensors: dict[str, Tensor] = {}
    for file in path.glob("model*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(short | masks, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(_logits(path), _logits(folders["gpt2"]))
    gpt = AutoBridge.from_hf_pretrained(path).gpt_folder()
    pieces = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    made = assembled(
        gpt.folder, pieces, _fills(AutoBridge.from_hf_pretrained(path).to_model("gpt"))
    )
    for key, value in (short | masks).items():
        assert torch.equal(made[key].read(), value), key
    with torch.device("meta"):  # as before processes start
        AutoBridge.from_hf_pretrained(path).to_model("gpt")


def test_a_configuration_of_the_user_describes_the_folder(folders: dict[str, Path]) -> None:
    bridge = AutoBridge.from_hf_pretrained(folders["llama"])
    config = bridge.to_config()
    other = replace(config, hidden_dropout=0.1, max_sequence_length=8, init_seed=3)
    assert bridge.to_model("gpt", config=other).config == other
    with pytest.raises(ConfigError, match=r"config describes another.*layernorm_epsilon=1e-05 \("):
        bridge.to_model("gpt", config=replace(config, layernorm_epsilon=1e-5))
    with pytest.raises(ConfigError, match="untouched model has the folder"):
        bridge.to_model(config=config)
    with pytest.raises(ConfigError, match=r"to_model\('bert'"):
        bridge.to_model("bert")  # type: ignore[arg-type]
    assert bridge.to_model("gpt", dtype=torch.bfloat16).output_layer.weight.dtype == torch.bfloat16


class Mine(Family):
    """A stranger's rules: Llama's."""

    architecture = "LlamaForCausalLM"
    settings = FAMILIES["llama"].settings
    weights = FAMILIES["llama"].weights


def test_a_family_is_named_by_its_class_path(folders: dict[str, Path]) -> None:
    name = f"{__name__}.Mine"
    assert family_of(name) is Mine
    bridge = AutoBridge.from_hf_pretrained(folders["llama"], family=name)
    assert bridge.family is Mine
    assert torch.equal(bridge.to_model("gpt").eval()(tokens(2, LENGTH)), _logits(folders["llama"]))
    for wrong in ("nobody", "nobody.Mine", f"{__name__}.folders"):
        with pytest.raises(
            ConfigError, match=f"family is '{wrong}', which is neither one of llama"
        ):
            family_of(wrong)


def test_a_model_without_family_is_refused_naming_its_fields() -> None:
    config = tiny_config(vocab_size=67, activation="gelu")
    with pytest.raises(ConfigError, match="The nearest one, llama, lacks activation"):
        family_like(config)
