"""Text of the engine: that of the uncached forward and of transformers, on every layout, whatever
its neighbors are.

Weights deviate so much that a wrong key, position or head changes the text, and texts have many
distinct tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import (
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, EngineOptions, Sampling, sample
from megatron_lightning.inference.engine.request_batch import Batch
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.layers.state.key_cache import CacheStep, KeyStore
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from tests.distributed.test_generate import save_plain
from tests.helpers.hf_weights import from_llama
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "vocab_size": 67,
    "max_sequence_length": 96,
    "init_method_std": 0.4,
}
PROMPTS = [[1, 2, 3], [7], list(range(1, 38)), [5, 4, 3, 2, 1, 0, 9], [11, 12] * 6, [60]]
LATENT = LatentAttentionConfig(
    q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
)
CONFIGS = {
    "grouped": tiny_config(**SIZES),
    "window": tiny_config(**SIZES, window_size=(8, 0), window_attn_skip_freq=3),
    "scaled": tiny_config(
        **SIZES,
        logits_scaling=0.7,
        final_logit_softcapping=4.0,
        attn_logit_softcapping=2.0,
        softmax_type="learnable",
    ),
    "sliding": tiny_config(**{**SIZES, "max_sequence_length": 30}),
    "experts": tiny_config(
        **SIZES,
        # Neither drops tokens nor balances by force: a text would depend on its neighbors.
        moe=MoEConfig(
            num_experts=4,
            shared_expert_intermediate_size=24,
            layer_freq=(1, 0, 1, 1),
            expert_capacity_factor=0.5,
        ),
    ),
    "learned": tiny_config(
        **SIZES,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        activation="gelu_tanh",
        add_bias_linear=True,
        share_embeddings_and_output_weights=True,
        attention_softmax_in_fp32=True,
    ),
    "long": tiny_config(
        **SIZES,
        rotary_interleaved=True,
        rope_scaling=RopeScaling(
            rope_type="longrope",
            factor=4.0,
            original_max_position_embeddings=20,
            short_factor=(1.0, 1.1, 1.3, 1.4),
            long_factor=(1.2, 2.0, 3.5, 5.0),
        ),
    ),
    "states": tiny_config(
        **SIZES,
        layer_pattern="M*M-",
        mamba=MambaConfig(head_dim=16, num_groups=2, state_dim=16, chunk_size=4),
    ),
    "delta net": tiny_config(
        **SIZES,
        linear_attention_freq=(1, 0, 1, 0),
        delta_net=DeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12, chunk_size=4
        ),
    ),
    "latent": tiny_config(**{**SIZES, "num_query_groups": None}, mla=LATENT, qk_layernorm=True),
}
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
DRAWN = Sampling(max_new_tokens=24, temperature=0.9, top_k=20, top_p=0.9, seed=5)
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2, "sequence_parallel": False},
    "tp2 sp": {TP: 2},
    "pp2": {PP: 2},
    "pp2 vpp2": {PP: 2, VPP: 2},
    "tp2 ep2": {TP: 2, EP: 2, ETP: 1},
}
SMALL: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunks": {"max_tokens": 5, "max_requests": 3},
    "pages": {"storage": "pages", "block_size": 4},
}


def model_of(config: TransformerConfig) -> GPTModel:
    return GPTModel(without_capacity(config)).eval()


def without_capacity(config: TransformerConfig) -> TransformerConfig:
    if config.moe is None:
        return config
    moe = MoEConfig(**{**asdict(config.moe), "expert_capacity_factor": None})
    return TransformerConfig(**{**asdict(config), "moe": asdict(moe)})


def uncached(model: GPTModel, sampling: Sampling, prompts: Any = PROMPTS) -> list[list[int]]:
    """Return new tokens by a full forward for each."""

    @torch.inference_mode()
    def logits(tokens: Tensor, last: Tensor) -> Tensor:
        padding = torch.arange(tokens.shape[1]) > last[:, None]
        return model(tokens, padding=padding)[torch.arange(len(tokens)), last]

    longest = model.config.max_sequence_length
    texts = sample(logits, prompts, sampling, max_sequence_length=longest)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def expected_texts(names: Any, samplings: Any) -> dict[str, list[list[list[int]]]]:
    return {
        name: [uncached(model_of(CONFIGS[name]), sampling) for sampling in samplings]
        for name in names
    }


def saved(folder: Path, names: Any = CONFIGS) -> dict[str, str]:
    return {name: save_plain(folder / name, CONFIGS[name]) for name in names}


def texts_of(engine: Engine, sampling: Sampling, prompts: Any = PROMPTS) -> list[list[int]]:
    return [own.tokens for (own,) in engine.generate(prompts, sampling)]


def engines_of(
    paths: dict[str, str], layouts: dict[str, dict[str, Any]], options: dict[str, dict[str, Any]]
) -> Iterator[tuple[tuple[str, str, str], Engine]]:
    """Yield an engine of each model, layout and case. Layouts of experts are for models of
    experts.
    """
    for name, path in paths.items():
        for layout, sizes in layouts.items():
            if EP in sizes and CONFIGS[name].moe is None:
                continue
            for case, own in options.items():
                engine = Engine.load(path, ParallelLayout(**sizes), options=EngineOptions(**own))
                yield (name, layout, case), engine


def found_texts(
    paths: dict[str, str],
    layouts: dict[str, dict[str, Any]],
    options: dict[str, dict[str, Any]],
    samplings: Any = (GREEDY, DRAWN),
) -> dict[tuple[str, str, str], list[list[list[int]]]]:
    return {
        key: [texts_of(engine, sampling) for sampling in samplings]
        for key, engine in engines_of(paths, layouts, options)
    }


def check_ranks(
    ranks: Sequence[dict[tuple[str, str, str], Any]],
    names: Any = CONFIGS,
    samplings: Any = (GREEDY, DRAWN),
) -> None:
    """Check that all ranks have written the expected texts."""
    assert all(rank == ranks[0] for rank in ranks)
    check(ranks[0], names, samplings)


def check(
    found: dict[tuple[str, str, str], Any], names: Any = CONFIGS, samplings: Any = (GREEDY, DRAWN)
) -> None:
    expected = expected_texts(names, samplings)
    assert {key for key, texts in found.items() if texts != expected[key[0]]} == set()
    assert all(
        len({t for row in texts for own in row for t in own}) > 20 for texts in expected.values()
    )


@pytest.mark.parametrize(
    ("samplings", "cases", "names"),
    [
        pytest.param((DRAWN,), ("chunks",), tuple(CONFIGS)[1::4], id="every fourth model"),
        *(
            pytest.param(*case, tuple(CONFIGS), id=name, marks=pytest.mark.slow)
            for name, case in {
                "drawn, chunks": ((DRAWN,), ("chunks",)),
                "drawn": ((DRAWN,), ("at once", "pages")),
                "greedy": ((GREEDY,), tuple(SMALL)),
            }.items()
        ),
    ],
)
def test_one_process_gives_the_text_of_the_uncached_forward(
    samplings: tuple[Sampling, ...], cases: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    options = {case: SMALL[case] for case in cases}
    check(found_texts(saved(tmp_path, names), {"1": {}}, options, samplings), names, samplings)


def test_two_ranks_with_experts_give_the_same_text(tmp_path: Path) -> None:
    _compare_two_ranks(["tp2 ep2"], tmp_path)


@pytest.mark.slow
def test_two_ranks_give_the_same_text(tmp_path: Path) -> None:
    _compare_two_ranks(["pp2 vpp2", "tp2 ep2"], tmp_path)


def _compare_two_ranks(layouts: list[str], folder: Path) -> None:
    names, options = ("experts",), {"chunks": {"max_tokens": 20, "max_requests": 4}}
    usual = {name: LAYOUTS[name] for name in layouts}
    ranks = run_ranks(2, found_texts, saved(folder, names), usual, options, [DRAWN])
    check_ranks(ranks, names, [DRAWN])


@pytest.mark.slow
@pytest.mark.parametrize("names", [tuple(CONFIGS)[:4], tuple(CONFIGS)[4:7], tuple(CONFIGS)[7:]])
def test_all_models_on_two_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    ranks = run_ranks(2, found_texts, saved(tmp_path, names), LAYOUTS, SMALL, timeout_s=110)
    check_ranks(ranks, names)


@pytest.mark.slow
def test_four_ranks_give_the_same_text(tmp_path: Path) -> None:
    layouts = {"tp2 pp2": {TP: 2, PP: 2}, "tp4 sp": {TP: 4}, "pp2 vpp2 tp2": {PP: 2, VPP: 2, TP: 2}}
    check_ranks(run_ranks(4, found_texts, saved(tmp_path), layouts, SMALL, timeout_s=110))


@pytest.mark.parametrize("window", [None, 8])
def test_the_text_of_transformers(window: int | None, tmp_path: Path) -> None:
    """A prompt beyond twice the window, in chunks that end inside of it."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 67,
        "max_position_embeddings": 96,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is None:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    else:
        config = transformers.MistralConfig(**sizes, sliding_window=window + 1)
        theirs = transformers.MistralForCausalLM(config).eval()
    config = tiny_config(**SIZES, window_size=None if window is None else (window, 0))
    model = GPTModel(config)
    model.load_state_dict(from_llama(theirs.state_dict(), config))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": state, "hyper_parameters": {"config": asdict(config)}}, path)
    engine = Engine.load(path, options=EngineOptions(max_tokens=7, max_requests=4))
    expected = [
        theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )[0].tolist()[len(prompt) :]
        for prompt in PROMPTS
    ]
    assert texts_of(engine, GREEDY) == expected
    assert len({token for text in expected for token in text}) > 40


def _forget(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = KeyStore.write

    def forgetting(self: KeyStore, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        write(self, slots, keys, values)
        self.keys[3] = 0

    monkeypatch.setattr(KeyStore, "write", forgetting)


def _ignore_window(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CacheStep.attend
    monkeypatch.setattr(
        CacheStep, "attend", lambda *a: attend(*a[:-1], a[-1]._replace(window=None))
    )


def _shift(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GPTModel.forward

    def shifted(self: GPTModel, tokens: Tensor, **arguments: Any) -> Tensor:
        positions = arguments.pop("position_ids")
        positions = torch.where(positions == 20, 21, positions)
        return forward(self, tokens, position_ids=positions, **arguments)

    monkeypatch.setattr(GPTModel, "forward", shifted)


@pytest.mark.spread(1)
@pytest.mark.parametrize("fault", [_forget, _ignore_window, _shift])
def test_a_wrong_cache_gives_another_text(
    fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(save_plain(tmp_path / "window", CONFIGS["window"]))
    expected = texts_of(engine, GREEDY)
    fault(engine, monkeypatch)
    assert texts_of(engine, GREEDY) != expected


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.load(save_plain(tmp_path / "grouped", CONFIGS["grouped"]))


def test_a_text_depends_neither_on_neighbors_nor_on_the_place(engine: Engine) -> None:
    together = texts_of(engine, DRAWN)
    for index, prompt in enumerate(PROMPTS):
        own = Sampling(**{**asdict(DRAWN), "seed": DRAWN.seed + index})
        assert texts_of(engine, own, [prompt]) == together[index : index + 1]
    assert together == texts_of(engine, DRAWN)  # the cache was used before


@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_samples_of_a_prompt_share_its_keys(storage: Any, tmp_path: Path) -> None:
    path = save_plain(tmp_path / "grouped", CONFIGS["grouped"])
    engine = Engine.load(path, options=EngineOptions(storage=storage, block_size=4))
    found = engine.generate(PROMPTS, DRAWN, num_samples=3)
    steps = engine.num_steps
    apart = texts_of(engine, DRAWN, [prompt for prompt in PROMPTS for _ in range(3)])
    assert [one.tokens for samples in found for one in samples] == apart
    assert len({tuple(one.tokens) for one in found[0]}) == 3
    assert steps == GREEDY.max_new_tokens + 1  # the others wait until the prompts are computed


@pytest.mark.parametrize("storage", ["runs", "pages"])
def test_samples_slide_behind_shared_keys(storage: Any) -> None:
    """A sample beyond the longest input is computed again, apart from the keys of the others."""
    model = model_of(replace(CONFIGS["grouped"], max_sequence_length=16))
    prompts, sampling = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [7, 7, 2, 1, 8, 2]], DRAWN
    engine = Engine.of(model, options=EngineOptions(storage=storage, block_size=4))
    found = engine.generate(prompts, sampling, num_samples=3)
    apart = uncached(model, sampling, [prompt for prompt in prompts for _ in range(3)])
    assert [one.tokens for samples in found for one in samples] == apart


SHARING: dict[str, dict[str, Any]] = {
    "runs": {"storage": "runs"},
    "pages": {"storage": "pages", "block_size": 4},
    "chunks": {"max_tokens": 5, "max_requests": 3},
    "few": {"max_requests": 2},
    "small cache": {
        "storage": "pages", "block_size": 4, "max_tokens": 16, "max_requests": 6,
        "cache_gib": 80 * 4 * 2 * 2 * 8 * 4 / 2**30,  # slots of one long text
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SHARING)
def test_scores_after_one_context_share_its_keys(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, sums in another order: 1e-5 of log-probabilities of up to 10."""
    path = save_plain(tmp_path / "grouped", CONFIGS["grouped"])
    engine = Engine.load(path, options=EngineOptions(**SHARING[case]))
    context = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    pairs = [(context, [i, 2 * i, 7][: 1 + i % 3]) for i in range(5)]
    pairs += [([8], [9, 7]), (context[:9], [35, 4]), ([8], [3])]
    pairs += [(context * 7, [1]), (context * 7, [2])]
    computed, plan = list[int](), Scheduler.plan

    def counting(self: Scheduler, group: int) -> Batch:
        batch = plan(self, group)
        computed.extend(portion.count for portion in batch.portions)
        return batch

    apart = [engine.score([one], [other])[0] for one, other in pairs]
    monkeypatch.setattr(Scheduler, "plan", counting)
    together = engine.score(*map(list, zip(*pairs, strict=True)))
    for own, other in zip(apart, together, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
        assert [token for token, _ in own.best] == [token for token, _ in other.best]
    longest = CONFIGS["grouped"].max_sequence_length
    all_tokens = sum(min(longest, len(one) + len(other) - 1) for one, other in pairs)
    most_shared = 4 * (len(context) - 1) + len(context * 7) - 1
    assert all_tokens - most_shared <= sum(computed) < all_tokens
    if case in ("runs", "pages"):
        assert sum(computed) == all_tokens - most_shared


@pytest.mark.parametrize("name", ["grouped", "scaled"])
def test_log_probabilities_are_those_of_the_training_forward(name: str, tmp_path: Path) -> None:
    """fp32, sums of 67 exponentials and of a few hundred products: 1e-5."""
    model, engine = model_of(CONFIGS[name]), Engine.load(save_plain(tmp_path / name, CONFIGS[name]))
    found = engine.generate(PROMPTS, DRAWN)
    scores = engine.score(PROMPTS, [one.tokens for (one,) in found])
    for prompt, (one,), score in zip(PROMPTS, found, scores, strict=True):
        tokens = torch.tensor([prompt + one.tokens])
        with torch.no_grad():
            logits = model(tokens)[0, len(prompt) - 1 : -1]
        targets = torch.tensor(one.tokens)[:, None]
        for temperature, logprobs in ((0.9, one.logprobs), (1.0, score.logprobs)):
            expected = (logits / temperature).log_softmax(-1).gather(1, targets)[:, 0]
            assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5)
        assert score.logprob == pytest.approx(sum(score.logprobs))
        best = logits.argmax(-1).tolist()
        assert [token for token, _ in score.best] == best
        assert score.is_greedy == (best == one.tokens)
    greedy = engine.generate(PROMPTS, GREEDY)
    scores = engine.score(PROMPTS, [one.tokens for (one,) in greedy])
    assert all(score.is_greedy for score in scores)


def cache_of(num_slots: int, storage: Any) -> EngineOptions:
    """Return options of a cache for so many tokens of the grouped model in fp32."""
    bytes_per_slot = 4 * 2 * 2 * 8 * 4  # layers, keys and values, groups, head size, fp32
    return EngineOptions(
        storage=storage,
        block_size=4,
        max_tokens=16,
        max_requests=6,
        cache_gib=num_slots * bytes_per_slot / 2**30,
    )


@pytest.mark.slow
def test_full_caches_let_the_youngest_wait(tmp_path: Path) -> None:
    """A cache for the longest text alone: in runs the others wait, in pages they give way."""
    path = save_plain(tmp_path / "grouped", CONFIGS["grouped"])
    expected = uncached(model_of(CONFIGS["grouped"]), GREEDY)
    num_steps = []
    for storage in ("runs", "pages"):
        engine = Engine.load(path, options=cache_of(64, storage))
        assert texts_of(engine, GREEDY) == expected
        num_steps.append(engine.num_steps)
    assert min(num_steps) > 2 * GREEDY.max_new_tokens


def test_end_tokens_and_stop_strings_end_a_text(tmp_path: Path) -> None:
    path = save_plain(tmp_path / "grouped", CONFIGS["grouped"])
    [full] = texts_of(Engine.load(path), GREEDY, [[7]])

    def decode(ids: Any) -> str:
        return "".join(f"<{own}>" for own in ids)

    end = next(token for token in full[3:] if full.count(token) == 1)
    at = full.index(end)
    engine = Engine.load(path, stops=[end], decode=decode)
    [[one]] = engine.generate([[7]], GREEDY)
    assert (one.tokens, one.reason) == (full[:at], "stop")
    assert len(one.logprobs) == at
    across = f"{full[at - 1]}><{end}"  # begins and ends inside of tokens
    [[one]] = Engine.load(path, decode=decode).generate(
        [[7]], Sampling(**{**asdict(GREEDY), "stop": (across,)})
    )
    assert (one.tokens, one.reason) == (full[: at + 1], "stop")
    [[one]] = Engine.load(path).generate([[7]], GREEDY)
    assert (one.tokens, one.reason) == (full, "length")


def test_what_cannot_work_is_refused_at_once(tmp_path: Path, engine: Engine) -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        engine.generate([[1], []], GREEDY)
    with pytest.raises(ConfigError, match="needs the tokenizer"):
        engine.generate([[1]], Sampling(stop=("x",)))
    with pytest.raises(ConfigError, match="1 contexts and 2 continuations"):
        engine.score([[1]], [[1], [2]])
    with pytest.raises(ConfigError, match="has 97 tokens, and the model can score 1 to 96"):
        engine.score([[1]], [[1] * 97])
    path = save_plain(tmp_path / "small", CONFIGS["grouped"])
    small = Engine.load(path, options=EngineOptions(cache_gib=40 * 512 / 2**30))
    with pytest.raises(
        ConfigError, match=r"37 tokens .* needs 60 slots .* has 40\. Raise cache_gib"
    ):
        small.generate(PROMPTS, GREEDY)
    assert texts_of(small, GREEDY, PROMPTS[:2]) == texts_of(engine, GREEDY, PROMPTS[:2])
    for option, value in (("max_tokens", 0), ("cache_gib", 0.0), ("storage", "disk")):
        with pytest.raises(ConfigError, match=f"{option} is"):
            EngineOptions(**{option: value})
    with pytest.raises(ConfigError, match="max_requests is 64 and max_tokens is 8"):
        EngineOptions(max_tokens=8)
    with pytest.raises(ConfigError, match="stop='x' is not a list"):
        Sampling(stop="x")  # type: ignore[arg-type]
