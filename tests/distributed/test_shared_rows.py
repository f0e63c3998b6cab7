"""Ways in which modules that mix tokens share rows: what is taken is equal to one process, and what
differs in a detail is not taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megatron_lightning.assembly.checks.attention_rows import bound_attention
from megatron_lightning.config import ContextMixers
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.context import ring as context_ring
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.shared_rows import conditions, entry, exchange, mixers, ring
from megatron_lightning.layers.shared_rows.conditions import dropout_of
from megatron_lightning.layers.shared_rows.mixers import SharingRanks
from megatron_lightning.layers.state_space.segments import Segments
from megatron_lightning.layers.styles import DividedRows, GatheredTokens
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.grid.context import AxisGroup, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.sequence import SequencePart
from megatron_lightning.parallel.shards.sharding import ShardingPlan, parallelize
from tests.helpers.ranks import run_ranks

LENGTH = 48
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    "max_position_embeddings": 8192, "initializer_range": 0.2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


def _gpt_oss() -> nn.Module:
    """Sinks, and a window longer than any row that is probed."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**SIZES, **experts, sliding_window=4096)
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def _gemma() -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, sliding_window=4096))


def _qwen3_5() -> nn.Module:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **DELTA))


def _nemotron() -> nn.Module:
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**SIZES, **MAMBA))


def _mamba() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))


def _llama4() -> nn.Module:
    """Chunks of a row, longer than any row that is probed."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        moe_layers=[],
        attention_chunk_size=4096,
        layer_types=["chunked_attention", "full_attention"],
    )
    return transformers.Llama4ForCausalLM(config)


def _llama4_scaled() -> nn.Module:
    """Queries of layers without rotation are scaled by their position, of which a rank counts
    those of its part.
    """
    config = transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        moe_layers=[],
        attention_chunk_size=4096,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        floor_scale=LENGTH // 2 - 4,
    )
    return transformers.Llama4ForCausalLM(config)


def _bart() -> nn.Module:
    names = ("encoder_layers", "decoder_layers")
    heads = ("encoder_attention_heads", "decoder_attention_heads")
    sizes = {"vocab_size": 32, "d_model": 32, **dict.fromkeys(names, 2), **dict.fromkeys(heads, 4)}
    config = transformers.BartConfig(**sizes, dropout=0.0, init_std=0.2)
    return transformers.BartForConditionalGeneration(config)


def _t5() -> nn.Module:
    """Biases by distance, which the first block hands on."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    config = transformers.T5Config(vocab_size=32, num_layers=2, **sizes, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt_oss": (_gpt_oss, ["ring", "ring"]),
    "gemma": (_gemma, ["ring", "ring"]),
    "qwen3_5": (_qwen3_5, ["exchange", "ring"]),
    "nemotron": (_nemotron, ["exchange", "ring"]),
    "mamba": (_mamba, ["exchange", "exchange"]),
    "llama4": (_llama4, ["rows", "ring"]),
    "llama4_scaled": (_llama4_scaled, ["rows", "gather"]),
    "bart": (_bart, ["ring", "ring"]),
    "t5": (_t5, ["gather", "gather"]),
}


def _group() -> AxisGroup:
    ranks = tuple(range(dist.get_world_size()))
    return AxisGroup("cp", ranks, dist.get_rank(), dist.group.WORLD)


def _shared(model: nn.Module, mixers: ContextMixers = "auto") -> entry.SharedRows:
    """Find and bind what mixes the tokens of a model."""
    group = _group()
    shared = entry.SharedRows(SharingRanks(group, RingAttention(group)), (group,), mixers)
    model.register_forward_pre_hook(shared, with_kwargs=True)
    shared.find(model)
    return shared


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _gradients(model: Any, tokens: Tensor, targets: Tensor, **given: Any) -> dict[str, Tensor]:
    rows = {"input_ids": tokens}
    if model.config.is_encoder_decoder:  # a padded source, as long as a decoder's full row
        source = torch.arange(2 * LENGTH).view(2, LENGTH) % 29 + 3
        mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]])
        rows = {"decoder_input_ids": tokens, "input_ids": source, "attention_mask": mask.long()}
    logits = model(**rows, **given).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def _largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients summed over the ranks, each of its own size and a
    tenth of the largest.
    """
    size = max(float(x.norm()) for x in expected.values())
    worst = 0.0
    for parameter, gradient in found.items():
        dist.all_reduce(gradient)
        difference = (gradient - expected[parameter]).norm()
        worst = max(worst, float(difference / (expected[parameter].norm() + 0.1 * size)))
    return worst


def _dealt(chunks: int) -> Deal | None:
    """Return chunks of all ranks in any order. Two chunks are zigzag."""
    owners = [*range(dist.get_world_size())] * chunks
    random.Random(chunks).shuffle(owners)
    return None if chunks == 2 else Deal(tuple(owners))


def _differences(names: list[str], chunks: int) -> dict[str, tuple[list[str], float]]:
    """Return the kinds of each model, and the largest difference from one process."""
    results = {}
    tokens, targets = torch.randint(32, (2, 2, LENGTH), generator=torch.Generator().manual_seed(9))
    for name in names:
        model = _made(MODELS[name][0])
        expected = _gradients(model, tokens, targets)
        shared = _shared(model)
        shared.ranks.deal = _dealt(chunks)
        part = shared.ranks.part
        with shared.rows_of(LENGTH):
            found = _gradients(model, part.split(tokens, 1), part.split(targets, 1))
        results[name] = list(shared.kinds.values()), _largest_difference(found, expected)
    return results


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(size: int, chunks: int) -> None:
    """fp32 on sums in another order, with any chunks on a rank."""
    for results in run_ranks(size, _differences, list(MODELS), chunks):
        for name, (kinds, difference) in results.items():
            assert kinds == MODELS[name][1], name
            assert difference < 3e-6, name


def _looking_back() -> nn.Module:
    sizes = SIZES | {"num_hidden_layers": 1}
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    config: Any = model.config
    for name in ("sliding_window", "max_window_layers"):
        vars(config).pop(name, None)
    own = type(model.model)

    class Base(own):  # type: ignore[misc,valid-type]
        """Makes its own masks."""

        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            at = torch.arange(input_ids.shape[1])
            distance = at[:, None] - at
            mask = ((distance >= 0) & (distance < 60))[None, None]
            kwargs["attention_mask"] = {"full_attention": mask}
            return super().forward(input_ids=input_ids, **kwargs)

    model.model.__class__ = Base
    return model


def _long_rows() -> str:
    """Return the error of rows longer than a window that no probe has seen."""
    shared = _shared(model := _made(_looking_back))
    assert list(shared.kinds.values()) == ["ring"]
    rows = torch.zeros(1, 64, dtype=torch.long)
    with shared.rows_of(48):
        model(input_ids=rows[:, :24])
    with shared.rows_of(64), pytest.raises(ConfigError) as refusal:
        model(input_ids=rows[:, :32])
    return str(refusal.value)


def _with_a_rate() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.dropout = 0.1
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout1d(0.1)),
        _with_a_rate,
    ],
    ids=["rate", "channels", "attribute"],
)
def test_dropout_of_any_kind_is_found(make: Any) -> None:
    assert dropout_of(nn.Sequential(make())) == 0.1
    assert dropout_of(nn.Linear(2, 2)) == 0.0


def test_a_window_of_an_unknown_name_is_found_in_its_mask() -> None:
    for message in run_ranks(2, _long_rows):
        assert "hides the first of 64 tokens from the last one" in message


def test_masks_beside_images_are_those_of_causality_and_windows() -> None:
    """A batch may be the first whose mask hides an image from the tokens behind another one."""
    ranks = SharingRanks(AxisGroup("cp", (0,), 0, None), takes_media=True)
    attention: Any = lambda q, *_, **__: q  # noqa: E731
    rows = torch.zeros(2, 1, 6, 8)

    def attend(mask: Tensor, **given: Any) -> None:
        ranks.left_out = (mask,)
        ring.RingFunctions(attention, ranks).attend(nn.Identity(), rows, rows, rows, None, **given)

    causal = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    window, hidden, ahead, packed = causal.triu(-2), causal.clone(), causal.clone(), causal.clone()
    hidden[1, 0, 4, 1], ahead[1, 0, 2, 3], packed[..., 4:, :4] = False, True, False
    numbers = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    documents = Documents(((0, 4, 6),) * 2)
    attend(causal)
    attend(numbers)
    attend(window, sliding_window=3)
    attend(packed, documents=documents)
    for wrong, given in (
        (hidden, {}), (ahead, {}), (window, {}), (window, {"sliding_window": 4}), (packed, {}),
        (causal, {"documents": documents}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="others than causality and windows do"):
            attend(wrong, **given)


_SEQUENCE_INFO = ring.SequenceInfo
_ATTEND = ring.RingFunctions.attend


def _without_windows(causal: bool, window: int | None, documents: Any = None) -> Any:
    return _SEQUENCE_INFO(causal=causal)


def _wider(causal: bool, window: int | None, documents: Any = None) -> Any:
    return _SEQUENCE_INFO(causal=causal, window=None if window is None else window + 1)


def _without_sinks(self: Any, *args: Any, s_aux: Any = None, **kwargs: Any) -> Any:
    return _ATTEND(self, *args, **kwargs)


def _other_scale(self: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
    return _ATTEND(self, *args, scaling=1.002 * scaling, **kwargs)


def _without_documents(self: Any, *args: Any, documents: Any = None, **kwargs: Any) -> Any:
    return _ATTEND(self, *args, **kwargs)


def _no_tokens_before(self: Segments, x: Tensor, number: int) -> Tensor:
    return torch.zeros_like(x[:number])


_WAIT = context_ring._Passing.wait
_JOIN = mixers.join


def _own_shard(self: Any) -> Tensor:
    _WAIT(self)
    own: Tensor = self._sent
    return own


def _own_heads(parts: Any, group: AxisGroup, _: Any) -> list[Tensor]:
    return [x.repeat(group.size, 1, 1)[..., : x.shape[2] // group.size] for x in parts]


def _own_keys(self: mixers.KeysOfRanks, *keys_and_values: Tensor, **_: Any) -> list[Tensor]:
    return [x.repeat(1, 1, self._group.size, 1) for x in keys_and_values[:2]]


def _own_rows(part: Tensor, group: AxisGroup, dim: int, _: Any) -> Tensor:
    return torch.cat([part] * group.size, dim)


def _swapped(parts: list[Tensor], dim: int, deal: Deal | None) -> Tensor:
    """Two chunks of a rank change places with those of another."""
    return _JOIN(parts[::-1], dim, deal)


FAULTS: Mapping[str, tuple[Callable[[], nn.Module], Any, str, Any, list[str]]] = {
    "window ignored": (_gpt_oss, ring, "SequenceInfo", _without_windows, ["rows", "ring"]),
    "window of one more": (_gemma, ring, "SequenceInfo", _wider, ["rows", "ring"]),
    "sinks dropped": (_gpt_oss, ring.RingFunctions, "attend", _without_sinks, ["rows", "rows"]),
    "no tokens before": (
        _qwen3_5, Segments, "tokens_before", _no_tokens_before, ["gather", "ring"],
    ),
    "roundings in 16 bits hide a scale": (
        lambda: _gemma().bfloat16(), ring.RingFunctions, "attend", _other_scale, ["rows", "rows"],
    ),
    "no keys pass by": (
        _gemma, context_ring._Passing, "wait", _own_shard, ["rows", "rows"],
    ),
    "no exchange": (_qwen3_5, exchange, "parts_to_heads", _own_heads, ["gather", "ring"]),
    "keys of one rank": (_llama4, mixers.KeysOfRanks, "update", _own_keys, ["gather", "ring"]),
    "nothing gathered": (_llama4, mixers, "full_rows", _own_rows, ["refused"]),
    "two chunks swapped": (_llama4, mixers, "join", _swapped, ["refused"]),
}  # fmt: skip
"""Model, what is replaced, and the kinds that are found."""


def _kinds_of_faults() -> dict[str, list[str]]:
    found = {}
    for name, (make, owner, attribute, fault, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, attribute, fault)
            try:
                found[name] = list(_shared(_made(make)).kinds.values())
            except ConfigError as refusal:
                assert "ranks that share sequences cannot share it" in str(refusal)
                found[name] = ["refused"]
    return found


@pytest.mark.slow
def test_a_way_that_differs_in_a_detail_is_not_taken() -> None:
    expected = {name: fault[-1] for name, fault in FAULTS.items()}
    assert run_ranks(2, _kinds_of_faults) == [expected, expected]


DOCUMENTS = ([9, 39], [20, 5, 23])
"""Lengths of the documents of two rows, which end anywhere in a rank's part."""


def _packed(chunks: int) -> tuple[list[float], str, str]:
    """Return the differences of packed rows from documents alone, in each way, and refusals of a
    model that does not keep documents apart, and of attention that ignores them.
    """
    tokens, targets = torch.randint(32, (2, 2, LENGTH), generator=torch.Generator().manual_seed(9))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    model, expected = _made(_gemma), {}
    for row, lengths in enumerate(DOCUMENTS):
        for document, of in zip(
            tokens[row].split(lengths), targets[row].split(lengths), strict=True
        ):
            for name, gradient in _gradients(model, document[None], of[None]).items():
                expected[name] = expected.get(name, 0) + gradient

    def of_ranks(
        model: nn.Module, fault: Any = _ATTEND, kinds: ContextMixers = "auto"
    ) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ring.RingFunctions, "attend", fault)
            shared = _shared(model, kinds)
            shared.ranks.deal = _dealt(chunks)
            with shared.rows_of(LENGTH):
                parts = [shared.ranks.part.split(x, 1) for x in (tokens, targets, positions)]
                return _gradients(model, *parts[:2], position_ids=parts[2])

    found = []
    for kinds in _WAYS:
        gradients = of_ranks(_made(_gemma), kinds=kinds)
        found.append(_largest_difference(gradients, expected))
    with pytest.raises(ConfigError) as leaks:
        of_ranks(_made(_qwen3_5))
    with pytest.raises(ConfigError) as ignored:
        of_ranks(_made(_gemma), _without_documents)
    return found, str(leaks.value), str(ignored.value)


_WAYS: list[ContextMixers] = ["auto", {"**.self_attn": "rows"}, {"**.self_attn": "gather"}]


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_documents_are_kept_apart_or_refused(size: int, chunks: int) -> None:
    for differences, *refusals in run_ranks(size, _packed, chunks):
        assert max(differences) < 3e-6
        for refusal in refusals:
            assert "does not keep such documents apart" in refusal


def test_a_model_that_short_rows_switch_to_other_code_is_refused() -> None:
    """Block-sparse attention turns itself off for good in short rows."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "use_cache": False}
    config = transformers.BigBirdConfig(**sizes, num_attention_heads=2, intermediate_size=48)
    group = AxisGroup("cp", (0,), 0, None)
    shared = entry.SharedRows(SharingRanks(group, RingAttention(group)), (group,), "auto")
    with pytest.raises(
        ConfigError, match=r"attention_type .* 'block_sparse' and is 'original_full"
    ):
        shared.find(transformers.BigBirdForMaskedLM(config))


def test_a_decoder_without_tokens_is_refused() -> None:
    """BART makes them of its source, whose rows are full."""
    group = AxisGroup("cp", (0,), 0, None)
    shared = entry.SharedRows(SharingRanks(group, RingAttention(group)), (group,), "auto")
    with pytest.raises(ConfigError, match="called without decoder_input_ids"):
        shared._full.of(_bart(), (), {"input_ids": torch.zeros(2, 12)}, 16)


def _kinds_that_are_set() -> tuple[list[str], str]:
    shared = _shared(_made(_gemma), {"model.layers.0.*": "rows", "**.self_attn": "gather"})
    with pytest.raises(ConfigError) as refusal:
        _shared(_made(_gemma), {"model.layers.*.mixer": "rows"})
    return list(shared.kinds.values()), str(refusal.value)


def test_a_mapping_sets_the_ways() -> None:
    for kinds, refusal in run_ranks(2, _kinds_that_are_set):
        assert kinds == ["rows", "gather"]
        assert "model.layers.0.self_attn (ring)" in refusal


def test_windows_are_small_while_a_model_is_probed() -> None:
    model: Any = _gpt_oss()
    layer = model.model.layers[0].self_attn
    layer.sliding_window = 100
    with conditions.small_windows(model):
        assert (layer.sliding_window, model.config.sliding_window) == (7, 8)  # they stay different
    assert (layer.sliding_window, model.config.sliding_window) == (100, 4096)


# --------------------------------------------------------------------------------- modules of users


class _Smoothed(nn.Module):
    """A running mean, which no kind of attention computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1)[None, :, None]
        return self.weight * scale * x.cumsum(1) / counts


class _Attends(nn.Module):
    """Attention of a user, which reads a cache where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, attention_mask: Any = None, past_key_values: Any = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v)
        causal = attention_mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal)
        return out.transpose(1, 2).flatten(2)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.smoothed, self.attention = _Smoothed(), _Attends()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x + self.smoothed(x, x.sigmoid())).square()


class _Pools(nn.Module):
    """Leaves no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


_ROWS = {"smoothed": GatheredTokens(), "attention": DividedRows()}


def _own_modules(chunks: int) -> tuple[float, list[str]]:
    """Return the largest difference of gradients, and refusals."""
    layout = ParallelLayout(context_parallel_size=dist.get_world_size())
    context = ParallelContext(layout)
    net = _made(_Net)
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    net(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    whole, x.grad = x.grad, None
    net.zero_grad()
    parallelize(net, context, ShardingPlan(modules=_ROWS))
    part = SequencePart(context.cp.rank, context.cp.size, _dealt(chunks))
    for mixer in bound_attention(net).values():
        mixer.deal = part.deal
    net(part.split(x, 1)).sum().backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    refusals = []
    with pytest.raises(ShardingError) as error:
        pools = nn.Sequential(_Pools())
        parallelize(pools, context, ShardingPlan(modules={"0": GatheredTokens()}))
        pools(torch.zeros(2, 6, 8))
    refusals.append(str(error.value))
    with pytest.raises(ShardingError) as error:
        rows = {"0": DividedRows()}
        parallelize(nn.Sequential(_Smoothed()), context, ShardingPlan(modules=rows))
    refusals.append(str(error.value))
    for mixer in bound_attention(net).values():
        mixer.takes_parts = False
    with pytest.raises(ConfigError) as outside:
        net(part.split(x, 1))
    refusals.append(str(outside.value))
    assert whole is not None and x.grad is not None
    return _largest_difference(found | {"x": x.grad}, expected | {"x": whole}), refusals


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_modules_of_users_share_rows(size: int, chunks: int) -> None:
    for difference, refusals in run_ranks(size, _own_modules, chunks):
        assert difference < 3e-6
        for refusal, words in zip(
            refusals,
            (f"of a _Pools over {size}", "passes attention_mask", "outside of"),
            strict=True,
        ):
            assert words in refusal
