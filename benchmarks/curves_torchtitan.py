"""A curve of the real torchtitan, in one process on a CPU.

    pip install torchtitan==0.2.2        # into an environment of its own, with this package
    python -m benchmarks.curves torchtitan

Model, conversion of weights, loss, optimizer, clipping and schedule are torchtitan's own. Its
Trainer needs a GPU, so that the loop is written here. Two settings follow the contract: norms have
no weight decay, and the warm-up begins with 0 instead of the first fraction of the peak.
"""

from __future__ import annotations

import importlib
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.curves import Contract

_KERNELS = "torchtitan.models.moe.kernels"
"""Of experts: it imports Triton, which CPU builds of torch lack, and a Llama never calls it."""


def _titan(name: str) -> Any:
    sys.modules.setdefault(_KERNELS, MagicMock())
    return importlib.import_module(f"torchtitan.{name}")


def make_model(folder: str, contract: Contract) -> Any:
    """Return torchtitan's Llama with the weights of a folder."""
    llama = _titan("models.llama3")
    width = int(2 * 4 * contract.hidden_size / 3)  # of its feed-forward layer, before the factor
    sizes = llama.TransformerModelArgs(
        dim=contract.hidden_size, n_layers=contract.num_layers, n_heads=contract.num_heads,
        vocab_size=contract.vocab_size, multiple_of=1, norm_eps=1e-6,
        ffn_dim_multiplier=(contract.ffn_hidden_size + 0.5) / width,
        max_seq_len=2 * contract.length,
    )  # fmt: skip
    sizes.rope_scaling_args.original_max_position_embeddings = 2**40  # Llama 3.1's is not used
    model = llama.Transformer(sizes)
    weights = load_file(f"{folder}/model.safetensors")
    model.load_state_dict(llama.Llama3StateDictAdapter(sizes, None).from_hf(weights))
    return model


def optimizer_of(contract: Contract, model: Any) -> tuple[Any, Any]:
    """Return torchtitan's optimizer and its scheduler."""
    settings, schedule = _titan("config"), _titan("components.lr_scheduler")
    one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    beta1, beta2 = contract.betas
    optimizer = _titan("components.optimizer").build_optimizers(
        [model],
        settings.Optimizer(
            lr=contract.peak_lr, beta1=beta1, beta2=beta2, eps=contract.eps,
            weight_decay=contract.weight_decay, implementation="for-loop",
        ),
        _titan("distributed").ParallelDims(**one, world_size=1),
    )  # fmt: skip
    (adamw,) = optimizer.optimizers
    (group,) = adamw.param_groups
    norms = [each for each in group["params"] if each.ndim == 1]
    group["params"] = [each for each in group["params"] if each.ndim > 1]
    adamw.add_param_group({"params": norms, "weight_decay": 0.0})
    theirs = schedule.build_lr_schedulers(
        optimizer,
        settings.LRScheduler(
            warmup_steps=contract.warmup_steps, decay_type="cosine",
            min_lr_factor=contract.min_lr / contract.peak_lr,
        ),
        contract.steps,
    )  # fmt: skip
    factor = theirs.schedulers[0].lr_lambdas[0]
    for each in adamw.param_groups:
        each["lr"] = each["initial_lr"]
    return optimizer, schedule.LRSchedulersContainer(
        optimizer, lambda step: factor(step - (step < contract.warmup_steps))
    )


def train(
    contract: Contract, folder: str, rows: Tensor
) -> tuple[list[float], float, dict[str, str]]:
    """Train; return losses, processor seconds and the version."""
    cross_entropy = _titan("components.loss").cross_entropy_loss
    clip = _titan("distributed.utils").clip_grad_norm_
    begin = time.process_time()
    model = make_model(folder, contract)
    optimizer, scheduler = optimizer_of(contract, model)
    losses = []
    for batch in rows.split(contract.rows):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        clip(model.parameters(), contract.clip)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, time.process_time() - begin, {"torchtitan": version("torchtitan")}
