"""Trainings with each kernel of attention agree on every layout, and say which one runs.

fp32; kernels sum in other orders. Losses: 1e-6 relative. Norms: 1e-5, as in ``test_layouts``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from megatron_lightning.config import CompileOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE, losses_of, small_gpt
from tests.helpers.layouts import token_rows
from tests.helpers.messages import printed_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.parity.test_compiled import PP, TP, _Graphs

CP = "context_parallel_size"
COMPILED = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
SELECTIVE = {"recompute": RECOMPUTE["selective"]}
LATENT = {
    "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def _train(strategy: dict[str, Any], model: dict[str, Any]) -> Any:
    pl.seed_everything(3, verbose=False)
    graphs = _Graphs()
    module = GPTLightningModule(small_gpt(4, **model), learning_rate=1e-3)
    with printed_lines() as lines:
        results = losses_of(module, MegatronStrategy(**strategy), [graphs])
    said = [line for line in lines if "attention runs" in line]
    return results, said, (graphs.count, graphs.breaks)


def _compare(strategy: dict[str, Any], model: dict[str, Any]) -> list[Any]:
    return [
        _train(strategy, {**model, "attention_backend": backend})
        for backend in ("auto", "flash", "math", "chunked")
    ]


@pytest.mark.parametrize(
    ("world", "strategy", "model"),
    [
        pytest.param(1, SELECTIVE, {}, id="recomputed"),
        pytest.param(1, COMPILED | SELECTIVE, {}, id="compiled, recomputed",
                     marks=pytest.mark.slow),
        pytest.param(2, {TP: 2} | SELECTIVE, {"num_query_groups": 2}, id="tp2",
                     marks=pytest.mark.slow),
        pytest.param(2, {CP: 2}, {"num_query_groups": 2}, id="cp2", marks=pytest.mark.slow),
        pytest.param(2, {CP: 2} | COMPILED, {"window_size": (5, 0)}, id="cp2, window, compiled",
                     marks=pytest.mark.slow),
        pytest.param(2, {PP: 2, "micro_batch_size": 1, "pipeline_schedule": "zb-h1"}, {},
                     id="zb-h1", marks=pytest.mark.slow),
        pytest.param(2, {"data_parallel": "fsdp"}, {"mla": LATENT, "qk_layernorm": True},
                     id="fsdp, latent attention", marks=pytest.mark.slow),
        pytest.param(4, {TP: 2, PP: 2, "micro_batch_size": 1} | COMPILED, {}, id="tp2-pp2",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.timeout(300)
def test_backends_train_alike(world: int, strategy: dict[str, Any], model: dict[str, Any]) -> None:
    for rank, (auto, *named) in enumerate(
        run_ranks(world, _compare, strategy, model, timeout_s=240)
    ):
        (losses, norms, val), _, (num_graphs, breaks) = auto
        assert not breaks
        for backend, ((its_losses, its_norms, its_val), said, graphs) in zip(
            ("flash", "math", "chunked"), named, strict=True
        ):
            assert its_losses == pytest.approx(losses, rel=1e-6)
            assert its_val == pytest.approx(val, rel=1e-6)
            assert its_norms == pytest.approx(norms, rel=1e-5)
            assert graphs == (num_graphs, {})
            assert len(said) == (rank == 0)
            assert all(f"attention_backend={backend}" in line for line in said)


def test_a_trainer_refuses_kernels_before_it_starts() -> None:
    module = GPTLightningModule(small_gpt(2, dropout=0.1, attention_backend="flash"))
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
        losses_of(module, MegatronStrategy(), [])
    flex = GPTLightningModule(small_gpt(2, attention_backend="flex"))
    with pytest.raises(ConfigError, match=r"flex has no backward on a CPU.* auto or flash or math"):
        losses_of(flex, MegatronStrategy(), [])


def _validated(backend: Any) -> tuple[float, list[str]]:
    pl.seed_everything(3, verbose=False)
    module = GPTLightningModule(
        small_gpt(2, attention_backend=backend, window_size=(5, 0), attn_logit_softcapping=5.0)
    )
    loader = DataLoader(token_rows(4, 16, module.config.vocab_size), batch_size=2)
    with printed_lines() as lines:
        [logged] = trainer(MegatronStrategy()).validate(module, loader, verbose=False)
    return logged["val_loss"], [line for line in lines if "attention runs" in line]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_evaluates_on_a_cpu() -> None:
    (expected, _), (found, said) = _validated("math"), _validated("flex")
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(said) == 1 and "by FlexAttention (attention_backend=flex)" in said[0]
