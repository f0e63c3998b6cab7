"""Documents that share rows: each is as if it were alone, on every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import ContextOptions, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.documents import Documents
from megatron_lightning.parallel.sequence import SequencePart
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, MICRO, PP, TP, VPP, fit, tiny_config
from tests.helpers.ranks import run_ranks

STEPS, BATCH, SEQUENCE, VOCABULARY = 3, 4, 16, 30
GATHER = {"context_options": ContextOptions(cp_comm_type="all_gather")}
DEALT = {"context_options": ContextOptions(chunks_per_rank=4)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {CP: 2}),
    "cp2-gather": (2, {CP: 2, **GATHER}),
    "pp2": (2, {PP: 2, MICRO: 1}),
    "tp2": (2, {TP: 2}),
    "cp2-micro": (2, {CP: 2, MICRO: 2}),
    "cp2-a2a": (2, {CP: 2, "context_options": ContextOptions(cp_comm_type="a2a")}),
    "cp4": (4, {CP: 4}),
    "cp2-tp2": (4, {CP: 2, TP: 2}),
    "cp2-tp2-gather": (4, {CP: 2, TP: 2, **GATHER}),
    "cp2-pp2": (4, {CP: 2, PP: 2, MICRO: 1}),
    "cp2-pp2-gather": (4, {CP: 2, PP: 2, MICRO: 1, **GATHER}),
    "cp2-pp2-vpp2": (4, {CP: 2, PP: 2, VPP: 2, MICRO: 1}),
    "cp2-pp2-zb-h1": (4, {CP: 2, PP: 2, MICRO: 1, "pipeline_schedule": "zb-h1"}),
    "cp2-recompute": (2, {CP: 2, "recompute": RECOMPUTE["uniform"]}),
    "cp2-dealt": (2, {CP: 2, MICRO: 1, **DEALT}),
    "cp4-dealt": (4, {CP: 4, MICRO: 1, **DEALT}),
    "cp2-pp2-dealt": (4, {CP: 2, PP: 2, MICRO: 1, **DEALT}),
    "cp2-pp2-vpp2-dealt": (
        4,
        {CP: 2, PP: 2, VPP: 2, MICRO: 1, "recompute": RECOMPUTE["uniform"], **DEALT},
    ),
    "cp2-tp2-pp2": (8, {CP: 2, TP: 2, PP: 2, MICRO: 1}),
}
SPREAD = ["cp2-gather", "cp2-pp2-dealt"]
MODELS: dict[str, dict[str, Any]] = {
    "rope": {"num_query_groups": 2},
    "learned": {"position_embedding_type": "learned_absolute"},
    "window": {"window_size": (3, 0)},
}
LENGTHS = ([5, 1, 10], [16], [8, 8], [1, 2, 3, 4, 5, 1], [15, 1])
"""Of the documents of some rows."""


def _config(model: str = "rope", **more: Any) -> TransformerConfig:
    return tiny_config(num_layers=4, vocab_size=VOCABULARY, **MODELS[model], **more)


def _ids(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _rows() -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    return [
        {"tokens": t[:-1], "labels": t[1:], "document_ids": _ids(LENGTHS[i % len(LENGTHS)])}
        for i, t in enumerate(text)
    ]


def _train(model: str, options: dict[str, Any] | None) -> Any:
    loader = DataLoader(_rows(), batch_size=BATCH)
    # AdamW amplifies the last bits of small gradients in the first steps.
    module = GPTLightningModule(_config(model), learning_rate=1e-3)
    run = fit(options, module, loader, loader, steps=STEPS, val_check_interval=STEPS)
    return run.losses, run.norms, run.logged["val_loss"]


def _train_all(model: str, cases: list[dict[str, Any]]) -> list[Any]:
    return [_train(model, options) for options in cases]


@cache
def _one(model: str) -> Any:
    return run_ranks(1, _train, model, None)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param("rope", SPREAD, id="rope", marks=pytest.mark.slow),
        pytest.param("learned", ["cp2"], id="learned"),
        *(pytest.param(m, list(LAYOUTS), id=f"{m}-all", marks=pytest.mark.slow) for m in MODELS),
    ],
)
def test_training_equals_one_process(model: str, names: list[str]) -> None:
    """Losses, gradient norms and validation; fp32, sums in another order: 1e-5."""
    losses, norms, value = _one(model)
    for world in (2, 4, 8):
        chosen = [name for name in names if LAYOUTS[name][0] == world]
        cases = [LAYOUTS[name][1] for name in chosen]
        ranks = run_ranks(world, _train_all, model, cases, timeout_s=280) if cases else []
        for index, name in enumerate(chosen):
            for rank in ranks:
                assert rank[index][0] == pytest.approx(losses, rel=1e-5), name
                assert rank[index][1] == pytest.approx(norms, rel=1e-5), name
                assert rank[index][2] == pytest.approx(value, rel=1e-5), name


def _train_part(options: dict[str, Any], path: str, steps: int, resumes: bool) -> list[float]:
    module = GPTLightningModule(_config(), learning_rate=1e-3)
    loader = DataLoader(_rows(), batch_size=BATCH)
    run = fit(options, module, loader, steps=steps, ckpt_path=path if resumes else None)
    if not resumes:
        run.trainer.save_checkpoint(path)
    return run.losses


@pytest.mark.slow
def test_a_checkpoint_of_dealt_rows_goes_on_in_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "dealt")
    dealt = run_ranks(4, _train_part, LAYOUTS["cp4-dealt"][1], path, STEPS - 1, False)[0]
    rest = run_ranks(1, _train_part, {}, path, STEPS, True)[0]
    assert [*dealt, *rest] == pytest.approx(_one("rope")[0], rel=1e-5)


class _Watching(GPTLightningModule):
    """Keeps the tokens that its steps get."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tokens.append(batch["tokens"].clone())
        return super().training_step(batch, batch_idx)


class _OwnModel(GPTLightningModule):
    """Builds a model with code of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.decoder.final_layernorm = _Norm()


class _Norm(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _watched(cp: int) -> Any:
    module = _Watching(_config())
    module.tokens = []
    loader = DataLoader(_rows(), batch_size=BATCH)
    run = fit({CP: cp, MICRO: 1, **DEALT}, module, loader, steps=1)
    with pytest.raises(ConfigError, match=r"code of others \(decoder.final_layernorm"):
        fit({CP: cp, **DEALT}, _OwnModel(_config()), loader, steps=1)
    return run.trainer.strategy.context.cp.rank, [tokens[0].tolist() for tokens in module.tokens]


def test_ranks_hold_the_chunks_of_each_micro_batch() -> None:
    for rank, found in run_ranks(2, _watched, 2):
        for row, tokens in zip(_rows(), found[-BATCH:], strict=False):
            documents = Documents.of_ids(row["document_ids"][None])
            deal = None if documents.are_full_rows else documents.dealt(2, [4])
            assert tokens == SequencePart(rank, 2, deal).split(row["tokens"], 0).tolist()


@pytest.mark.spread(1)
@pytest.mark.parametrize("model", MODELS)
def test_documents_are_as_if_alone(model: str) -> None:
    """Logits and gradients of one process; fp32: 1e-5 of the largest."""
    net = GPTModel(_config(model))
    tokens = torch.stack([row["tokens"] for row in _rows()[: len(LENGTHS)]])
    ids = torch.stack([_ids(lengths) for lengths in LENGTHS])
    packed = net(tokens, document_ids=ids)
    alone = torch.stack(
        [
            torch.cat([net(document[None])[0] for document in row.split(lengths)])
            for row, lengths in zip(tokens, LENGTHS, strict=True)
        ]
    )
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(0))
    grads = [
        torch.autograd.grad((out * weights).sum(), net.parameters()) for out in (packed, alone)
    ]
    assert torch.allclose(packed, alone, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def _llama(config: TransformerConfig, ours: GPTModel) -> Any:
    """Return the model of ``transformers`` with the same weights."""
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.query_groups,
            rms_norm_eps=config.layernorm_epsilon,
            use_cache=False,  # with a cache it lets them see each other
        )
    )
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": ours.embedding.word_embeddings.weight,
        "model.norm.weight": ours.decoder.final_layernorm.weight,
        "lm_head.weight": ours.output_layer.weight,
    }
    for number, layer in ours.decoder.layers.items():
        at = f"model.layers.{number}"
        rows = layer.self_attention.linear_qkv.weight.unflatten(
            0, (config.query_groups, -1, config.head_dim)
        )
        q, k, v = rows.split([config.heads_per_group, 1, 1], 1)
        gate, up = layer.mlp.linear_fc1.weight.chunk(2)
        state |= {
            f"{at}.self_attn.q_proj.weight": q.flatten(0, 2),
            f"{at}.self_attn.k_proj.weight": k.flatten(0, 2),
            f"{at}.self_attn.v_proj.weight": v.flatten(0, 2),
            f"{at}.self_attn.o_proj.weight": layer.self_attention.linear_proj.weight,
            f"{at}.mlp.gate_proj.weight": gate,
            f"{at}.mlp.up_proj.weight": up,
            f"{at}.mlp.down_proj.weight": layer.mlp.linear_fc2.weight,
            f"{at}.input_layernorm.weight": layer.input_layernorm.weight,
            f"{at}.post_attention_layernorm.weight": layer.pre_mlp_layernorm.weight,
        }
    llama.load_state_dict(state)
    return llama


def test_transformers_part_documents_by_the_same_positions() -> None:
    """fp32, other kernels: 1e-5."""
    config = _config()
    ours = GPTModel(config)
    tokens = torch.stack([row["tokens"] for row in _rows()[: len(LENGTHS)]])
    ids = torch.stack([_ids(lengths) for lengths in LENGTHS])
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS]
    )
    theirs = _llama(config, ours)(tokens, position_ids=positions).logits
    assert torch.allclose(ours(tokens, document_ids=ids), theirs, rtol=1e-5, atol=1e-5)
    apart = F.cross_entropy(ours(tokens).flatten(0, 1), tokens.flatten())
    assert not torch.allclose(apart, F.cross_entropy(theirs.flatten(0, 1), tokens.flatten()))


def test_positions_that_run_on_are_the_callers() -> None:
    """Megatron's reset_attention_mask without reset_position_ids."""
    net = GPTModel(_config("learned"))
    tokens, ids = _rows()[0]["tokens"][None], _ids(LENGTHS[0])[None]
    going_on = net(tokens, position_ids=torch.arange(SEQUENCE)[None], document_ids=ids)
    first = slice(0, LENGTHS[0][0])
    assert torch.allclose(going_on[0, first], net(tokens[:, first])[0], atol=1e-5)
    assert not torch.allclose(going_on, net(tokens, document_ids=ids), atol=1e-3)


def test_attention_dropout_is_refused() -> None:
    net = GPTModel(_config(attention_dropout=0.1))
    tokens, ids = _rows()[0]["tokens"][None], _ids(LENGTHS[0])[None]
    with pytest.raises(ConfigError, match=r"=0.1 cannot be combined with documents that"):
        net(tokens, document_ids=ids)
    net.eval()(tokens, document_ids=ids)
