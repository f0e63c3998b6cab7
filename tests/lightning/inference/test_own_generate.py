"""Text of untouched models of ``transformers`` in a fit: by their own ``generate``, with and
without a cache, by their continuous batching, and by the strategy's engine.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.inference import Sampling
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

transformers: Any = pytest.importorskip("transformers")

TP, PP, MICRO = "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [60]]
NEW = 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2},
    "fsdp": {"data_parallel": "fsdp"},
    "dp2": {},
}


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=67,
        max_position_embeddings=96,
        intermediate_size=96,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def by_generate(model: Any, *, use_cache: bool) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        row = torch.tensor([prompt])
        made = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=use_cache,
            pad_token_id=0,
        )
        texts.append(made[0].tolist()[len(prompt) :])
    return texts


def by_batch(model: Any) -> list[list[int]]:
    answers = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=32, num_blocks=16, max_batch_tokens=64
        ),
        warmup=False,
    )
    return [answer.generated_tokens for answer in answers.values()]


class _Module(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class _Texts(pl.Callback):
    """Writes in each way before training and after each step."""

    def __init__(self, *, has_batches: bool) -> None:
        self.found: list[dict[str, list[list[int]]]] = []
        self._has_batches = has_batches

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        model: Any = module.model
        mode = model.training
        model.eval()
        greedy = Sampling(max_new_tokens=NEW, temperature=0.0)
        strategy: Any = trainer.strategy
        found = {
            "cache": by_generate(model, use_cache=True),
            "no cache": by_generate(model, use_cache=False),
            "engine": [one.tokens for (one,) in strategy.engine().generate(PROMPTS, greedy)],
        }
        if self._has_batches:
            # transformers leaves paged attention behind.
            kind = model.config._attn_implementation
            found["batch"] = by_batch(model)
            model.set_attn_implementation(kind)
        self.found.append(found)
        model.train(mode)


def _fit(options: dict[str, Any]) -> Any:
    transformers.logging.set_verbosity_error()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 67, (16, 17), generator=generator)
    rows: Any = [{"input_ids": t, "labels": t} for t in text]
    results = []
    for writes in (False, True):
        losses, texts = Losses(), _Texts(has_batches="data_parallel" not in options)
        run = trainer(
            MegatronStrategy(**options),
            max_steps=3,
            callbacks=[losses, *([texts] if writes else [])],
            val_check_interval=1,
            limit_val_batches=1,
            num_sanity_val_steps=1,
        )
        run.fit(_Module(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
        results.append((losses.losses, texts.found))
    return results


@pytest.mark.slow
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "tp2" else pytest.mark.slow) for n in LAYOUTS]
)
def test_own_generate_in_a_fit(name: str) -> None:
    expected = by_generate(build().eval(), use_cache=True)
    for (plain, _), (losses, found) in run_ranks(2, _fit, LAYOUTS[name], timeout_s=110):
        assert losses == plain
        assert len(found) == 4 and found[0]["cache"] == expected
        assert {len({str(texts) for texts in each.values()}) for each in found} == {1}
        assert len({str(each["cache"]) for each in found}) == 4
        assert len({token for texts in expected for token in texts}) > 20
