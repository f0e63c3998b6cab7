"""Plans of ``transformers`` models: what they are translated to, and what is refused before any
process starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", "5")

import transformers

from megatron_lightning.assembly.plans import find_plans, resolve_plans
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.attention.transformers_attention import put_core
from megatron_lightning.layers.shared_rows.full_arguments import FullArguments, Origins
from megatron_lightning.layers.shared_rows.mixers import SharingRanks
from megatron_lightning.layers.styles import (
    ColumnParallel,
    GatherSequence,
    HeadParallel,
    KeyOrValue,
    ParallelInput,
    RowParallel,
    SequenceParallel,
    SequenceRegion,
    ShardSequence,
    Split,
    TensorParallelExperts,
    VocabParallel,
)
from megatron_lightning.layers.styles.shared_rows import FoundMixers
from megatron_lightning.models import llama_hf_plan
from megatron_lightning.models.plans import hf_sequence
from megatron_lightning.models.plans.foreign_code import foreign_code
from megatron_lightning.models.plans.hf_context import check_call, finds_mixers, with_context
from megatron_lightning.models.plans.hf_documents import (
    check_parts_documents,
    code_of_folder,
    separating_positions,
)
from megatron_lightning.models.plans.hf_plans import transformers_plan
from megatron_lightning.parallel import ParallelLayout, ShardingPlan
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models, image_models
from tests.helpers.trainers import trainer
from tests.helpers.versions import since


def _llama(**options: Any) -> Any:
    return hf_models._decoder("Llama", **options)


def _layout(**options: Any) -> ParallelLayout:
    return ParallelLayout(tensor_model_parallel_size=2, **options)


@since("transformers", "5.23", "its plans name the embedding since then")
def test_a_plan_has_one_row_for_all_layers() -> None:
    rows = transformers_plan(_llama(), 2).modules
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    assert rows == {
        "lm_head": VocabParallel(gather_output=True, shard_sequence=False),
        "model": SequenceRegion(),
        "model.embed_tokens": VocabParallel(shard_sequence=False),
        "model.layers.0": ShardSequence(),
        attention: ParallelInput(),
        f"{attention}.q_proj": ColumnParallel(num_heads=4, copy_input=False),
        f"{attention}.k_proj": ColumnParallel(num_heads=2, copy_input=False),
        f"{attention}.v_proj": ColumnParallel(num_heads=2, copy_input=False),
        f"{attention}.o_proj": RowParallel(),
        mlp: ParallelInput(),
        f"{mlp}.gate_proj": ColumnParallel(copy_input=False),
        f"{mlp}.up_proj": ColumnParallel(copy_input=False),
        f"{mlp}.down_proj": RowParallel(),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.norm": GatherSequence(),
    }


def _with_hook() -> Any:
    model = _llama()
    model.model.layers[1].self_attn.q_proj.register_forward_hook(print)
    return model


class _Changed(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A user's subclass, whose forward may do anything."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (hf_models.MODELS["mixtral"], "MixtralForCausalLM is not of a family whose blocks"),
        (lambda: _Changed(_llama().config), "_Changed is not of a family whose blocks"),
        (hf_models.MODELS["gpt2"], "the table of GPT2Model shards features only"),
        (hf_models.MODELS["bloom"], "every layer gathers its output"),
        (lambda: hf_models._decoder("Phi3", resid_pdrop=0.1), "drops activations (p=0.1)"),
        (_with_hook, "model.layers.1.self_attn.q_proj has a hook"),
    ],
    ids=["experts", "subclass", "table", "gathered", "dropout", "hook"],
)
def test_a_model_that_keeps_full_sequences_says_why(make: Any, why: str) -> None:
    plan = transformers_plan(make(), 2)
    assert not plan.shards_sequence
    assert why in (plan.why_full_sequence or "")


class _Rolls(transformers.LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def _with_own_forward() -> Any:
    model = _llama()
    model.model.norm.forward = lambda x: x.roll(1, 1)
    return model


def _with_wrapped_forward() -> Any:
    model = _llama()
    known = model.model.norm.forward
    model.model.norm.forward = functools.wraps(known)(lambda x: known(x.roll(1, 1)))
    return model


def _with_own_method() -> Any:
    model = _llama()
    model.model.rotary_emb.positions = lambda x: x.roll(1, 1)
    return model


def _with_own_layer() -> Any:
    class Norm(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.roll(1, 1)

    model = _llama()
    model.model.norm = Norm()
    return model


def _with_own_loss() -> Any:
    model = _llama()
    model.loss_function = lambda logits, **_: logits.sum()
    return model


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (_llama, None),
        (_with_own_loss, None),
        (lambda: _Changed(_llama().config), None),
        (lambda: _Rolls(_llama().config), "forward"),
        (_with_own_forward, "model.norm.forward"),
        (_with_wrapped_forward, "model.norm.forward"),
        (_with_own_method, "model.rotary_emb.positions"),
        (_with_own_layer, "model.norm.forward"),
    ],
    ids=["family", "loss", "renamed", "subclass", "forward", "wrapped", "method", "layer"],
)
def test_a_family_is_known_by_its_own_code(make: Any, code: str | None) -> None:
    """Context-parallel ranks and packed rows believe a family's name for its own code alone."""
    model = make()
    assert foreign_code(model) == code
    document_ids = torch.tensor([[0, 0, 1]])
    model.config.use_cache = False
    if code is None:
        assert separating_positions(model, document_ids, None).tolist() == [[0, 1, 0]]
    else:
        with pytest.raises(ConfigError, match=f"{code}.* may mix tokens of several documents"):
            separating_positions(model, document_ids, None)
    assert finds_mixers(model) is (code is not None)
    shards = transformers_plan(model, 2, 2).shards_sequence
    assert shards is (code is None and type(model) is transformers.LlamaForCausalLM)


def _attends(module: Any, query: Any, *_: Any, **__: Any) -> Any:
    return query.flip(2), None


@pytest.mark.parametrize("function", [_attends, None], ids=["function", "without masks"])
def test_an_attention_function_is_code(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a mask function lets the documents of a row see each other."""
    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "own", function or functions["sdpa"])
    if function:
        masks = transformers.AttentionMaskInterface._global_mapping
        monkeypatch.setitem(masks, "own", masks["sdpa"])
    model = _llama(use_cache=False)
    model.set_attn_implementation("own")
    assert foreign_code(model) == "attn_implementation='own'" and finds_mixers(model)
    with pytest.raises(ConfigError, match=r"not of transformers \(attn_implementation='own'\)"):
        separating_positions(model, torch.tensor([[0, 0, 1]]), None)
    with pytest.raises(ConfigError, match="LlamaAttention has attn_implementation='own'"):
        put_core(model.model.layers[0].self_attn)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_a_hook_is_code(kind: str) -> None:
    model = _llama()
    getattr(model.model.layers[1].mlp, f"register_{kind}")(lambda *args: args[-1])
    assert foreign_code(model) == "model.layers.1.mlp.hook <lambda>" and finds_mixers(model)


def test_other_models_with_images_are_probed_on_ranks_that_share_rows() -> None:
    """Gemma 3 has LLaVA's parts, and the tokens of an image see each other. One process proves
    rows with images, so stages are refused.
    """
    model, plan = image_models.MODELS["llava"](), ShardingPlan(modules={}, sequence_dim=1)
    with_context(model, plan)
    model.model.vision_tower.register_forward_hook(lambda *args: args[-1])  # sees all images
    with_context(model, plan)
    model.model.language_model.register_forward_hook(lambda *args: args[-1])
    with pytest.raises(ConfigError, match=r"model\.language_model\.hook"):
        with_context(model, plan)
    model.config.model_type = "gemma3"
    shared = with_context(model, plan).style_of("")
    assert isinstance(shared, FoundMixers) and shared.takes_media
    stages = ParallelLayout(context_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(ShardingError, match="There are 2 pipeline stages"):
        shared.check_context(model, stages, plan)


def test_an_encoder_beside_a_decoder_has_full_rows() -> None:
    """Decoders share rows; stages, sources that are cut and labels that are shifted are refused."""
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, dropout_rate=0.0)
    model: Any = transformers.T5ForConditionalGeneration(config)
    plan = with_context(model, ShardingPlan(modules={}, sequence_dim=1))
    shared = plan.style_of("")
    assert isinstance(shared, FoundMixers)
    stages = ParallelLayout(context_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(ShardingError, match=r"encoder runs on full rows .* 2 pipeline stages"):
        shared.check_context(model, stages, plan)
    source, part, cut = (torch.zeros(2, n) for n in (6, 6, 3))
    own = FullArguments(SharingRanks(AxisGroup("cp", (0, 1), 0, None)), {})
    own.origins = Origins.of([part], [source])
    rows = {"decoder_input_ids": torch.zeros(2, 12)}
    own.of(model, (), {"input_ids": source, **rows}, 12)  # as long as a part, and known to be full
    for wrong in (part[:, :4], torch.zeros(2, 6)):
        with pytest.raises(ConfigError, match=r"input_ids of the size .* out of sequence_dims"):
            own.of(model, (), {"input_ids": wrong, **rows}, 12)
    own.of(model, (), {"input_ids": cut, **rows}, 12)
    labels = torch.zeros(2, 6)
    check_call(model, {"labels": labels, "decoder_input_ids": labels}, {}, 12)
    with pytest.raises(ConfigError, match="labels without decoder_input_ids"):
        check_call(model, {"labels": labels}, {}, 12)
    model.main_input_name = "input_features"
    with pytest.raises(ConfigError, match="takes other rows beside those of text"):
        with_context(model, ShardingPlan(modules={}, sequence_dim=1))


def test_what_short_rows_do_not_show_of_a_model_is_refused_by_name() -> None:
    """Before processes start: dropout, capacities of experts, a decoder of its own."""
    plan = ShardingPlan(modules={}, sequence_dim=1)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2)
    with pytest.raises(ConfigError, match=r"dropout_rate=0\.1 .* Set dropout_rate to 0"):
        with_context(transformers.T5ForConditionalGeneration(config), plan)
    few = {"num_heads": 2, "num_experts": 2, "num_sparse_encoder_layers": 1}
    experts = transformers.SwitchTransformersConfig(**sizes, **few, dropout_rate=0.0)
    with pytest.raises(ConfigError, match=r"a capacity \(expert_capacity\)"):
        with_context(transformers.SwitchTransformersForConditionalGeneration(experts), plan)
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    parts = [transformers.BertConfig(**small, num_attention_heads=2) for _ in range(2)]
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    with pytest.raises(ConfigError, match="a decoder with a configuration of its own"):
        with_context(transformers.EncoderDecoderModel(both), plan)


@pytest.mark.parametrize(
    "name", ["BertForPreTraining", "GPT2DoubleHeadsModel", "ElectraForPreTraining"]
)
def test_heads_that_judge_a_whole_text_do_not_share_rows(name: str) -> None:
    """Beside a head for each token, whose logits alone are compared."""
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, name).config_class())
    with pytest.raises(ConfigError, match=f"{name} is not known to work .* its head may mix"):
        with_context(model, ShardingPlan(modules={}, sequence_dim=1))


def test_a_pooler_of_one_token_does_not_share_rows() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, vocab_size=32, intermediate_size=24)
    plan = ShardingPlan(modules={}, sequence_dim=1)
    with pytest.raises(ConfigError, match=r"BertModel.pooler_output .* add_pooling_layer=False"):
        with_context(transformers.BertModel(config), plan)
    with_context(transformers.BertModel(config, add_pooling_layer=False), plan)


def test_router_logits_of_a_text_model_are_refused_in_any_family() -> None:
    model = image_models.MODELS["gemma3"]()
    given = {"input_ids": torch.zeros(1, 4)}
    check_call(model, given, {}, 4)
    model.config.text_config.output_router_logits = True
    with pytest.raises(ConfigError, match="asked for router logits"):
        check_call(model, given, {}, 4)


@pytest.mark.parametrize(
    ("option", "message"),
    [("use_cache", "use_cache is on"), ("output_router_logits", "asked for router logits")],
)
def test_options_of_a_text_model_beside_a_tower_are_checked(option: str, message: str) -> None:
    """Models with images read their ``text_config`` alone."""
    model = image_models.MODELS["llava"]()
    given = {"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    model.config.text_config.use_cache = False
    check_call(model, given, {}, 4)
    setattr(model.config.text_config, option, True)
    with pytest.raises(ConfigError, match=message):
        check_call(model, given, {}, 4)
    check_call(model, {**given, option: False}, {}, 4)


def test_code_of_a_folder_is_no_code_of_its_family() -> None:
    """Its configuration says so, before the model is built."""
    config = _llama().config
    config.auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    check_parts_documents(config, "folder", code_of_folder(config, trusts=False))
    with pytest.raises(ConfigError, match=r"folder \(llama\) has code .*code\.Model"):
        check_parts_documents(config, "folder", code_of_folder(config, trusts=True))


@pytest.mark.parametrize("family", ["mllama", "paligemma"])
def test_families_whose_packed_rows_differ_are_refused(family: str) -> None:
    config = image_models.MODELS["llava"]().config
    check_parts_documents(config, "folder")
    config.model_type = family
    with pytest.raises(ConfigError, match=rf"folder \({family}\) is not known to part"):
        check_parts_documents(config, "folder")


def test_modules_that_every_rank_computes_keep_full_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The modules, not only the family's name, decide: a family may have experts in some sizes."""
    monkeypatch.setattr(hf_sequence, "FAMILIES", {"mixtral", "deepseek_v2", "llama4_text"})
    why = transformers_plan(hf_models.MODELS["mixtral"](), 2).why_full_sequence
    assert why and "MixtralSparseMoeBlock" in why


def test_ranks_that_outnumber_the_keys_share_them() -> None:
    plan = transformers_plan(_llama(), 4)
    assert plan.modules["model.layers.*.self_attn.k_proj"] == KeyOrValue(2, copy_input=False)
    rewrite = plan.attributes["model.layers.0.self_attn.num_key_value_groups"]
    assert rewrite.args == (2,)  # type: ignore[attr-defined]


def test_both_ends_of_a_tied_pair_are_split_or_neither() -> None:
    model = _llama(tie_word_embeddings=True)
    rows = transformers_plan(model, 2).modules
    assert rows["lm_head"] == rows["model.embed_tokens"]
    model._tp_plan["lm_head"] = "rowwise_split_input"
    rows = transformers_plan(model, 2).modules
    assert not {"lm_head", "model.embed_tokens"} & rows.keys()


def test_experts_and_their_parameters_become_one_row() -> None:
    rows = transformers_plan(hf_models.MODELS["mixtral"](), 2).modules
    assert rows["model.layers.*.mlp.experts"] == TensorParallelExperts(
        {"gate_up_proj": Split(-2, blocks=2), "down_proj": Split(-1)}
    )


def test_experts_with_concatenated_gates_are_split_in_two_blocks() -> None:
    """Whatever the plan says: that of Inkling has no word for it."""
    model: Any = hf_models.MODELS["mixtral"]()
    model._tp_plan["model.layers.*.mlp.experts.gate_up_proj"] = "colwise"
    [experts] = [
        row for row in transformers_plan(model, 2).modules.values() if hasattr(row, "splits")
    ]
    assert experts.splits["gate_up_proj"] == Split(-2, blocks=2)


def test_an_activation_with_parameters_sees_split_features() -> None:
    rows = transformers_plan(hf_models.MODELS["apertus"](), 2).modules
    assert rows["model.layers.*.mlp.act_fn"] == HeadParallel()


def test_norms_of_heads_that_a_plan_omits_see_the_heads_of_a_rank() -> None:
    model = hf_models._decoder("Qwen3Moe", num_experts=4, num_experts_per_tok=2, head_dim=8)
    model._tp_plan = {name: one for name, one in model._tp_plan.items() if "_norm" not in name}
    rows = transformers_plan(model, 2).modules
    for name in "qk":
        assert rows[f"model.layers.*.self_attn.{name}_norm"] == HeadParallel()


def test_without_a_plan_every_linear_layer_gathers_its_output() -> None:
    rows = transformers_plan(hf_models.MODELS["bloom"](), 2).modules
    assert rows["transformer.h.*.mlp.dense_h_to_4h"] == ColumnParallel(gather_output=True)
    assert rows["lm_head"] == rows["transformer.word_embeddings"]


def test_a_layer_whose_weight_other_code_reads_stays_full() -> None:
    config = transformers.MambaConfig(
        hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=8, time_step_rank=2
    )
    model = transformers.MambaForCausalLM(config)
    rows = transformers_plan(model, 2).modules
    assert not [path for path in rows if path.endswith("dt_proj")]
    assert [path for path in rows if path.endswith("lm_head")]


def test_a_module_inside_a_plan_of_ours_keeps_that() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _llama()

        def sharding_plan(self) -> Any:
            return llama_hf_plan(self.inner.config)

    assert find_plans(Ours(), None, 2).keys() == {""}
    assert find_plans(nn.ModuleDict({"a": _llama()}), None, 2).keys() == {"a"}
    assert find_plans(nn.ModuleDict({"a": _llama()}), None, 1) == {}


def _with_entry(entry: dict[str, str]) -> Any:
    model = _llama()
    model._tp_plan.update(entry)
    return model


def _mixtral_without_down() -> Any:
    model: Any = hf_models.MODELS["mixtral"]()
    del model._tp_plan["model.layers.*.mlp.experts.down_proj"]
    return model


@pytest.mark.parametrize(
    ("make", "tensor", "message"),
    [
        (
            lambda: _llama(num_attention_heads=6, num_key_value_heads=6, hidden_size=48),
            4,
            r"q_proj has 6 query heads, which 4 .* Set tensor_model_parallel_size to a divisor",
        ),
        (
            lambda: _llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48),
            2,
            "k_proj has 3 key and value heads, which 2 tensor-parallel ranks",
        ),
        (
            lambda: _with_entry({"model.norm": "sequence_parallel"}),
            2,
            'LlamaForCausalLM has "model.norm": "sequence_parallel".*a LlamaRMSNorm',
        ),
        (
            lambda: _with_entry({"model.layers.*.mlp.act_fn": "colwise"}),
            2,
            r"no style of that kind for model.layers.0.mlp.act_fn \(a Si",
        ),
        (_mixtral_without_down, 2, "does not name their down_proj"),
        (lambda: hf_models._decoder("Doge"), 2, "splits the heads of model.layers.0.* not its A,"),
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=1, n_embd=24, n_head=3, vocab_size=8)
            ),
            2,
            "GPT2LMHeadModel has 3 attention heads",
        ),
    ],
    ids=["heads", "keys", "style", "module", "experts", "per-head", "table"],
)
def test_what_cannot_be_split_is_refused(make: Any, tensor: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformers_plan(make(), tensor)


def test_sequence_parallelism_needs_rows_that_shard_the_sequence() -> None:
    model = _llama()
    assert resolve_plans(model, _layout(sequence_parallel=True), None).shards_sequence
    resolve_plans(model, _layout(sequence_parallel=True), llama_hf_plan(model.config))
    model = hf_models.MODELS["mixtral"]()
    resolve_plans(model, _layout(), None)
    with pytest.raises(ConfigError, match=r'is True.*MixtralForCausalLM.*of a family.*"auto"'):
        resolve_plans(model, _layout(sequence_parallel=True), None)


def test_a_refusal_comes_before_the_launch() -> None:
    fit = trainer(
        MegatronStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
        devices=2,
        max_epochs=1,
    )
    with pytest.raises(ConfigError, match="sequence_parallel is True"):
        fit.fit(hf_models.Untouched("mixtral"), hf_models.loader("mixtral"))
