"""Curves of a thousand steps: layouts beside one process, and ``transformers``' Trainer beside us.

    python -m benchmarks.curves                  # every curve that results/curves lacks
    python -m benchmarks.curves one tp2-sp       # these
    python -m benchmarks.curves --again one      # a kept curve once more: bounds hold for both runs
    python -m benchmarks.curves --write          # CSV, SVG, and the tables of docs/convergence.md

The contract comes first: :class:`Contract` says what every curve has in common, and a record of
another contract counts as missing. A cut costs the curve that was running.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import curves_megatron, curves_torchtitan, curves_tuning, machine
from benchmarks.curves_trainers import silence, train_with_transformers, train_with_trl
from benchmarks.ranks import run
from benchmarks.small_runs import num_ranks, one_epoch
from megatron_lightning.cards.header import read_record
from megatron_lightning.modules import GPTLightningModule

FOLDER = machine.RESULTS / "curves"
_LIMIT_S = 7200.0


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Settings shared by all curves."""

    steps: int = 1000
    rows: int = 8
    """Sequences of a step, over all ranks."""
    length: int = 64
    """Tokens of a sequence."""
    vocab_size: int = 1024
    successors: int = 8
    """Tokens that may follow a token, with fixed probabilities: a Markov chain of order 1."""
    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 512
    num_heads: int = 4
    peak_lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    """Step n (from 0) of the warm-up has n / warmup_steps of the peak; a cosine follows, to min_lr
    at the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices, the embedding's too; 0 of norms."""
    clip: float = 1.0
    """Of the norm of all gradients together."""
    dropout: float = 0.0
    seed: int = 0
    """Of weights, data and order. Rows are read in order, once."""


@dataclass(frozen=True)
class Plan:
    """A curve."""

    about: str
    ranks: int = 1
    strategy: Mapping[str, Any] | None = None
    """Options of MegatronStrategy. None: plain Lightning, or another trainer."""
    beside: str | None = "one"
    """The curve that it is compared with. None: it is such a curve."""
    precision: str = "32-true"
    experts: int = 0
    """Experts of a layer, each half as wide as the dense layer; two see a token. 0: Llama."""
    tuning: str = ""
    """``lora`` or ``full``: fine-tuning of rows with prompts, in 300 steps."""
    rounding: float = 0.0
    """Relative size of random changes of the first weights."""
    then: str | None = None
    """Curve whose layout goes on from the middle, after a checkpoint and a restart."""


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
PLANS: Mapping[str, Plan] = MappingProxyType({
    "one": Plan("plain Lightning, one process", beside=None),
    "zero1": Plan("two data-parallel ranks, zero1", 2, {"data_parallel": "zero1"}),
    "tp2-sp": Plan("tensor parallelism with sequence parallelism", 2, {TP: 2}),
    "transformers": Plan("transformers' Trainer and Llama, one process"),
    "rounded": Plan("one process; weights changed by a rounding of 1e-7", rounding=1e-7),
    "restart": Plan("zero1, saved in the middle, resumed on tp2-sp", 2, {"data_parallel": "zero1"},
                    then="tp2-sp"),
    "fsdp": Plan("two data-parallel ranks, fsdp", 2, {"data_parallel": "fsdp"}),
    "cp2": Plan("two ranks share each sequence", 2, {"context_parallel_size": 2}),
    "pp2-vpp2": Plan("two stages on each of two ranks", 2, {
        PP: 2, "virtual_pipeline_model_parallel_size": 2, "micro_batch_size": 2,
    }),
    "tp2-pp2": Plan("tensor and pipeline parallelism", 4, {TP: 2, PP: 2, "micro_batch_size": 2}),
    "one-bf16": Plan("plain Lightning, one process, bf16-mixed", beside=None,
                     precision="bf16-mixed"),
    "tp2-sp-bf16": Plan("tensor parallelism, bf16-mixed", 2, {TP: 2}, beside="one-bf16",
                        precision="bf16-mixed"),
    "one-experts": Plan("plain Lightning, one process, Mixtral's experts", beside=None, experts=4),
    "ep2": Plan("two data-parallel ranks share the experts", 2,
                {"data_parallel": "zero1", "expert_model_parallel_size": 2},
                beside="one-experts", experts=4),
    "rounded-experts": Plan("one process, experts; weights changed by a rounding of 1e-7",
                            beside="one-experts", experts=4, rounding=1e-7),
    "megatron": Plan("Megatron-Core's model, optimizer and schedule, one process"),
    "torchtitan": Plan("torchtitan's Llama, optimizer and schedule, one process"),
    "trl-lora": Plan("TRL's SFTTrainer and peft's LoRA, one process", beside=None, tuning="lora"),
    "lora-tp2": Plan("LoRA of an untouched Llama, tensor parallelism", 2, {TP: 2},
                     beside="trl-lora", tuning="lora"),
    "trl-full": Plan("TRL's SFTTrainer, all weights, one process", beside=None, tuning="full"),
    "full-zero1": Plan("all weights, two data-parallel ranks, zero1", 2,
                       {"data_parallel": "zero1"}, beside="trl-full", tuning="full"),
})  # fmt: skip
"""Name -> curve, the most telling first."""


# --------------------------------------------------------------------------------- model and data


def token_rows(contract: Contract) -> Tensor:
    """Return the tokens of all steps, [steps * rows, length + 1], of a Markov chain."""
    generator = torch.Generator().manual_seed(contract.seed)
    vocabulary, width = contract.vocab_size, contract.successors
    follows = torch.randint(vocabulary, (vocabulary, width), generator=generator)
    chances = torch.rand(vocabulary, width, generator=generator) ** 2 + 0.01
    tokens = torch.randint(vocabulary, (contract.steps * contract.rows, 1), generator=generator)
    for _ in range(contract.length):
        last = tokens[:, -1]
        choice = torch.multinomial(chances[last], 1, generator=generator)
        tokens = torch.cat([tokens, follows[last].gather(1, choice)], dim=1)
    return tokens


def make_folder(contract: Contract, path: Path, experts: int = 0) -> None:
    """Write the Llama, or the Mixtral, that curves begin with."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    torch.manual_seed(contract.seed)
    sizes: dict[str, Any] = {
        "vocab_size": contract.vocab_size, "hidden_size": contract.hidden_size,
        "num_hidden_layers": contract.num_layers, "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_heads, "attention_dropout": contract.dropout,
        "max_position_embeddings": 2 * contract.length, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = (
        MixtralConfig(
            **sizes, intermediate_size=contract.ffn_hidden_size // 2, num_local_experts=experts,
            num_experts_per_tok=2, router_aux_loss_coef=0.0, sliding_window=None,
        )
        if experts
        else LlamaConfig(**sizes, intermediate_size=contract.ffn_hidden_size)
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


class _Module(GPTLightningModule):
    """GPTModel with the folder's weights, changed by a rounding."""

    rounding = 0.0

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new and self.rounding:
            noise = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(
                        1 + self.rounding * torch.randn(parameter.shape, generator=noise)
                    )


class _Losses(pl.Callback):
    """Collects the loss of every step, of all ranks together."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


# ------------------------------------------------------------------------------------------- runs


def train(
    contract: Contract, plan: Plan, folder: str, steps: range, checkpoint: str | None
) -> tuple[list[float], float]:
    """Train on this process's ranks; return the losses of ``steps`` and the processor seconds.

    Args:
        contract: See :class:`Contract`.
        plan: The curve.
        folder: The first weights.
        steps: Those of this run.
        checkpoint: Read if the steps begin later, else written if they end earlier.
    """
    silence()
    losses, begin = _Losses(), time.process_time()
    settings: dict[str, Any] = {
        "learning_rate": contract.peak_lr, "min_learning_rate": contract.min_lr,
        "warmup_steps": contract.warmup_steps, "decay_steps": contract.steps,
        "weight_decay": contract.weight_decay, "betas": contract.betas, "eps": contract.eps,
    }  # fmt: skip
    if plan.tuning:
        module = curves_tuning.module_of(plan, folder, settings)
    else:
        module = _Module(init_from_hf=folder, **settings)
        module.rounding = plan.rounding
    trainer = one_epoch(
        plan.strategy, losses, max_steps=steps.stop, precision=plan.precision,
        gradient_clip_val=contract.clip, num_sanity_val_steps=0,
    )  # fmt: skip
    replicas = num_ranks() if "data_parallel" in (plan.strategy or {}) else 1
    tokens = token_rows(contract)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    loader = DataLoader(rows, contract.rows // replicas)
    if plan.tuning:
        loader = curves_tuning.loader_of(tokens, replicas, contract.rows)
    trainer.fit(module, loader, ckpt_path=checkpoint if steps.start else None)
    if checkpoint is not None and steps.stop < contract.steps:
        trainer.save_checkpoint(checkpoint)
    return losses.values, time.process_time() - begin


def measure(name: str, contract: Contract) -> dict[str, Any]:
    """Return the record of a curve."""
    plan, header = PLANS[name], machine.describe(f"python -m benchmarks.curves {name}")
    contract = contract_of(plan, contract)
    with tempfile.TemporaryDirectory() as work:
        folder, checkpoint = f"{work}/llama", f"{work}/middle"
        make_folder(contract, Path(folder), plan.experts)
        parts: list[list[tuple[list[float], float]]] = []
        if plan.tuning == "lora":
            curves_tuning.make_adapter(folder, contract.seed)
        if peer := _peer(name, plan):
            trained = run(1, peer, contract, folder, token_rows(contract), limit_s=_LIMIT_S)
            header["versions"] |= trained[0][2]
            parts.append([trained[0][:2]])
        else:
            middle = contract.steps // 2 if plan.then else contract.steps
            stops = [(plan, range(middle))]
            if plan.then:
                stops.append((PLANS[plan.then], range(middle, contract.steps)))
            for each, steps in stops:
                arguments = (contract, each, folder, steps, checkpoint)
                parts.append(run(each.ranks, train, *arguments, limit_s=_LIMIT_S))
    losses = [loss for ranks in parts for loss in ranks[0][0]]
    if len(losses) != contract.steps or not all(map(math.isfinite, losses)):
        raise ValueError(f"{name} has {len(losses)} losses of {contract.steps}, or NaN among them.")
    seconds = sum(each for ranks in parts for _, each in ranks)
    return {
        "header": header, "curve": name, "contract": _plain(contract),
        "processor_seconds": round(seconds, 1), "losses": losses,
    }  # fmt: skip


def _peer(name: str, plan: Plan) -> Callable[..., Any] | None:
    """Return the function that trains a curve of another trainer."""
    if name == "transformers":
        return train_with_transformers
    if name == "megatron":
        return curves_megatron.train
    if name == "torchtitan":
        return curves_torchtitan.train
    return partial(train_with_trl, plan) if name.startswith("trl") else None


def kept(contract: Contract, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return the records of this contract, by name, in the order of :data:`PLANS`."""
    records = {path.stem: read_record(path) for path in folder.glob("*.json")}
    return {
        name: records[name]
        for name in PLANS
        if name in records
        and records[name]["contract"] == _plain(contract_of(PLANS[name], contract))
    }


def contract_of(plan: Plan, contract: Contract) -> Contract:
    """Return the contract of a curve: fine-tuning has 300 steps of 1,000, and LoRA ten times the
    learning rate.
    """
    if not plan.tuning:
        return contract
    steps, warmup = max(2, contract.steps * 3 // 10), max(1, contract.warmup_steps * 3 // 10)
    rate = contract.peak_lr * (10 if plan.tuning == "lora" else 1)
    return replace(contract, steps=steps, warmup_steps=warmup, peak_lr=rate)


def _plain(contract: Contract) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(contract)))
    return plain


def main(
    arguments: Sequence[str] | None = None,
    contract: Contract = Contract(),
) -> int:
    """Run the missing curves. Return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("curves", nargs="*", help=f"of {', '.join(PLANS)}; default: all")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--again", action="store_true", help="run kept curves once more")
    parser.add_argument("--write", action="store_true", help="CSV, SVG and page; nothing is run")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.curves if name not in PLANS]
    if unknown:
        parser.error(f"there is no curve {unknown[0]!r}; the curves are {', '.join(PLANS)}.")
    if options.write:
        from benchmarks.curves_page import write_all

        write_all(options.results, contract)
        return 0
    failed = 0
    for name in options.curves or PLANS:
        before = kept(contract, options.results).get(name)
        if before is not None and ("again" in before or not options.again):
            print(f"{name}: measured before", flush=True)
            continue
        try:
            record = measure(name, contract)
        except (RuntimeError, ValueError) as error:
            failed = 1
            print(f"{name}: failed: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        if before is not None:
            again = {key: record[key] for key in ("header", "losses", "processor_seconds")}
            record = {**before, "again": again}
        options.results.mkdir(parents=True, exist_ok=True)
        part = options.results / f"{name}.part"
        part.write_text(json.dumps(record) + "\n")
        part.replace(options.results / f"{name}.json")
        print(f"{name}: {record['losses'][-1]:.4f}, {record['processor_seconds']} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
