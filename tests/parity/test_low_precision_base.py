"""Adapters beside a base of 8 or 4 bits train as beside the same base rounded to these bits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from megatron_lightning.layers.adapters.stacked_adapters import is_stack
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.models import TransformerConfig
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.precision import FP8Recipe, dequantize, quantize
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import adapted
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.parity.test_hf_experts import mixtral

TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
MICRO = "micro_batch_size"
STEPS, BATCH, VOCABULARY = 4, 4, 67
TEXT = torch.randint(0, VOCABULARY, (STEPS * BATCH, 17), generator=torch.Generator().manual_seed(1))
ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "tp": (2, 1, {TP: 2}),
    "tp-sp": (2, 1, {TP: 2, "sequence_parallel": True}),
    "pp": (2, 1, {PP: 2, MICRO: 1}),
    "zbv": (2, 1, {PP: 2, "virtual_pipeline_model_parallel_size": 2, MICRO: 1,
                   "pipeline_schedule": "zbv"}),
    "zero1": (2, 2, {}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, MICRO: 2}),
    "tp-fsdp": (4, 2, {TP: 2, "data_parallel": "fsdp"}),
    "ep": (2, 2, {EP: 2}),
    "ep-fsdp": (4, 4, {EP: 2, "data_parallel": "fsdp"}),
    "etp": (2, 1, {TP: 2, "expert_tensor_parallel_size": 2}),
}  # fmt: skip


def llama() -> Any:
    """Return the base model, the same one each time, with rows of whole blocks on two ranks."""
    return adapted.llama(intermediate_size=128, vocab_size=VOCABULARY)


def experts() -> TransformerConfig:
    config: TransformerConfig = mixtral()[1]
    return replace(config, hidden_size=64, ffn_hidden_size=64)


def rounded(weight: Tensor, name: str) -> Tensor:
    """Return a weight, or each matrix of stacked experts, through the public quantizer."""
    if weight.ndim > 2:
        return torch.stack([rounded(matrix, name) for matrix in weight])
    recipe = FP8Recipe(scaling=name)  # type: ignore[arg-type]
    return dequantize(*quantize(weight, recipe), recipe, size=weight.shape[-1])


class _Rounding:
    """Rounds the base before adapters are attached, instead of keeping it in few bits."""

    rounds: str | None = None

    def _adapt(self, model: nn.Module) -> nn.Module:
        for path, layer in model.named_modules() if self.rounds else ():
            is_output = path.endswith(("lm_head", "output_layer", "router"))
            if isinstance(layer, nn.Linear | GroupedLinear) and not is_output:
                layer.weight.data = rounded(layer.weight.detach(), self.rounds)
            for own_name, weight in layer.named_parameters(recurse=False):
                if is_stack(layer, own_name):
                    weight.data = rounded(weight.detach(), self.rounds)
        return super()._adapt(model)  # type: ignore[misc,no-any-return]


class _Model(_Rounding, HuggingFaceModule):
    pass


class _GPT(_Rounding, GPTLightningModule):
    pass


def fit(
    kind: str,
    folder: str,
    options: dict[str, Any] | None,
    base: str,
    *,
    data: int = 1,
    rounds: bool = False,
    precision: str = "32-true",
    steps: int = STEPS,
    load: str | None = None,
    save: str | None = None,
) -> tuple[list[float], list[float]]:
    """Train on the ranks of this process's group; return losses and gradient norms."""
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trained = trainer(strategy, max_steps=steps, callbacks=[record], precision=precision)
    bits: Any = None if rounds else base
    stacks = ("experts.gate_up_proj",) if kind == "adapted-stacks" else ()
    lora = LoRA(r=4, base=bits, use_dora=kind == "dora", target_parameters=stacks)
    of_module: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "peft": lora}
    module: Any
    if kind in ("llama", "dora"):
        module = _Model(f"{folder}/llama", **of_module)
    elif kind.endswith("stacks"):  # experts of an untouched model
        module = _Model(f"{folder}/mixtral", **of_module)
    elif kind == "gpt":
        module = _GPT(init_from_hf=f"{folder}/llama", **of_module)
    else:  # initial weights, on meta under the strategy
        module = _GPT(experts(), **of_module)
    if rounds:
        module.rounds = base
    trained.fit(module, DataLoader(ROWS, batch_size=BATCH // data), ckpt_path=load)
    if save is not None:
        trained.save_checkpoint(save)
    return record.losses, record.norms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    llama().save_pretrained(path / "llama")
    torch.manual_seed(0)
    mixtral({"hidden_size": 64, "intermediate_size": 64})[0].save_pretrained(path / "mixtral")
    return str(path)


@lru_cache(maxsize=16)
def _reference(kind: str, folder: str, base: str) -> tuple[list[float], list[float]]:
    [result] = run_ranks(1, _fit, kind, folder, None, base, {"rounds": True})
    return result


def _fit(*args: Any) -> tuple[list[float], list[float]]:
    *given, options = args
    return fit(*given, **options)


_USUAL = [("llama", "tp", "mxfp8"), ("gpt", "pp", "nvfp4"), ("experts", "ep", "nvfp4")]
_ALL = [
    (kind, layout, base)
    for kind in ("llama", "gpt")
    for layout in LAYOUTS
    for base in ("mxfp8", "nvfp4")
    if layout not in ("ep", "etp", "ep-fsdp")
]
_ALL += [
    ("experts", layout, base)
    for layout in ("one", "ep", "etp", "fsdp", "ep-fsdp", "tp-pp")
    for base in ("mxfp8", "nvfp4")
]
_ALL += [("dora", name, "nvfp4") for name in ("one", "tp", "pp", "zero1", "fsdp", "tp-fsdp")]
_ALL += [
    (kind, layout, base)
    for kind in ("stacks", "adapted-stacks")
    for layout in ("one", "tp", "pp", "ep", "zero1", "fsdp", "ep-fsdp", "tp-pp")
    for base in ("mxfp8", "nvfp4")
]
_ALL += [("llama", layout, "blockwise") for layout in ("one", "pp", "zero1", "fsdp")]


@pytest.mark.parametrize(
    ("kind", "layout", "base"),
    [pytest.param(*case, marks=() if case in _USUAL else pytest.mark.slow) for case in _ALL],
)
def test_losses_are_those_of_a_rounded_base(folder: str, kind: str, layout: str, base: str) -> None:
    losses, norms = _reference(kind, folder, base)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _fit, kind, folder, options, base, {"data": data}, timeout_s=110)
    # fp32, sums in another order.
    for step, loss in enumerate(losses):
        own = sum(rank[0][step] for rank in ranks) / world
        assert own == pytest.approx(loss, rel=1e-6), (step, own, loss)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-5)
