"""Multi-token prediction: training on every layout equals one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import (
    ContextOptions,
    LatentAttentionConfig,
    MoEConfig,
    PipelineOptions,
    TransformerConfig,
)
from megatron_lightning.layers import log_reports
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, VPP, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, SEQUENCE, VOCABULARY = 3, 4, 16, 67
FSDP = {"data_parallel": "fsdp"}
ZB, V = {"pipeline_schedule": "zb-h1"}, {"pipeline_schedule": "zbv"}
SIZES = {
    "num_layers": 4,
    "vocab_size": VOCABULARY,
    "max_sequence_length": SEQUENCE,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.7,  # large enough to be seen in a gradient norm
}
EXPERTS = MoEConfig(
    num_experts=4, ffn_hidden_size=24, router_topk=2, aux_loss_coeff=0.1, layer_freq=(0, 1, 1, 1),
    router_load_balancing_type="seq_aux_loss", shared_expert_intermediate_size=16,
)  # fmt: skip
LATENTS = LatentAttentionConfig(
    q_lora_rank=14, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8
)
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "z_loss": 1e-3,
    },
    "experts": {"moe": EXPERTS, "mla": LATENTS, "mtp_num_layers": 1},
}


def _layout(text: str) -> dict[str, Any]:
    return {"pipeline_options": PipelineOptions(pipeline_model_parallel_layout=text)}


def _exchange(kind: Any, **options: Any) -> dict[str, Any]:
    return {"context_options": ContextOptions(cp_comm_type=kind, **options)}


LEVELS = _exchange("a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {MICRO: 1}),
    "tp2": (2, {TP: 2}),
    "tp2-no-sp": (2, {TP: 2, "sequence_parallel": False}),
    "pp2": (2, {PP: 2, MICRO: 1}),
    "pp2-head": (2, {PP: 2, MICRO: 1, **_layout("Et*4mm|L")}),
    "pp2-zb": (2, {PP: 2, MICRO: 1, **ZB}),
    "pp2-zbv": (2, {PP: 2, VPP: 2, MICRO: 1, **V}),
    "pp2-vpp2": (2, {PP: 2, VPP: 2, MICRO: 1}),
    "cp2": (2, {CP: 2}),
    "cp2-gather": (2, {CP: 2, **_exchange("all_gather")}),
    "cp2-a2a": (2, {CP: 2, **_exchange("a2a")}),
    "cp2-dealt": (2, {CP: 2, "context_options": ContextOptions(chunks_per_rank=4)}),
    "zero1": (2, {}),
    "fsdp": (2, FSDP),
    "tp2-uniform": (2, {TP: 2, "recompute": RECOMPUTE["uniform"]}),
    "pp2-block": (2, {PP: 2, MICRO: 1, "recompute": RECOMPUTE["block"]}),
    "cp2-selective": (2, {CP: 2, "recompute": RECOMPUTE["selective"]}),
    "pp4-own": (4, {PP: 4, MICRO: 1, **_layout("Ett|tt|mm|L")}),
    "pp4-before": (4, {PP: 4, MICRO: 1, **_layout("Et|t|ttmm|L")}),
    "pp4-last": (4, {PP: 4, MICRO: 1, **_layout("Et|tt|t|mmL")}),
    "pp2-vpp2-own": (2, {PP: 2, VPP: 2, MICRO: 1, **_layout("Et|tt|tmm|L")}),
    "pp4-zb-own": (4, {PP: 4, MICRO: 1, **_layout("Ett|tt|mm|L"), **ZB}),
    "tp2-pp2": (4, {TP: 2, PP: 2, MICRO: 1}),
    "tp2-pp2-head": (4, {TP: 2, PP: 2, MICRO: 1, **_layout("Et*4mm|L")}),
    "tp2-pp2-zbv": (4, {TP: 2, PP: 2, VPP: 2, MICRO: 1, **V}),
    "pp2-vpp2-dp2": (4, {PP: 2, VPP: 2, MICRO: 1}),
    "pp2-fsdp2": (4, {PP: 2, MICRO: 1, **FSDP}),
    "tp2-cp2": (4, {TP: 2, CP: 2}),
    "cp2-pp2": (4, {CP: 2, PP: 2, MICRO: 1}),
    "cp4-levels": (4, {CP: 4, **LEVELS}),
    "tp2-pp4-own": (8, {TP: 2, PP: 4, MICRO: 1, **_layout("Ett|tt|mm|L")}),
    "tp2-pp2-cp2": (8, {TP: 2, PP: 2, CP: 2, MICRO: 1}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-tp2": (2, {EP: 2, TP: 2, ETP: 1}),
    "ep2-cp2": (2, {EP: 2, CP: 2}),
    "ep2-dp2": (2, {EP: 2}),
    "ep2-fsdp": (2, {EP: 2, **FSDP}),
    "pp2": (2, {PP: 2, MICRO: 1}),
    "ep2-tp2-pp2": (4, {EP: 2, TP: 2, PP: 2, MICRO: 1, ETP: 1, **ZB}),
    "tp2-uniform": (2, {EP: 2, TP: 2, ETP: 1, "recompute": RECOMPUTE["uniform"]}),
}
SPREAD = {"untied": ["tp2", "cp2", "pp4-own"], "tied": ["pp2-vpp2"], "experts": ["ep2-tp2"]}


def _layouts(model: str) -> dict[str, tuple[int, dict[str, Any]]]:
    return EXPERT_LAYOUTS if model == "experts" else LAYOUTS


def _config(model: str, **options: Any) -> TransformerConfig:
    return tiny_config(**{**SIZES, **MODELS[model], **options})


def _rows() -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    return [{"tokens": t[:-1], "labels": t[1:]} for t in text]


def train(
    config: TransformerConfig,
    options: dict[str, Any] | None,
    replicas: int = 1,
    *,
    rows: Any = None,
    callbacks: Sequence[pl.Callback] = (),
    kind: type[GPTLightningModule] = GPTLightningModule,
    steps: int = STEPS,
    start: str | None = None,
    end: str | None = None,
) -> dict[str, Any]:
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=steps, callbacks=[record, *callbacks], limit_val_batches=1)
    # AdamW amplifies the last bits of small gradients in the first steps.
    module = kind(config, learning_rate=1e-3)
    loader: Any = DataLoader(rows or _rows(), batch_size=BATCH // replicas)
    fit.fit(module, loader, loader, ckpt_path=start)
    if end is not None:
        fit.save_checkpoint(end)
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    return {"losses": record.losses, "norms": record.norms, "logged": logged}


def _train_all(model: str, cases: list[Any]) -> list[Any]:
    return [train(_config(model), *case) for case in cases]


@cache
def _one(model: str) -> Any:
    return run_ranks(1, train, _config(model), None)[0]


@pytest.mark.spread(1)
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        *(pytest.param(model, names, id=model) for model, names in SPREAD.items()),
        *(
            pytest.param(model, list(_layouts(model)), id=f"{model}-all", marks=pytest.mark.slow)
            for model in MODELS
        ),
    ],
)
def test_training_equals_one_process(model: str, names: list[str]) -> None:
    """Losses, gradient norms and what is logged; fp32, sums in another order: 1e-5."""
    expected, layouts = _one(model), _layouts(model)
    depths = [f"mtp_{depth}_loss" for depth in range(1, _config(model).num_predicting_layers + 1)]
    assert {"train_loss", "val_loss", "mtp_loss", *depths} <= expected["logged"].keys()
    assert not any(name.startswith("val_mtp") for name in expected["logged"])
    for world in (1, 2, 4, 8):
        chosen = [name for name in names if layouts[name][0] == world]
        cases = []
        for name in chosen:
            options = layouts[name][1]
            size = options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1)
            cases.append((options, world // size))
        ranks = run_ranks(world, _train_all, model, cases, timeout_s=480) if cases else []
        for index, name in enumerate(chosen):
            for rank in ranks:
                found = rank[index]
                assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
                if cases[index][1] == 1:
                    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
                    assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5), name


def _packed_rows() -> Any:
    """Rows of documents, of which a loss mask leaves out some tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = ([5, 1, 10], [16], [8, 8], [1, 2, 3, 4, 5, 1])
    rows = []
    for index, row in enumerate(_rows()):
        own = torch.tensor(lengths[index % len(lengths)])
        ids = torch.repeat_interleave(torch.arange(len(own)), own)
        mask = (torch.rand(SEQUENCE, generator=generator) > 0.2).float()
        rows.append({**row, "document_ids": ids, "loss_mask": mask})
    return rows


def _train_packed(model: str, options: dict[str, Any] | None) -> Any:
    return train(_config(model), options, rows=_packed_rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "one"),
    [
        ("untied", "cp2-dealt", None),
        ("untied", "cp2", None),
        ("tied", "cp2-a2a", None),
        ("tied", "tp2-cp2", None),
        # A mean is over a micro-batch, and documents do not leave equally many labels of each.
        ("untied", "cp2-pp2", {MICRO: 1}),
        ("untied", "pp4-own", {MICRO: 1}),
    ],
)
def test_documents_and_masks_equal_one_process(model: str, layout: str, one: Any) -> None:
    [expected] = run_ranks(1, _train_packed, model, one)
    world, options = LAYOUTS[layout]
    for found in run_ranks(world, _train_packed, model, options):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5)


class _OwnLoss(GPTLightningModule):
    """Computes its loss from logits."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        log_reports(self, loss)
        return loss


def _train_own(options: dict[str, Any] | None) -> Any:
    return train(_config("untied"), options, kind=_OwnLoss)


@pytest.mark.slow
def test_a_step_with_a_loss_of_its_own_trains_the_heads() -> None:
    [expected] = run_ranks(1, _train_own, None)
    assert "mtp_2_loss" in expected["logged"]
    for layout in ("tp2", "pp2-zbv", "pp4-own"):
        world, options = LAYOUTS[layout]
        for found in run_ranks(world, _train_own, options):
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), layout
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), layout
            assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5), layout


# ------------------------------------------------------------------------------------- checkpoints


class _First(pl.Callback):
    """Saves before the first step."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def _resume(model: str, layout: str, steps: int, start: str | None, end: str) -> Any:
    world, options = LAYOUTS[layout]
    strategy = MegatronStrategy(**options)
    replicas = strategy.layout.data_parallel_size(world)
    more = {"callbacks": [_First(f"{end}.first")], "start": start, "end": end}
    return train(_config(model), options, replicas, steps=steps, **more)


def _run(model: str, layout: str, *args: Any) -> Any:
    return run_ranks(LAYOUTS[layout][0], _resume, model, layout, *args, timeout_s=110)


def _tensors(path: Path | str) -> dict[str, Tensor]:
    """Return weights and moments."""
    checkpoint = read_full(str(path))
    [optimizer] = checkpoint["optimizer_states"]
    found = dict(checkpoint["state_dict"])
    for index, values in optimizer["state"].items():
        found |= {f"{index}.{key}": values[key] for key in ("exp_avg", "exp_avg_sq")}
    return found


def _differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "saved_by", "read_by"),
    [
        ("tied", "pp2-head", "tp2"),
        _slow("untied", "tp2-pp4-own", "pp2-fsdp2"),
        _slow("tied", "fsdp", "pp4-own"),
        _slow("untied", "tp2-cp2", "pp2-zbv"),
        _slow("tied", "pp4-own", "one"),
    ],
)
def test_a_layout_reads_the_checkpoint_of_another(
    model: str, saved_by: str, read_by: str, tmp_path: Path
) -> None:
    """What was loaded is saved again before the next step: the same bits. Then norms are compared;
    fp32, sums in another order: 1e-5.
    """
    saved, resumed = tmp_path / "saved", tmp_path / "resumed"
    _run(model, saved_by, 1, None, str(saved))
    found = _run(model, read_by, STEPS, str(saved), str(resumed))
    before = _tensors(saved)
    assert _differing(_tensors(f"{resumed}.first"), before) == []
    assert "model.mtp.layers.1.eh_proj.weight" in before
    assert found[0]["norms"] == pytest.approx(_one(model)["norms"][1:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2-pp4-own", "pp2-fsdp2", "tp2-cp2", "pp2-zbv"])
def test_resuming_is_bit_equal(layout: str, tmp_path: Path) -> None:
    full, saved, resumed = (str(tmp_path / name) for name in ("full", "saved", "resumed"))
    expected = _run("tied", layout, STEPS, None, full)
    _run("tied", layout, 1, None, saved)
    found = _run("tied", layout, STEPS, saved, resumed)
    for rank, whole in enumerate(expected):
        assert found[rank]["losses"] == whole["losses"][1:]
        assert found[rank]["norms"] == whole["norms"][1:]
    assert _differing(_tensors(resumed), _tensors(full)) == []


def _validate(layout: str, path: str) -> dict[str, float]:
    world, options = LAYOUTS[layout]
    replicas = MegatronStrategy(**options).layout.data_parallel_size(world)
    run = trainer(MegatronStrategy(**options), limit_val_batches=1, limit_predict_batches=1)
    module = GPTLightningModule(_config("untied"))
    loader: Any = DataLoader(_rows(), batch_size=BATCH // replicas)
    [found] = run.validate(module, loader, ckpt_path=path, verbose=False)
    predicted = run.predict(module, loader)
    return {**found, "tokens": float(torch.stack(list(predicted or [])).sum())}


@pytest.mark.slow
def test_evaluation_and_prediction_leave_the_heads_out(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    _run("untied", "pp2-vpp2", STEPS, None, path)
    [expected] = run_ranks(1, _validate, "one", path)
    assert expected.keys() == {"val_loss", "tokens"}
    for layout in ("tp2", "cp2", "pp4-own", "pp2-zbv"):
        for found in run_ranks(LAYOUTS[layout][0], _validate, layout, path):
            assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
