"""Models with adapters and their training on any layout, and stock ``peft`` on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_lightning.models import GPTModel
from megatron_lightning.models.plans.gpt import llama_hf_plan
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.peft import LoRA, VeRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.hf_weights import from_llama
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

VOCABULARY, STEPS, BATCH = 128, 4, 4
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
_OURS = ["linear_qkv.adapters.q", "linear_qkv.adapters.k", "linear_qkv.adapters.v"]
_OURS += ["linear_proj.adapters.all"]
_OURS += ["linear_fc1.adapters.gate", "linear_fc1.adapters.up", "linear_fc2.adapters.all"]
TOKENS = torch.arange(24).view(2, 12) * 5 % VOCABULARY
TEXT = torch.randint(0, VOCABULARY, (STEPS * BATCH, 17), generator=torch.Generator().manual_seed(1))
CONFIG = tiny_config(
    num_layers=4,
    hidden_size=64,
    num_query_groups=2,
    ffn_hidden_size=96,
    vocab_size=VOCABULARY,
    max_sequence_length=2048,
    layernorm_epsilon=1e-6,
)


def llama(**options: Any) -> Any:
    """Return the frozen base model, the same one each time."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **options}))


def peft_name(name: str) -> str:
    """Return the name that stock ``peft`` gives a parameter of an adapted Llama."""
    own = f"base_model.model.{name}".replace(".adapters.all.", ".")
    own = own.replace(".lora_magnitude.", ".lora_magnitude_vector.")
    if ".vera_" in own:
        return own.replace(".weight", ".default")
    return own.replace(".weight", ".default.weight")


def llama_name(name: str) -> str:
    """Return the name of an adapter's parameter in a Llama, given that in a ``GPTModel``."""
    for ours, theirs in zip(_OURS, PROJECTIONS, strict=True):
        block = "self_attn" if theirs[0] in "qkvo" else "mlp"
        home = "self_attention" if theirs[0] in "qkvo" else "mlp"
        name = name.replace(f"{home}.{ours}", f"{block}.{theirs}.adapters.all")
    return name.replace("decoder.layers", "model.layers")


def fill(model: nn.Module, *, zero: bool) -> nn.Module:
    """Fill B, or b, of an adapted Llama, so that adapters matter from the first step on.
    ``zero``: leave it."""
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if ("lora_B" in name or "vera_lambda_b" in name) and not zero:
            nn.init.normal_(parameter, 0, 0.1, torch.Generator().manual_seed(number))
    return model


def adapted_llama(lora: LoRA | VeRA | None = None, *, zero: bool = False) -> Any:
    """Return a Llama with adapters."""
    return fill((lora or LoRA()).apply(llama()), zero=zero)


def adapted_gpt(lora: LoRA | VeRA | None = None, *, zero: bool = False) -> GPTModel:
    """Return a ``GPTModel`` that computes what :func:`adapted_llama` does."""
    plain = replace(lora or LoRA(), target_modules="all-linear", modules_to_save=())
    theirs = adapted_llama(plain, zero=zero)
    state = theirs.state_dict()
    model = GPTModel(CONFIG)
    model.load_state_dict(from_llama(state, CONFIG))
    (lora or LoRA()).apply(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapters." in name:
                parameter.copy_(state[llama_name(name)])
    return model


def stock(lora: LoRA | VeRA | None = None, *, zero: bool = False, **options: Any) -> Any:
    """Return the same model by stock ``peft``."""
    from peft import LoraConfig, VeraConfig, get_peft_model

    lora = lora or LoRA()
    own_fields = asdict(lora)
    names = ["r", "vera_dropout", "d_initial", "projection_prng_key"]
    if isinstance(lora, LoRA):
        names = ["r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"]
    fields = {name: own_fields[name] for name in names}
    config_class = LoraConfig if isinstance(lora, LoRA) else VeraConfig
    config = config_class(**fields, target_modules=PROJECTIONS, **options)
    model: Any = get_peft_model(llama(), config)
    own = {peft_name(n): p for n, p in adapted_llama(lora, zero=zero).named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "vera_lambda" in name:
                parameter.copy_(own[name].view_as(parameter))
    return model


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "llama": adapted_llama,
    "gpt": adapted_gpt,
    "peft": stock,
}


class Tuned(pl.LightningModule):
    """A model of :data:`MODELS` trained on :data:`TEXT`; it is made in ``configure_model``."""

    sequence_dims: ClassVar[dict[str, int]] = {"tokens": 1, "labels": 1}

    def __init__(self, kind: str, *, optimizer: str = "SGD", **options: Any) -> None:
        super().__init__()
        self.kind = kind
        self.options = options
        self.optimizer = optimizer
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = MODELS[self.kind](**self.options)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        x, y = batch["tokens"], batch["labels"]
        if self.kind == "gpt":
            loss: Tensor = self.model(x, y).mean()
            return loss
        logits = self.model(x).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [{"params": [p for p in self.parameters() if p.requires_grad]}]
        if self.optimizer == "SGD":
            return torch.optim.SGD(trained, lr=0.3)
        return torch.optim.AdamW(trained, lr=1e-2)


def table_with_sequence_shards() -> ShardingPlan:
    """Return the table of a Llama in :class:`Tuned` that shards the sequence."""
    plan = llama_hf_plan(llama().config)
    rows = [
        {key if key.startswith("**") else f"model.{key}": value for key, value in table.items()}
        for table in (plan.modules, plan.attributes)
    ]
    return replace(plan, modules=rows[0], attributes=rows[1])


def train(
    folder: str, kind: str, options: dict[str, Any] | None, data: int = 1, **of_module: Any
) -> tuple[list[float], list[float]]:
    """Train on the ranks of this process's group; return losses and gradient norms, and save
    ``<folder>/<kind>.ckpt``; ``options``: of the strategy, None: plain Lightning."""
    strategy: Any = "auto"
    if options is not None:
        if kind == "llama" and "sequence_parallel" in options:
            options = options | {"sharding_plan": table_with_sequence_shards()}
        strategy = MegatronStrategy(**options)
    record = Losses()
    precision = of_module.pop("precision", "32-true")
    fit = trainer(strategy, max_steps=STEPS, callbacks=[record], precision=precision)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
    module = Tuned(kind, **of_module)
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data))
    if folder:
        fit.save_checkpoint(f"{folder}/{kind}.ckpt")
    return record.losses, record.norms


def check_trained_as_by_peft(kind: str, layout: tuple[int, int, Any], method: Any) -> None:
    """Compare the training of a model on a layout (ranks, replicas, options) with stock ``peft``
    in one process.
    """
    world, data, options = layout
    [(losses, norms)] = run_ranks(1, _train, "peft", None, 1, method)
    ranks = run_ranks(world, _train, kind, options, data, method, timeout_s=110)
    own = [sum(rank[0][step] for rank in ranks) / world for step in range(len(losses))]
    # fp32, sums in another order; SGD does not amplify them.
    assert own == pytest.approx(losses, rel=1e-6)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


def _train(kind: str, options: Any, data: int, method: Any) -> tuple[list[float], list[float]]:
    return train("", kind, options, data, lora=method)


def logits_of(model: Any) -> Tensor:
    """Return the logits of fixed tokens."""
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, Tensor) else out.logits
