"""Untouched models of ``transformers`` on ranks that share each sequence, against one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import SINGLE, Layout, layouts, make_layout, run, single

CP2 = make_layout("cp2", 2, 1, context_parallel_size=2)
CP4 = make_layout("cp4", 4, 1, context_parallel_size=4)
CP2_GATHER = make_layout(
    "cp2-all-gather",
    2,
    1,
    context_parallel_size=2,
    context_options=ContextOptions(cp_comm_type="all_gather"),
)
DEALT = {"context_options": ContextOptions(chunks_per_rank=4)}
CP2_DEALT = make_layout("cp2-dealt", 2, 1, context_parallel_size=2, micro_batch_size=1, **DEALT)
CP2_A2A = make_layout(
    "cp2-a2a", 2, 1, context_parallel_size=2, context_options=ContextOptions(cp_comm_type="a2a")
)
CP2_TP2 = make_layout("cp2-tp2", 4, 1, context_parallel_size=2, tensor_model_parallel_size=2)
CP2_PP2 = make_layout(
    "cp2-pp2",
    4,
    1,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
)
CP2_DP2 = make_layout("cp2-dp2", 4, 2, context_parallel_size=2)
CP2_FSDP = make_layout("cp2-fsdp", 4, 2, context_parallel_size=2, data_parallel="fsdp")
EP: dict[str, Any] = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CP2_EP2 = make_layout("cp2-ep2", 2, 1, context_parallel_size=2, **EP)
CP2_TP2_EP2 = make_layout(
    "cp2-tp2-ep2", 4, 1, context_parallel_size=2, tensor_model_parallel_size=2, **EP
)
CP2_TP2_PP2 = make_layout(
    "cp2-tp2-pp2",
    8,
    1,
    context_parallel_size=2,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
)

LENGTH, VOCABULARY, BATCH = 16, 32, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "use_cache": False,
}
PACKED = ([7, 9], [16], [3, 1, 12], [8, 8])
"""Lengths of the documents of some rows."""


def _llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def _mistral() -> nn.Module:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=5)
    )


def _scaled() -> nn.Module:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    }
    return _llama(rope_parameters=scaling)


def _deepseek() -> nn.Module:
    """Value heads are smaller than query and key heads."""
    latents = {"q_lora_rank": 12, "kv_lora_rank": 10, "num_mtp_layers": 0}
    heads = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4},
            **latents,
            **heads,
            **experts,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        )
    )


class Module(pl.LightningModule):
    """Computes the loss from the logits."""

    sequence_dims: ClassVar[Any] = {"input_ids": 1, "targets": 1, "position_ids": 1}

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()
        self.losses: list[float] = []

    def _logits(self, batch: Any) -> Tensor:
        given = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        return self.model(**given).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self._logits(batch).flatten(0, 1), batch["targets"].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self._logits(batch).flatten(0, 1), batch["targets"].flatten())
        self.log("val", loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self._logits(batch)
        return {"best": logits.argmax(-1), "logits": logits, "rows": batch["row"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnLoss(Module):
    """Lets the model compute the loss, from targets that are shifted already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = batch["targets"]
        return self.model(batch["input_ids"], labels=targets, shift_labels=targets).loss


class ShiftsInside(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"], labels=batch["input_ids"]).loss


class Packed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positions = torch.arange(LENGTH // 2).expand_as(batch["input_ids"])
        logits = self.model(batch["input_ids"], position_ids=positions).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Ones(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        positions = torch.arange(LENGTH // 2).expand_as(ids)
        logits = self.model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Hides(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, -1] = 0
        logits = self.model(batch["input_ids"], attention_mask=mask).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _loader(data: int, packed: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=generator)
    rows = []
    for index, row in enumerate(tokens):
        sample = {"input_ids": row[:-1], "targets": row[1:], "row": torch.tensor([index])}
        if packed:
            lengths = PACKED[index % len(PACKED)]
            sample["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        rows.append(sample)
    return DataLoader(rows, batch_size=BATCH // data)


def _fit(
    layout: Layout,
    folder: str,
    make: Callable[[], nn.Module],
    kind: type[Module] = Module,
    packed: bool = False,
) -> Any:
    module = kind(make)
    fit = layout.trainer(folder, max_epochs=3)
    fit.fit(module, _loader(layout.data, packed), _loader(layout.data, packed))
    return module.losses, float(fit.callback_metrics["val"])


def _attends_sharply(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, 3 * query, *args, **kwargs)


def _own_attention() -> nn.Module:
    """Its attention function is not softmax attention of the scores."""
    transformers.AttentionInterface.register("sharp", _attends_sharply)
    return _llama(attn_implementation="sharp")


MODELS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral, window": _mistral,
    "llama 3": _scaled,
    "deepseek": _deepseek,
    "llama, own attention": _own_attention,
}


@layouts(CP2, slow=[CP2_TP2, CP2_PP2, CP4, CP2_GATHER, CP2_A2A, CP2_DP2, CP2_FSDP, CP2_TP2_PP2])
def test_llama_trains_as_in_one_process(layout: Layout, tmp_path: Path) -> None:
    """Losses of six steps and of validation; fp32 on other partial sums: 1e-5."""
    losses, value = single(_fit, _llama)
    ranks = run(layout, _fit, tmp_path, _llama)
    steps = [
        sum(of_step) / len(ranks) for of_step in zip(*(rank[0] for rank in ranks), strict=True)
    ]
    assert steps == pytest.approx(losses, rel=1e-5)  # a data-parallel rank has its own
    assert [rank[1] for rank in ranks] == pytest.approx([value] * len(ranks), rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "mistral, window" else pytest.mark.slow)
        for name in MODELS
        if name != "llama"
    ],
)
@layouts(CP2, slow=[CP2_TP2, CP2_PP2, CP2_GATHER])
def test_other_families_do(layout: Layout, name: str, tmp_path: Path) -> None:
    losses, value = single(_fit, MODELS[name])
    for rank in run(layout, _fit, tmp_path, MODELS[name]):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


@layouts(slow=[CP2_EP2, CP2_TP2_EP2])
def test_experts_are_divided_by_the_model_s_own_plan(layout: Layout, tmp_path: Path) -> None:
    losses, value = single(_fit, _deepseek)
    for rank in run(layout, _fit, tmp_path, _deepseek):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
@layouts(CP2_DEALT, CP2, CP4, CP2_TP2, CP2_PP2, CP2_GATHER, CP2_A2A)
def test_packed_positions_part_documents(layout: Layout, tmp_path: Path) -> None:
    """As ``transformers`` parts them, with a mask, in one process."""
    losses, value = single(_fit, _llama, Module, True)
    plain, _ = single(_fit, _llama)
    assert losses != pytest.approx(plain, rel=1e-3)
    for rank in run(layout, _fit, tmp_path, _llama, Module, True):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        assert rank[1] == pytest.approx(value, rel=1e-5)


def test_the_models_own_loss_of_shifted_labels(tmp_path: Path) -> None:
    losses, _ = single(_fit, _llama)
    for rank in run(CP2, _fit, tmp_path, _llama, OwnLoss):
        assert rank[0] == pytest.approx(losses, rel=1e-5)


def _predict(
    layout: Layout, folder: str, make: Callable[[], nn.Module], packed: bool = False
) -> Any:
    outputs = layout.trainer(folder).predict(Module(make), _loader(layout.data, packed))
    return {key: torch.cat([out[key] for out in outputs]) for key in outputs[0]}


@layouts(CP2, slow=[CP4, CP2_TP2, CP2_A2A, CP2_PP2])
def test_predictions_are_full_sequences_in_order(layout: Layout, tmp_path: Path) -> None:
    expected = single(_predict, _llama)
    for rank in run(layout, _predict, tmp_path, _llama):
        assert rank["logits"] == pytest.approx(expected["logits"], rel=1e-4, abs=1e-5)
        assert torch.equal(rank["best"], expected["best"])
        assert torch.equal(rank["rows"], expected["rows"])


def _classifier() -> nn.Module:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))


def _drops() -> nn.Module:
    return _llama(attention_dropout=0.1)


def _dynamic() -> nn.Module:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return _llama(rope_parameters=scaling)


def _double() -> nn.Module:
    return transformers.GPT2DoubleHeadsModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)
    )


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def _caches() -> nn.Module:
    return _llama(use_cache=True)


CASES: dict[str, tuple[type[Module], Callable[[], nn.Module], str]] = {
    "labels": (ShiftsInside, _llama, "LlamaForCausalLM was given labels, which it shifts within"),
    "cache": (Packed, _caches, "position_ids of LlamaForCausalLM start again .* use_cache is on"),
    "dynamic": (Module, _dynamic, "rope_parameters of the type 'dynamic'"),
    "summary": (Module, _double, "GPT2DoubleHeadsModel is not known"),
    "router": (Module, _mixtral, "was asked for router logits"),
    "ones": (Ones, _llama, "start again within a row, and there is an attention_mask"),
    "mask": (Hides, _llama, "attention_mask hides positions"),
    "task": (Module, _classifier, "LlamaForSequenceClassification is not known"),
    "dropout": (Module, _drops, r"attention_dropout=0.1 cannot be combined"),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    kind, make, _ = CASES[case]
    try:
        layout.trainer(folder, max_epochs=1).fit(kind(make), _loader(1))
    except MegatronLightningError as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:
        return f"peer: {error}"
    return None


@pytest.mark.spread(3)
@pytest.mark.parametrize("case", CASES)
def test_what_would_be_wrong_is_refused(case: str, tmp_path: Path) -> None:
    errors = run(CP2, _refused, tmp_path, case)
    said = [error for error in errors if error and not error.startswith("peer: ")]
    assert None not in errors and said, errors
    for error in said:
        assert re.search(CASES[case][2], error, re.DOTALL), error


def test_one_process_needs_none_of_it(tmp_path: Path) -> None:
    """The plain run keeps the model's own attention."""
    assert run(SINGLE, _implementation, tmp_path)[0] == "sdpa"


def _implementation(layout: Layout, folder: str) -> str:
    module = Module(_llama)
    layout.trainer(folder, max_epochs=1).fit(module, _loader(1))
    return str(module.model.config._attn_implementation)
