"""Untouched ``transformers`` models train under tensor parallelism as under plain Lightning: by
their own plan, or by a short table of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", "5")

import transformers

from megatron_lightning.checkpoint import consolidate
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.hf_models import Loaded, Untouched
from tests.helpers.layouts import fit
from tests.helpers.messages import printed_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

_KEY_BIASES = ("k_proj.bias", "key.bias")


def _train(
    folder: str, name: str, optimizer: str, options: dict[str, Any] | None
) -> tuple[list[float], list[float]]:
    """Return the loss and the gradient norm of every step."""
    run = fit(options, Untouched(name, optimizer), hf_models.loader(name), max_epochs=1)
    run.trainer.save_checkpoint(f"{folder}/{'one' if options is None else 'parts'}.ckpt")
    return run.losses, run.norms


def _weights(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return weights


def _check_equal(name: str, optimizer: str, ranks: int, folder: Path) -> None:
    """Compare the loss and gradient norm of every step, and the weights at the end."""
    [(losses, norms)] = run_ranks(1, _train, str(folder), name, optimizer, None)
    options = {"tensor_model_parallel_size": ranks}
    for own_losses, own_norms in run_ranks(ranks, _train, str(folder), name, optimizer, options):
        # fp32, sums in another order.
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
    assert len(losses) == hf_models.STEPS
    consolidate(folder / "parts.ckpt", folder / "full.ckpt")
    full, expected = _weights(folder / "full.ckpt"), _weights(folder / "one.ckpt")
    assert full.keys() == expected.keys()
    # AdamW divides gradients of any size by their own. That of a key's bias is rounding alone
    # (softmax ignores what all scores have in common), and of one near zero rounding stays, too.
    atol = {"SGD": 2e-6, "AdamW": 2e-4}[optimizer]
    if optimizer == "AdamW":
        expected = {key: w for key, w in expected.items() if not key.endswith(_KEY_BIASES)}
    for key, weight in expected.items():
        torch.testing.assert_close(
            full[key], weight, rtol=1e-5, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


_DEFAULT = [
    ("llama-one-key", "SGD"),  # ranks share a key
    ("qwen3", "AdamW"),  # tied, norms of heads
    ("mixtral", "SGD"),
    ("gpt2", "SGD"),
    ("t5", "SGD"),
    ("bloom", "SGD"),  # no plan: layers gather their outputs
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(*case, marks=() if case in _DEFAULT else pytest.mark.slow)
        for case in ((name, kind) for name in hf_models.MODELS for kind in ("SGD", "AdamW"))
    ],
)
def test_an_untouched_model_trains_equally(name: str, optimizer: str, tmp_path: Path) -> None:
    _check_equal(name, optimizer, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-neox", "mixtral", "gpt2", "t5"])
def test_four_ranks(name: str, tmp_path: Path) -> None:
    """The one or two keys are shared by ranks."""
    _check_equal(name, "SGD", 4, tmp_path)


def _fine_tune(folder: str, tensor: int) -> tuple[list[float], list[str]]:
    record = Losses()

    def make() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(f"{folder}/base")

    strategy = MegatronStrategy(tensor_model_parallel_size=tensor) if tensor > 1 else "auto"
    fit = trainer(strategy, max_epochs=1, callbacks=[record])
    with printed_lines() as lines:
        fit.fit(Loaded(make), hf_models.loader("llama"))
    if tensor > 1:
        fit.save_checkpoint(f"{folder}/parts.ckpt")
    return record.losses, lines


def test_from_pretrained_and_back(tmp_path: Path) -> None:
    """A rank keeps its part of what ``configure_model`` loads; the result is saved for
    ``transformers``."""
    hf_models.build("llama-tied").save_pretrained(tmp_path / "base")
    [(losses, _)] = run_ranks(1, _fine_tune, str(tmp_path), 1)
    parts = run_ranks(2, _fine_tune, str(tmp_path), 2)
    assert parts[1][0] == pytest.approx(losses, rel=1e-5)
    [layout] = [line for line in parts[0][1] if line.startswith("MegatronStrategy: tensor")]
    assert "sequence parallel on" in layout

    consolidate(tmp_path / "parts.ckpt", tmp_path / "full.ckpt")
    module, weights = Untouched("llama-tied"), _weights(tmp_path / "full.ckpt")
    module.load_state_dict(weights)
    module.model.save_pretrained(tmp_path / "tuned")
    tuned = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight
    for name, weight in tuned.state_dict().items():
        assert torch.equal(weight, weights[f"model.{name}"]), name


class _TwoSlopes(torch.nn.Module):
    """An activation with two parameters, which sees a rank's features."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.9]))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden < 0, *self.slopes) * hidden


def _with_slopes() -> None:
    """Train by a plan that does not know the parameters of an activation."""

    def make() -> Any:
        model: Any = hf_models.build("qwen3")
        for layer in model.model.layers:
            layer.mlp.act_fn = _TwoSlopes()
        return model

    fit = trainer(MegatronStrategy(tensor_model_parallel_size=2), max_epochs=1)
    fit.fit(Loaded(make), hf_models.loader("qwen3"))


def test_a_plan_that_forgets_a_parameter_is_refused_in_the_first_step() -> None:
    with pytest.raises(AssertionError, match=r"parameter\(s\) differ .*act_fn.slopes"):
        run_ranks(2, _with_slopes)
