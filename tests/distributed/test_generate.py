"""Text from checkpoints: the sampling loop by itself, and the same text on every layout."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import TensorShards, save_sharded
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.load import read_config
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.inference.engine.uncached_loop import Sampling, sample
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.slurm import free_port
from tests.helpers.trainers import trainer

VOCABULARY = 67
# A large deviation, so that probabilities differ much and a wrong layer or head changes the text.
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "num_query_groups": 2,
    "init_method_std": 0.5,
}
LLAMA = tiny_config(**SIZES, vocab_size=VOCABULARY, max_sequence_length=24)
GPT2 = tiny_config(
    **SIZES,
    vocab_size=VOCABULARY,
    max_sequence_length=16,  # shorter than the texts: the window slides
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation="gelu_tanh",
    add_bias_linear=True,
    share_embeddings_and_output_weights=True,
)
MOE = tiny_config(
    **SIZES,
    vocab_size=VOCABULARY,
    max_sequence_length=24,
    moe=MoEConfig(num_experts=4, shared_expert_intermediate_size=24, layer_freq=(1, 0, 1)),
)
PROMPTS = [[1, 2, 3], [7], [5, 4, 3, 2, 1, 0, 9]]


def save_plain(path: Path, config: TransformerConfig) -> str:
    state = {f"model.{name}": tensor for name, tensor in GPTModel(config).state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"config": asdict(config)}}, path)
    return str(path)


def save_directory(path: Path, config: TransformerConfig) -> str:
    """As the strategy saves: the owner of a tied pair only."""
    model = GPTModel(config)
    shards = [
        TensorShards.full(f"state_dict.model.{name}", tensor)
        for name, tensor in model.named_parameters()
    ]
    save_sharded(path, shards, {"hyper_parameters": {"config": asdict(config)}, "state_dict": {}})
    return str(path)


def texts_on(
    checkpoint: str,
    tensor: int,
    pipeline: int,
    sampling: Sampling,
    chunks: int = 1,
    schedule: str = "auto",
    experts: int = 1,
) -> list[list[int]]:
    layout = ParallelLayout(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=tensor // experts,
        sequence_parallel=False,
    )
    engine = Engine.load(checkpoint, layout, pipeline_schedule=schedule)
    found = engine.generate(PROMPTS, sampling)
    return [prompt + own.tokens for prompt, (own,) in zip(PROMPTS, found, strict=True)]


def reference(config: TransformerConfig, sampling: Sampling) -> list[list[int]]:
    """One prompt at a time through the plain model."""
    model, texts = GPTModel(config).eval(), []

    @torch.inference_mode()
    def next_logits(tokens: Tensor, last: Tensor) -> Tensor:
        return model(tokens)[:, -1]

    for row, prompt in enumerate(PROMPTS):
        own = Sampling(**{**asdict(sampling), "seed": sampling.seed + row})
        texts += sample(next_logits, [prompt], own, max_sequence_length=config.max_sequence_length)
    return texts


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "size", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)], ids=lambda size: f"tp{size[0]}pp{size[1]}"
)
def test_every_layout_gives_the_same_text(size: tuple[int, int], tmp_path: Path) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.9, top_k=20, top_p=0.9)
    for config, save in ((LLAMA, save_plain), (GPT2, save_directory)):
        checkpoint = save(tmp_path / config.normalization, config)
        expected = reference(config, sampling)
        for texts in run_ranks(size[0] * size[1], texts_on, checkpoint, *size, sampling):
            assert texts == expected


@pytest.mark.spread(1)
@pytest.mark.parametrize(("tensor", "pipeline", "experts"), [(2, 1, 1), (2, 1, 2), (2, 2, 2)])
def test_experts_give_the_same_text(
    tensor: int, pipeline: int, experts: int, tmp_path: Path
) -> None:
    """Tensor-parallel ranks have the same tokens, an odd number at times: each dispatches a part of
    them.
    """
    sampling = Sampling(max_new_tokens=12, temperature=0.9, top_k=20, top_p=0.9)
    checkpoint, expected = save_directory(tmp_path / "moe", MOE), reference(MOE, sampling)
    arguments = checkpoint, tensor, pipeline, sampling, 1, "auto", experts
    for texts in run_ranks(tensor * pipeline, texts_on, *arguments):
        assert texts == expected


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_multi_token_prediction_is_left_out(tensor: int, tmp_path: Path) -> None:
    """Its layers are the second stage: the text is that of the model without."""
    sampling = Sampling(max_new_tokens=12, temperature=0.9, seed=3)
    config = replace(GPT2, mtp_num_layers=4)
    checkpoint, expected = save_directory(tmp_path / "mtp", config), reference(GPT2, sampling)
    assert texts_on(checkpoint, 1, 1, sampling) == expected
    for texts in run_ranks(2 * tensor, texts_on, checkpoint, tensor, 2, sampling):
        assert texts == expected


def _trained_in_v(path: str) -> None:
    """Train on two ranks of two stages each, placed as a V, and save."""
    text = torch.randint(0, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(5))
    samples = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(8)} for row in text]
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        micro_batch_size=2,
        pipeline_schedule="zbv",
    )
    fit = trainer(strategy, max_steps=2)
    fit.fit(
        GPTLightningModule(replace(GPT2, num_layers=4), learning_rate=1e-2),
        DataLoader(samples, batch_size=4),
    )
    fit.save_checkpoint(path)


@pytest.mark.slow
def test_virtual_stages_give_the_same_text(tmp_path: Path) -> None:
    """A checkpoint of stages in a V, read by other stages: the first and the last on one rank, and
    around the ranks."""
    checkpoint, sampling = (
        str(tmp_path / "trained.ckpt"),
        Sampling(max_new_tokens=12, temperature=0.9, seed=3),
    )
    run_ranks(2, _trained_in_v, checkpoint)
    expected = texts_on(checkpoint, 1, 1, sampling)
    for chunks, schedule in ((1, "auto"), (2, "auto"), (2, "zbv")):
        for texts in run_ranks(2, texts_on, checkpoint, 1, 2, sampling, chunks, schedule):
            assert texts == expected, (chunks, schedule)


@pytest.mark.parametrize("save", [save_plain, save_directory])
def test_tied_weights_load_from_both_forms(save: Any, tmp_path: Path) -> None:
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    assert texts_on(save(tmp_path / "checkpoint", GPT2), 1, 1, greedy) == reference(GPT2, greedy)


def table(tokens: Tensor, last: Tensor) -> Tensor:
    """A model without weights: after token t comes t + 1 with probability 0.6, t + 2 with 0.3, else
    t + 3."""
    logits = torch.full((len(tokens), 10), -torch.inf)
    for row, end in enumerate(last.tolist()):
        for step, probability in ((1, 0.6), (2, 0.3), (3, 0.1)):
            logits[row, (int(tokens[row, end]) + step) % 10] = torch.tensor(probability).log()
    return logits


def test_greedy_takes_the_most_likely_and_stops_at_the_end_of_the_document() -> None:
    texts = sample(table, [[0], [6, 5]], Sampling(temperature=0.0, max_new_tokens=6), eod=8)
    assert texts == [[0, 1, 2, 3, 4, 5, 6], [6, 5, 6, 7]]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (0.6, 0.3, 0.1)),
        ({"top_k": 2}, (2 / 3, 1 / 3, 0)),
        ({"top_p": 0.6}, (1, 0, 0)),
        ({"top_p": 0.7}, (2 / 3, 1 / 3, 0)),
        ({"temperature": 0.5}, (36 / 46, 9 / 46, 1 / 46)),
    ],
)
def test_draws_follow_the_probabilities(options: dict[str, Any], shares: tuple[float, ...]) -> None:
    [text] = sample(table, [[0]], Sampling(max_new_tokens=2000, seed=3, **options))
    steps = [(b - a) % 10 for a, b in pairwise(text)]
    found = [steps.count(step) / len(steps) for step in (1, 2, 3)]
    # 3.5 standard deviations of a share of 2000 draws.
    assert found == pytest.approx(shares, abs=0.04)


def test_a_seed_gives_the_same_text_again_whatever_stands_beside_it() -> None:
    sampling = Sampling(max_new_tokens=20, seed=5)
    together = sample(table, [[0], [4]], sampling)
    assert together == sample(table, [[0], [4]], sampling)
    assert together[:1] == sample(table, [[0]], sampling)
    assert together != sample(table, [[0], [4]], Sampling(max_new_tokens=20, seed=6))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "option",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_values_that_cannot_work(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.*Set it"):
        Sampling(**option)
    with pytest.raises(ConfigError, match="no tokens"):
        sample(table, [[]], Sampling())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(["def f(x):\n    return x\n", "import os, sys\n"] * 20, 290, path)
    return str(path)


def save_for(tokenizer: str, path: Path, num_layers: int = 3) -> str:
    return save_plain(
        path,
        tiny_config(**{**SIZES, "num_layers": num_layers}, vocab_size=290, max_sequence_length=32),
    )


def _write(
    checkpoint: str,
    tokenizer: str,
    prompts: list[str] | str = "def f(",
    num_samples: int = 1,
    **options: Any,
) -> list[str]:
    options |= {"tokenizer_model": tokenizer, "device": "cpu"}
    model = ModelOptions(checkpoint=checkpoint, **options)
    return generate(model, prompts, max_new_tokens=5, num_samples=num_samples)


def test_generate_from_text_to_text(tokenizer: str, tmp_path: Path) -> None:
    checkpoint = save_for(tokenizer, tmp_path / "last.ckpt")
    texts = _write(checkpoint, tokenizer, prompts=["def f(", ""])
    assert len(texts) == 2
    assert texts[0].startswith("def f(")
    assert texts[0] == _write(checkpoint, tokenizer)[0]


@pytest.mark.slow  # four processes import torch
def test_generate_starts_its_own_processes(tokenizer: str, tmp_path: Path) -> None:
    checkpoint = save_for(tokenizer, tmp_path / "last.ckpt", num_layers=4)
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout |= {"virtual_pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}
    alone = _write(checkpoint, tokenizer)
    assert _write(checkpoint, tokenizer, **layout) == alone


def _generate_as_a_task(checkpoint: str, tokenizer: str, port: str) -> list[str]:
    """Generate in a task of srun."""
    rank = os.environ.pop("RANK")
    dist.destroy_process_group()
    os.environ.update(
        SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS=os.environ.pop("WORLD_SIZE"),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip
    return _write(checkpoint, tokenizer, tensor_model_parallel_size=2)


def test_tasks_of_slurm_share_the_model(tokenizer: str, tmp_path: Path) -> None:
    checkpoint = save_for(tokenizer, tmp_path / "last.ckpt")
    alone = _write(checkpoint, tokenizer)
    tasks = run_ranks(2, _generate_as_a_task, checkpoint, tokenizer, free_port())
    assert tasks == [alone, []]


def test_generate_refuses_what_does_not_fit(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_for(tokenizer, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match="num_layers=3 are fewer than the 4 pipeline stages"):
        _write(checkpoint, tokenizer, pipeline_model_parallel_size=4)
    with pytest.raises(
        ConfigError,
        match=r"num_layers=3 are fewer than the 4 .* virtual_pipeline_model_parallel_size to 1,",
    ):
        _write(
            checkpoint,
            tokenizer,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        )
    with pytest.raises(
        ConfigError, match="zbv runs two model chunks on each pipeline rank, and there are 1"
    ):
        _write(checkpoint, tokenizer, pipeline_model_parallel_size=2, pipeline_schedule="zbv")
    with pytest.raises(
        ConfigError,
        match=r"expert_tensor_parallel_size=2 x expert_model_parallel_size=2 does not divide "
        r"tensor_model_parallel_size=2, .* to 1 and tensor_model_parallel_size to a multiple of 2",
    ):
        _write(checkpoint, tokenizer, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    with pytest.raises(ConfigError, match="num_samples is 0"):
        _write(checkpoint, tokenizer, num_samples=0, tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match="tokenizer that made the training data"):
        _write(save_plain(tmp_path / "small.ckpt", LLAMA), tokenizer)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started"):
        _write(checkpoint, tokenizer)


def test_checkpoints_of_other_modules_are_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"no hyper_parameters\.config"):
        read_config(tmp_path / "other.ckpt")
