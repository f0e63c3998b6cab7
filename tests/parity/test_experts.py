"""Training of layers of experts equals training on one process, however experts are divided."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions, MoEConfig, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, VPP, fit, tiny_config
from tests.helpers.ranks import run_ranks

STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 8, 16, 30
DATA = "data_parallel"
FSDP = {DATA: "fsdp"}
HYBRID = {"data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2)}
ZERO3 = {"data_parallel_options": DataParallelOptions(reshard_after_forward=True)}
ZERO2 = {"data_parallel_options": DataParallelOptions(reduce_every_microbatch=True)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {EP: 2}),
    "ep2-ddp": (2, {EP: 2, DATA: "ddp"}),
    "tp2-etp1-ep2": (2, {TP: 2, ETP: 1, EP: 2}),
    # Data-parallel ranks of experts differ from those of other parameters, with ep 1.
    "tp2-etp1": (2, {TP: 2, ETP: 1}),
    "etp2": (2, {ETP: 2}),
    "etp2-ddp": (2, {ETP: 2, DATA: "ddp"}),
    "ep2-fsdp": (2, {EP: 2, **FSDP}),
    "tp2": (2, {TP: 2}),
    "cp2-ep2": (2, {CP: 2, EP: 2}),
    "pp2": (2, {PP: 2, MICRO: 2}),
    "ep4": (4, {EP: 4}),
    "ep2-dp2": (4, {EP: 2}),
    "ep2-dp2-ddp": (4, {EP: 2, DATA: "ddp"}),
    "ep2-dp2-fsdp": (4, {EP: 2, **FSDP}),
    "ep2-dp2-hybrid": (4, {EP: 2, **HYBRID}),
    "ep2-dp2-fsdp-hybrid": (4, {EP: 2, **FSDP, **HYBRID}),
    "ep2-tp2-fsdp": (4, {EP: 2, TP: 2, **FSDP}),
    "ep2-etp2-fsdp": (4, {EP: 2, ETP: 2, **FSDP}),
    "etp2-dp2-fsdp": (4, {ETP: 2, **FSDP}),
    "ep2-pp2-fsdp": (4, {EP: 2, PP: 2, MICRO: 2, **FSDP}),
    "tp4-ep2-fsdp": (4, {TP: 4, ETP: 1, EP: 2, **FSDP}),  # only experts have copies
    "cp2-fsdp": (4, {CP: 2, **FSDP}),
    "dp4-fsdp-recompute": (4, {"recompute": RECOMPUTE["uniform"], **FSDP}),
    "ep2-fsdp-selective": (4, {EP: 2, "recompute": RECOMPUTE["selective"], **FSDP}),
    "ep2-zero3": (4, {EP: 2, MICRO: 1, **FSDP, **ZERO3, "recompute": RECOMPUTE["block"]}),
    "ep2-zero2": (4, {EP: 2, MICRO: 1, **FSDP, **ZERO2}),
    "pp2-fsdp-zb-h1": (4, {PP: 2, MICRO: 2, **FSDP, "pipeline_schedule": "zb-h1"}),
    "ep4-dp2-fsdp": (8, {EP: 4, **FSDP}),  # half of an expert on a rank
    "ep2-dp4-fsdp-hybrid": (8, {EP: 2, **FSDP, **HYBRID}),
    "ep2-etp2-dp2-fsdp": (8, {EP: 2, ETP: 2, **FSDP}),
    "ep2-pp2-vpp2-fsdp": (8, {EP: 2, PP: 2, VPP: 2, MICRO: 2, **FSDP}),
    "tp2-pp2-fsdp-zero3": (8, {TP: 2, ETP: 1, PP: 2, MICRO: 2, **FSDP, **ZERO3}),
    "ep2-tp2": (4, {EP: 2, TP: 2}),
    "tp2-pp2": (4, {TP: 2, PP: 2, MICRO: 2}),
    "ep2-etp2": (4, {EP: 2, ETP: 2}),
    "ep2-pp2": (4, {EP: 2, PP: 2, MICRO: 2}),
    "ep2-pp2-vpp2": (4, {EP: 2, PP: 2, VPP: 2, MICRO: 2}),
    "ep2-pp2-zb-h1": (4, {EP: 2, PP: 2, MICRO: 2, "pipeline_schedule": "zb-h1"}),
    "ep2-cp2": (4, {EP: 2, CP: 2}),
    "ep4-cp2-tp2": (4, {EP: 4, CP: 2, TP: 2, ETP: 1}),
    "ep2-recompute": (2, {EP: 2, "recompute": RECOMPUTE["uniform"]}),
    "ep2-tp2-pp2": (8, {EP: 2, TP: 2, PP: 2, MICRO: 2}),
    "ep2-tp2-cp2-dp2": (8, {EP: 2, TP: 2, CP: 2}),
    "ep4-etp2": (8, {EP: 4, ETP: 2, TP: 2}),
}
LOSSES = {"aux_loss_coeff": 0.02, "z_loss_coeff": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": LOSSES,
    "sequence": {
        **LOSSES,
        "router_load_balancing_type": "seq_aux_loss",
        "router_score_function": "sigmoid",
        "router_topk_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 24,
        "shared_expert_gate": True,
        "layer_freq": (0, 1, 0, 1),
    },
    "gather": {**LOSSES, "token_dispatcher_type": "allgather"},
    "biases": LOSSES | {"router_bias": True},
    "latents": LOSSES | {"latent_size": 12, "shared_expert_intermediate_size": 24},
    "one-by-one": {**LOSSES, "grouped_gemm": False},
}
"""Name -> experts and router."""
BLOCKS: dict[str, dict[str, Any]] = {
    "biases": {"add_bias_linear": True, "activation": "gelu", "normalization": "LayerNorm"},
}
"""Name of a model -> its other options."""
SPREAD = {
    "softmax": ["ep2", "etp2", "cp2-ep2", "ep2-tp2", "ep2-pp2", "ep2-dp2-fsdp", "tp4-ep2-fsdp"],
    "sequence": ["tp2-etp1-ep2", "ep2-etp2"],
    "gather": ["ep2"],
    "biases": ["tp2-etp1-ep2", "ep2-etp2"],
    "latents": ["ep2", "tp2-pp2"],
}


def _config(model: str) -> TransformerConfig:
    return tiny_config(
        num_layers=4,
        vocab_size=VOCABULARY,
        ffn_hidden_size=48,
        moe=MoEConfig(num_experts=4, router_topk=2, **MODELS[model]),
        **BLOCKS.get(model, {}),
    )


def _rows(replicas: int, masked: bool) -> Any:
    """Return rows in an order in which the sampler gives each replica consecutive rows of a batch,
    as micro-batches of one process have them.
    """
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS, BATCH, SEQUENCE + 1), generator=generator)
    kept = torch.rand(STEPS, BATCH, SEQUENCE, generator=generator) > 0.4
    text, kept = (
        x.unflatten(1, (replicas, -1)).transpose(1, 2).flatten(0, 2) for x in (text, kept)
    )
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    if masked:
        rows = [{**row, "loss_mask": k.float()} for row, k in zip(rows, kept, strict=True)]
    return rows


def _train(
    model: str, options: dict[str, Any] | None, replicas: int, *, masked: bool = False
) -> Any:
    loader = DataLoader(_rows(replicas, masked), batch_size=BATCH // replicas)
    # AdamW amplifies the last bits of small gradients in the first steps.
    module = GPTLightningModule(_config(model), learning_rate=1e-3)
    run = fit(options, module, loader, loader, steps=STEPS, val_check_interval=STEPS)
    return run.losses, run.norms, run.logged


def _train_all(model: str, cases: list[Any]) -> list[Any]:
    return [_train(model, *case) for case in cases]


@cache
def _one(model: str, microbatches: int = 1) -> Any:
    options = None if microbatches == 1 else {MICRO: BATCH // microbatches}
    return run_ranks(1, _train, model, options, 1)[0]


@pytest.mark.spread(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        *(pytest.param(model, names, id=model) for model, names in SPREAD.items()),
        *(
            pytest.param(model, list(LAYOUTS), id=f"{model}-all", marks=pytest.mark.slow)
            for model in MODELS
        ),
    ],
)
def test_training_equals_one_process(model: str, names: list[str]) -> None:
    """Losses, gradient norms and logged means; fp32, sums in another order: 1e-5."""
    for world in (1, 2, 4, 8):
        chosen = [name for name in names if LAYOUTS[name][0] == world]
        cases = []
        for name in chosen:
            options = LAYOUTS[name][1]
            size = options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1)
            cases.append((options, world // size))
        ranks = run_ranks(world, _train_all, model, cases, timeout_s=380) if cases else []
        for index, name in enumerate(chosen):
            # The balancing loss of a micro-batch is that of its own tokens.
            replicas = cases[index][1]
            pieces = replicas * (BATCH // replicas // cases[index][0].get(MICRO, BATCH // replicas))
            losses, norms, logged = _one(model, pieces)
            for rank in ranks:
                found = rank[index]
                assert found[1] == pytest.approx(norms, rel=1e-5), name
                if replicas == 1:
                    assert found[0] == pytest.approx(losses, rel=1e-5), name
                    assert found[2] == pytest.approx(logged, rel=1e-5), name


@pytest.mark.slow
def test_experts_one_by_one_train_as_all_at_once() -> None:
    for grouped, single in zip(_one("softmax", 4), _one("one-by-one", 4), strict=True):
        assert single == pytest.approx(grouped, rel=1e-5)


@pytest.mark.slow
def test_the_loss_of_a_sequence_does_not_depend_on_micro_batches() -> None:
    """Megatron-LM 5798."""
    expected, found = _one("sequence"), _one("sequence", 4)
    for one, several in zip(expected[:2], found[:2], strict=True):
        assert several == pytest.approx(one, rel=1e-5)
    name = "seq_aux_loss"
    assert found[2][name] == pytest.approx(expected[2][name], rel=1e-5)


def _train_masked(options: dict[str, Any], replicas: int) -> Any:
    return _train("sequence", options, replicas, masked=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cp2-ep2",
        "ep2",
        "ep2-tp2",
        "ep2-pp2",
    ],
)
def test_losses_of_routers_have_the_tokens_of_the_main_loss(name: str) -> None:
    """Labels of 40 % of the tokens are masked, unequally many on each rank: Megatron-LM 1652, 5047.

    As above; losses of replicas are of their own tokens.
    """
    world, options = LAYOUTS[name]
    replicas = world // (options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1))
    pieces = replicas * (BATCH // replicas // options.get(MICRO, BATCH // replicas))
    [(losses, norms, _)] = run_ranks(1, _train_masked, {MICRO: BATCH // pieces}, 1)
    for found, own_norms, _ in run_ranks(world, _train_masked, options, replicas):
        assert own_norms == pytest.approx(norms, rel=1e-5)
        if replicas == 1:
            assert found == pytest.approx(losses, rel=1e-5)
