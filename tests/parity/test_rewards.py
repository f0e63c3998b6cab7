"""Reward models equal transformers on one process, and their loss that of TRL."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")
import transformers

from megatron_lightning.data.rollouts.rewards import Rewards
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.file_names import REWARD_TEXTS
from megatron_lightning.layers.losses.reward_loss import RewardLoss
from megatron_lightning.modules import (
    GPTLightningModule,
    HuggingFaceModule,
    PreferenceDataModule,
    RewardModel,
    RewardModule,
)
from megatron_lightning.modules.post_training.reward_model import _device_of
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import CONFIG, VOCABULARY, llama
from tests.helpers.chats import CHATML, make_tokenizer, turn, write_rows
from tests.helpers.layouts import MICRO, PP, TP
from tests.helpers.preferences import BATCH, PAIRS, RATE, STEPS, SGDOptions
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

PADDING, COEFFICIENT = 7, 0.1
SIDES = ("chosen", "rejected")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (1, {TP: 2, MICRO: 2}),
    "pp": (1, {PP: 2, MICRO: 1}),
    "zero1": (2, {MICRO: 1}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
}


class Scored(SGDOptions, RewardModule):
    """A reward model trained by SGD."""


def make_rows() -> list[dict[str, Tensor]]:
    """Return pairs of uneven lengths, padded by an id that is not the model's."""
    rows = []
    for number, pair in enumerate(PAIRS):
        row = {**pair, "margin": torch.tensor(number % 3 / 4)}
        for side in SIDES:
            row[f"{side}_padding"] = torch.arange(len(pair[side])) > 8 + number % 7
            row[side] = pair[side].clone().masked_fill_(pair[side] == PADDING, 1)
            row[side].masked_fill_(row[f"{side}_padding"], 3)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model with a tokenizer, and inside of its folder a reward model."""
    path = tmp_path_factory.mktemp("models")
    llama(vocab_size=320).save_pretrained(path)
    make_tokenizer(vocab_size=320).save_pretrained(path)
    config = llama(pad_token_id=PADDING).config
    config.num_labels = 1
    torch.manual_seed(2)
    transformers.LlamaForSequenceClassification(config).save_pretrained(path / "reward")
    return str(path)


def alone(path: str) -> tuple[list[float], list[float]]:
    """Train with transformers alone, one text after another: losses and norms."""
    model = transformers.LlamaForSequenceClassification.from_pretrained(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)  # type: ignore[union-attr]
    losses, norms, rows = [], [], make_rows()
    for at in range(0, len(rows), BATCH):
        chunk = rows[at : at + BATCH]
        chosen, rejected = (
            torch.cat([model(row[side][~row[f"{side}_padding"]][None]).logits[0] for row in chunk])
            for side in SIDES
        )
        margin = torch.stack([row["margin"] for row in chunk])
        loss = -F.logsigmoid(chosen - rejected - margin).mean()
        loss = loss + COEFFICIENT * torch.mean((chosen + rejected) ** 2)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad for p in model.parameters()]  # type: ignore[union-attr]
        norms.append(torch.nn.utils.get_total_norm(grads).item())
        optimizer.step()
    return losses, norms


def train(
    path: str, options: dict[str, Any] | None = None, data: int = 1
) -> tuple[list[float], list[float], dict[str, float]]:
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=STEPS, callbacks=[record])
    module = Scored(HuggingFaceModule(path), center_rewards_coefficient=COEFFICIENT)
    rows: Any = make_rows()
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data))
    return record.losses, record.norms, {k: float(v) for k, v in fit.callback_metrics.items()}


def _on_layouts(path: str, names: tuple[str, ...]) -> list[Any]:
    return [train(path, LAYOUTS[name][1], LAYOUTS[name][0]) for name in names]


def test_one_process_equals_transformers(folder: str) -> None:
    losses, norms = alone(f"{folder}/reward")
    own, own_norms, metrics = train(f"{folder}/reward")
    assert own == pytest.approx(losses, rel=1e-6)
    assert own_norms == pytest.approx(norms, rel=2e-6)
    assert metrics["rewards_margin"] == pytest.approx(
        metrics["rewards_chosen"] - metrics["rewards_rejected"], abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("tp", "pp"), id="tp-pp"),
        pytest.param(("zero1", "fsdp"), id="zero1-fsdp"),
    ],
)
def test_layouts_equal_one_process(folder: str, names: tuple[str, ...]) -> None:
    losses, norms = alone(f"{folder}/reward")
    ranks = run_ranks(2, _on_layouts, f"{folder}/reward", names, timeout_s=200)
    for both in zip(*ranks, strict=True):
        own = [sum(values) / 2 for values in zip(*(one[0] for one in both), strict=True)]
        assert own == pytest.approx(losses, rel=1e-5)  # fp32, sums in another order
        for _, own_norms, _ in both:
            assert own_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("coefficient", [None, 0.3])
def test_the_loss_is_that_of_trl(margin: bool, coefficient: float | None) -> None:
    """TRL's statements, cut out of its file."""
    trl = pytest.importorskip("trl")
    source = (Path(trl.__file__).parent / "trainer/reward_trainer.py").read_text()
    [method] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "compute_loss"
    ]
    texts = [ast.unparse(one) for one in method.body]
    first = next(n for n, text in enumerate(texts) if text.startswith("rewards_chosen"))
    end = next(n for n, text in enumerate(texts) if text.startswith("if self.args.center"))
    draws = torch.Generator().manual_seed(2)
    logits = torch.randn((10, 1), generator=draws, dtype=torch.float64, requires_grad=True)
    inputs = {"margin": torch.rand(5, generator=draws, dtype=torch.float64)} if margin else {}
    scope: dict[str, Any] = {
        "torch": torch, "nn": nn, "inputs": inputs, "outputs": SimpleNamespace(logits=logits),
        "self": SimpleNamespace(args=SimpleNamespace(center_rewards_coefficient=coefficient)),
    }  # fmt: skip
    exec("\n".join(texts[first : end + 1]), scope)
    scores = logits.view(2, -1).T
    loss = RewardLoss(center_rewards_coefficient=coefficient)
    ours, theirs = loss(scores, inputs.get("margin")).mean(), scope["loss"]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    own, other = (torch.autograd.grad(x, logits)[0] for x in (ours, theirs))
    assert torch.allclose(own, other, rtol=1e-12)


def test_a_language_model_becomes_a_reward(folder: str, tmp_path: Path) -> None:
    """From rows with margins to a folder of transformers, which scores as in the training."""
    rows = [
        {"prompt": "what is", "chosen": "blue " * (1 + number % 3), "rejected": "red",
         "margin": number / 8}
        for number in range(8)
    ]  # fmt: skip
    given: dict[str, Any] = {
        "sequence_length": 32, "batch_size": 4, "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    data = PreferenceDataModule(write_rows(tmp_path / "rows.jsonl", rows), **given)
    module = RewardModule(HuggingFaceModule(folder, learning_rate=1e-2, peft=LoRA()))
    fit = trainer("auto", max_epochs=2)
    fit.fit(module, datamodule=data)
    assert module.model.score.weight.requires_grad
    batch = next(iter(data.train_dataloader()))
    assert batch["margin"].tolist() == (batch["pair"] / 8).tolist()
    assert float(fit.callback_metrics["rewards_accuracy"]) == 1.0

    fit.save_checkpoint(tmp_path / "c.ckpt")
    again = RewardModule.load_from_checkpoint(tmp_path / "c.ckpt")
    again.configure_model()
    again.load_state_dict(module.state_dict())
    module.eval()
    with torch.no_grad():
        scores = module._scores(batch)
        assert torch.equal(again.eval()._scores(batch), scores)


def test_an_exported_folder_rewards(folder: str, tmp_path: Path) -> None:
    module = RewardModule(HuggingFaceModule(folder))
    module.configure_model()
    module.save_hf_pretrained(str(tmp_path / "out"))
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    tokens = torch.randint(10, VOCABULARY, (2, 9))
    padding = torch.arange(9) > torch.tensor([[8], [5]])
    with torch.no_grad():
        expected = [model(tokens[n : n + 1, ~padding[n]]).logits.item() for n in (0, 1)]
        assert module.eval()(tokens, padding).tolist() == pytest.approx(expected, rel=1e-5)

    make_tokenizer(vocab_size=320).save_pretrained(tmp_path / "out")
    path = "megatron_lightning.modules.RewardModel"
    rewards = Rewards(
        {"model": {"class_path": path, "init_args": {"path": str(tmp_path / "out")}}}, 60.0
    )
    found, failures = rewards.score([("what is", answer, {}) for answer in ("blue", "red")])
    assert not failures and found[0]["model"] != found[1]["model"]
    copied = pickle.loads(pickle.dumps(rewards.functions["model"]))
    assert copied("what is", "blue", {}) == found[0]["model"]
    long = RewardModel(str(tmp_path / "out"), max_length=2)
    assert long("what is", "blue", {}) is None


def test_answers_are_scored_as_they_were_trained(folder: str, tmp_path: Path) -> None:
    """Values and date of the template, and the cut, travel in the folder."""
    template = "{{ strftime_now('%Y') }} {{ mood }} " + CHATML
    prompt = [turn("user", "what is the color of sky and grass")]
    rows = [
        {"prompt": prompt, "chosen": [turn("assistant", a)], "rejected": [turn("assistant", "red")]}
        for a in ("blue", "green", "blue green", "does not know")
    ]
    options: dict[str, Any] = {
        "sequence_length": 30, "batch_size": 4, "cache_dir": str(tmp_path / "cache"),
        "chat_template": template, "template_options": {"mood": "blue"}, "date": "2020-01-01",
        "truncation": "left",
    }  # fmt: skip
    data = PreferenceDataModule(write_rows(tmp_path / "rows.jsonl", rows), **options)
    module = RewardModule(HuggingFaceModule(folder))
    fit = trainer("auto", max_steps=1)
    fit.fit(module, datamodule=data)
    module.save_hf_pretrained(str(tmp_path / "out"))
    model = RewardModel(str(tmp_path / "out"))
    batch = next(iter(data.val_dataloader() or data.train_dataloader()))
    with torch.no_grad():
        expected = module.eval()._scores(batch)[batch["pair"].argsort()]
    found = [[model(prompt, row[s][0]["content"], {}) for s in SIDES] for row in rows]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)
    (tmp_path / "out" / REWARD_TEXTS).unlink()
    with pytest.raises(DataError, match="set date"):
        RewardModel(str(tmp_path / "out"))(prompt, "blue", {})


def test_cuda_is_the_current_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    names = ("cuda", "cuda:1", "cpu")
    assert [str(_device_of(name)) for name in names] == ["cuda:3", "cuda:1", "cpu"]


def test_what_cannot_work_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GPTLightningModule.*HuggingFaceModule"):
        RewardModule(GPTLightningModule(CONFIG))
    with pytest.raises(ConfigError, match="center_rewards_coefficient is -1"):
        RewardModule(HuggingFaceModule(folder), center_rewards_coefficient=-1.0)
    with pytest.raises(ConfigError, match="LlamaForCausalLM with 2 labels"):
        RewardModel(folder)
    config = transformers.LlamaConfig.from_pretrained(f"{folder}/reward", num_labels=3)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="3 labels"):
        RewardModule(HuggingFaceModule(str(tmp_path / "three"))).configure_model()
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1}]
    rows.append({key: rows[0][key] for key in ("prompt", *SIDES)})
    wrong = write_rows(tmp_path / "rows.jsonl", rows)
    data = PreferenceDataModule(
        wrong, sequence_length=16, batch_size=1, cache_dir=str(tmp_path / "cache")
    )
    fit = trainer("auto", max_steps=1)
    with pytest.raises(DataError, match=r"rows.jsonl:2: margin is None"):
        fit.fit(RewardModule(HuggingFaceModule(folder)), datamodule=data)
