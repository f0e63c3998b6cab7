"""``megatron-lightning plan``: owners of full tensors, and groups of maximal updates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_lightning.cli import main
from tests.unit.planning.test_planning_command import LLAMA

SIZES = (
    "--model.config.num_layers=2",
    "--model.config.hidden_size=64",
    "--model.config.num_attention_heads=4",
    "--model.config.num_query_groups=4",
    "--model.config.ffn_hidden_size=128",
    "--model.config.vocab_size=256",
    "--trainer.strategy.pipeline_model_parallel_size=1",
    "--trainer.strategy.tensor_model_parallel_size=2",
    "--world-size=4",
)
NUM_PARAMETERS = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """Return a plan as JSON and as text."""
    arguments = ["plan", f"--config={LLAMA}", *SIZES, *options]
    main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    main(arguments)
    return found, capsys.readouterr().out


def test_owners_of_full_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = planned(capsys, "--model.optimizer=Adafactor", "--trainer.precision=32-true")
    owners = found["owners"]
    largest = 256 * 64
    assert owners["classes"] == ["Adafactor"] and owners["ranks"] == 4
    # Gradients there and parameters back, but for the fourth that an owner holds itself.
    assert owners["sent"] == round(NUM_PARAMETERS * 3 / 4 * 8)
    assert owners["largest"] == largest
    assert owners["peak"] == 4 * 4 * owners["fullest"]  # messages hold all of so small a model
    assert owners["fullest"] <= 4 / 3 * max(NUM_PARAMETERS / 4, largest)
    assert "one of 4 ranks owns and steps each. A step sends at most " in text
    sgd, _ = planned(capsys, "--model.optimizer=SGD")
    assert "owners" not in sgd  # ranks step what they hold


def test_groups_of_maximal_updates(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = planned(capsys, "--model.maximal_update.base_width=16")
    groups = {group["name"]: group["parameters"] for group in found["param_groups"]}
    assert sum(groups.values()) == NUM_PARAMETERS and "owners" not in found
    hidden = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert groups["default/lr x0.25, wd x4, eps x0.25"] == hidden
    assert f"AdamW, group default/lr x0.25, wd x4, eps x0.25: {hidden:,} parameters" in text


def test_mistakes_in_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    for option, message in (
        ("--model.optimizer=torch.optim.Sooap", "optimizer names torch.optim.Sooap"),
        ("--model.optimizer.class_path=nowhere.SOAP", "cannot be imported"),
        ("--model.maximal_update.base_width=0", "base_width=0 is not positive"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["plan", f"--config={LLAMA}", *SIZES, option])
        assert exit_.value.code == 2
        assert message in "".join(capsys.readouterr())
