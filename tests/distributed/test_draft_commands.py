"""Commands with drafts: the text without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.model_options import ModelOptions
from tests.distributed.test_drafts import save
from tests.helpers.layouts import tiny_config
from tests.helpers.spoken import make_spoken

PROMPTS = ["def f(x):", "import"]
TP = "tensor_model_parallel_size"


def make_drafting(parent: Path) -> tuple[str, str]:
    """Return a checkpoint with two layers of multi-token prediction, and a tokenizer."""
    config = tiny_config(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        vocab_size=260,  # of the tokenizer
        max_sequence_length=128,
        init_method_std=0.4,
        mtp_num_layers=2,
        share_embeddings_and_output_weights=False,
    )
    return save(parent / "last.ckpt", config), str(make_spoken(parent, name="tokenizer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_drafting(tmp_path_factory.mktemp("drafts"))


def _generate(
    model: tuple[str, str], temperature: float, seed: int = 1234, **options: Any
) -> list[str]:
    tokenizer: Any = {"tokenizer_model": model[1], "tokenizer_type": "huggingface"}
    own = ModelOptions(checkpoint=model[0], device="cpu", **tokenizer, **options)
    return generate(own, PROMPTS, max_new_tokens=32, temperature=temperature, seed=seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [{}, pytest.param({TP: 2}, marks=pytest.mark.slow)])
def test_generate(
    layout: dict[str, Any], model: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    plain = _generate(model, temperature=0.0)
    drawn = _generate(model, temperature=0.8, seed=3)
    assert len(set("".join(plain))) > 20 and drawn != plain
    assert "drafts" not in capfd.readouterr().err
    assert _generate(model, temperature=0.0, draft_tokens=2, **layout) == plain
    assert _generate(model, temperature=0.8, seed=3, draft_tokens=1, **layout) == drawn
    assert "drafts accepted" in capfd.readouterr().err
