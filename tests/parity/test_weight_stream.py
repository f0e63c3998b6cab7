"""Weights of live parts into transformers: strict, and the same greedy text as by the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Sampling
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers: Any = pytest.importorskip("transformers")

TP, PP, MICRO = "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"
EP = "expert_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2, MICRO: 2}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "tp2 pp2": (4, {TP: 2, PP: 2, MICRO: 2}),
}
CONFIG = tiny_config(
    num_layers=4, num_query_groups=2, vocab_size=67, max_sequence_length=48, init_method_std=0.4
)
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


class _Stream(pl.Callback):
    """Takes the weights in the middle and at the end of a fit, and writes text by both."""

    def __init__(self, weight_format: str) -> None:
        self._format = weight_format
        self.weights: list[dict[str, torch.Tensor]] = []
        self.texts: list[Any] = []
        self.metadata: list[Any] = []
        self._source: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if self._source is None:
            self._source = strategy.weights(self._format)
            self.metadata = self._source.metadata()
        self.weights.append({name: x.clone() for name, x in self._source})
        rows = strategy.engine().generate(PROMPTS, GREEDY)
        self.texts.append([one.tokens for (one,) in rows])
        with pytest.raises(ConfigError, match="full_tensors"):
            strategy.weights("megatron")


def _fit(options: dict[str, Any], folder: str | None, weight_format: str = "transformers") -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 67, (8, 17), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    stream = _Stream(weight_format)
    run = trainer(MegatronStrategy(**options), max_steps=2, callbacks=[stream])
    options = {} if folder is None else {"init_from_hf": folder}
    module = GPTLightningModule(None if folder else CONFIG, learning_rate=1e-2, **options)
    run.fit(module, DataLoader(rows, batch_size=4))
    return stream.weights, stream.texts, stream.metadata


def _check(found: Any, config: Any) -> None:
    weights, texts, metadata = found
    for state, written in zip(weights, texts, strict=True):
        assert [(m.name, m.dtype, m.shape) for m in metadata] == [
            (name, x.dtype, tuple(x.shape)) for name, x in state.items()
        ]
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        model.load_state_dict(state, strict=True)
        for prompt, tokens in zip(PROMPTS, written, strict=True):
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
            )
            assert made[0].tolist()[len(prompt) :] == tokens
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "tp2" else pytest.mark.slow) for n in LAYOUTS]
)
def test_weights_of_live_parts(name: str) -> None:
    size, options = LAYOUTS[name]
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=CONFIG.ffn_size,
        vocab_size=67,
        max_position_embeddings=48,
        rms_norm_eps=CONFIG.layernorm_epsilon,
        tie_word_embeddings=False,
    )
    for found in run_ranks(size, _fit, options, None, timeout_s=110):
        _check(found, config)


@pytest.mark.parametrize(
    ("family", "size", "layout", "weight_format"),
    [
        pytest.param("llama", 2, {TP: 2}, "transformers", marks=pytest.mark.slow),
        pytest.param("llama", 2, {TP: 2}, "state_dict", marks=pytest.mark.slow),
        ("gemma", 1, {}, "transformers"),  # a tied head, which folders hold once
        pytest.param("gemma", 2, {PP: 2, MICRO: 2}, "transformers", marks=pytest.mark.slow),
        # transformers merges experts, and folders have each.
        pytest.param("mixtral", 2, {EP: 2}, "state_dict", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", 2, {PP: 2, MICRO: 2}, "state_dict", marks=pytest.mark.slow),
    ],
)
def test_weights_of_a_model_from_a_folder(
    family: str, size: int, layout: dict[str, Any], weight_format: str, tmp_path: Path
) -> None:
    from tests.helpers.gpt_folders import make_folder

    folder = make_folder(family, tmp_path, initializer_range=0.4)
    config = transformers.AutoConfig.from_pretrained(folder)
    for found in run_ranks(size, _fit, layout, str(folder), weight_format, timeout_s=110):
        _check(found, config)
