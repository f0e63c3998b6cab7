"""Tasks of lm-evaluation-harness: the values of its own hf model, on every layout."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval.evaluator")
pytest.importorskip("transformers")
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import EvaluateTasks
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import EngineOptions, Sampling, load_engine
from megatron_lightning.inference.commands.evaluate import evaluate, sharing_of
from megatron_lightning.inference.commands.load import find_codec
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.strategies import MegatronStrategy
from tests.distributed.test_draft_commands import make_drafting
from tests.helpers.ranks import run_ranks
from tests.helpers.spoken import TEXT, make_spoken
from tests.helpers.trainers import Losses, trainer

TASKS = ["lines_choice", "lines_text", "lines_perplexity"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HEAD = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: %s}}\n"
FILES = {
    "choice.yaml": "task: lines_choice\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\n"
    "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\nmetric_list:\n"
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n",
    "text.yaml": "task: lines_text\noutput_type: generate_until\ndoc_to_text: '{{text}}'\n"
    "doc_to_target: '{{choices[gold]}}'\ngeneration_kwargs: {until: ['a', 'e'], max_gen_toks: 24, "
    "do_sample: false}\nmetric_list:\n"
    "  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n",
    "perplexity.yaml": "task: lines_perplexity\noutput_type: loglikelihood_rolling\n"
    "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list:\n  - {metric: word_perplexity}\n"
    "  - {metric: byte_perplexity}\n  - {metric: bits_per_byte}\n",
}


def write_tasks(folder: Path) -> str:
    draws = random.Random(0)
    rows = []
    for _ in range(10):
        start = draws.randrange(len(TEXT) - 20)
        rows.append(
            {
                "text": TEXT[start : start + draws.randrange(2, 18)] + " ",
                "choices": [TEXT[i : i + 5] for i in draws.sample(range(80), 4)],
                "gold": draws.randrange(4),
            }
        )
    rows.append({"text": TEXT * 2, "choices": ["a", "b", "c", "d"], "gold": 1})  # too long
    folder.mkdir()
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in FILES.items():
        (folder / name).write_text(text + HEAD % (folder / "lines.jsonl"))
    return str(folder)


def results_of(model: Any, tasks: str) -> tuple[dict[str, float], list[str]]:
    from megatron_lightning.inference.commands.harness import evaluate_tasks, values_of

    before = random.getstate(), torch.get_rng_state()
    results = evaluate_tasks(model, TASKS, include_path=tasks, log_samples=True)
    assert (before[0], before[1].tolist()) == (random.getstate(), torch.get_rng_state().tolist())
    samples = results["samples"]["lines_text"]
    return values_of(results), [str(sample["filtered_resps"]) for sample in samples]


def ours(folder: str, tasks: str, layout: dict[str, Any]) -> Any:
    os.environ.update(OFFLINE)
    from megatron_lightning.inference.commands.harness import HarnessModel

    codec = find_codec(folder)
    engine = load_engine(
        folder,
        ParallelLayout(**layout),
        options=EngineOptions(max_tokens=64, max_requests=8),
        stops=codec.stops,
        decode=codec.decode,
    )
    return results_of(HarnessModel(engine, codec, sharing_of(engine)), tasks)


def _alone() -> None:
    """Look like a process that no launcher has started."""
    os.environ.update(OFFLINE)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


def theirs(folder: str, tasks: str) -> Any:
    _alone()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron_lightning.inference.commands.harness import values_of

    model = HFLM(pretrained=folder, batch_size=4, device="cpu", dtype="float32")
    results: Any = simple_evaluate(
        model,
        tasks=TASKS,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    samples = results["samples"]["lines_text"]
    return values_of(results), [str(sample["filtered_resps"]) for sample in samples]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parent = tmp_path_factory.mktemp("harness")
    folder, tasks = str(make_spoken(parent)), write_tasks(parent / "tasks")
    [found] = run_ranks(1, theirs, folder, tasks, timeout_s=110)
    return folder, tasks, found


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),  # replicas
        pytest.param(2, {TP: 2}, marks=pytest.mark.slow),
        pytest.param(2, {PP: 2}, marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_the_harness(size: int, layout: dict[str, Any], expected: Any) -> None:
    """fp32, sums of some hundred log-probabilities: 1e-6."""
    folder, tasks, (values, texts) = expected
    assert len(set(texts)) > 5 and len(values) == 6
    for found, written in run_ranks(size, ours, folder, tasks, layout, timeout_s=110):
        assert found == pytest.approx(values, rel=1e-6)
        assert written == texts


def _requests(folder: str, layout: dict[str, Any]) -> Any:
    """Return texts of a stop text that is a special token, and of repeated requests."""
    if not layout:
        _alone()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from megatron_lightning.inference.commands.harness import HarnessModel

    codec = find_codec(folder)
    engine = load_engine(folder, ParallelLayout(**layout), stops=codec.stops, decode=codec.decode)
    model = HarnessModel(engine, codec, sharing_of(engine))

    def texts(own: Any, prompts: list[str], **options: Any) -> list[str]:
        requests = [
            Instance("generate_until", {}, (prompt, {"max_gen_toks": 12, **options}), 0)
            for prompt in prompts
        ]
        found: list[str] = own.generate_until(requests, disable_tqdm=True)
        return found

    stops: dict[str, Any] = {"until": ["<bot>", "\n"], "do_sample": False}
    drawn: dict[str, Any] = {"until": ["\n"], "do_sample": True, "temperature": 1.0}
    stopped = texts(model, ["def f", "x"], **stops)
    if not layout:
        oracle = HFLM(pretrained=folder, batch_size=1, device="cpu", dtype="float32")
        assert stopped == texts(oracle, ["def f", "x"], **stops)
        # Without the special token the model writes on.
        assert stopped[0] != texts(model, ["def f"], until=["\n"], do_sample=False)[0]
        alone = texts(model, ["x"] * 3, **drawn)
        assert texts(model, ["x", "y", "x", "x"], **drawn)[2:] == alone[1:]
    return stopped, texts(model, ["x"] * 8 + ["y"] * 8, **drawn)


def test_special_stop_texts_and_repeats(tmp_path: Path) -> None:
    import transformers

    folder = str(make_spoken(tmp_path))
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    codec = find_codec(folder)
    [[one]] = load_engine(folder, stops=()).generate(
        [codec.encode("def f")], Sampling(max_new_tokens=8, temperature=0.0)
    )
    # The fourth token of the greedy text becomes <bot>.
    token, bot = one.tokens[3], loaded.lm_head.weight[3].clone()
    assert token not in one.tokens[:3]
    with torch.no_grad():
        loaded.lm_head.weight[3] = loaded.lm_head.weight[token]
        loaded.lm_head.weight[token] = bot
    loaded.save_pretrained(folder)
    [expected] = run_ranks(1, _requests, folder, {}, timeout_s=110)
    assert len(set(expected[1])) > 14  # drawn texts of equal requests differ
    assert run_ranks(2, _requests, folder, {TP: 2}, timeout_s=110) == [expected] * 2


def _command(folder: str, tasks: str, output: str) -> list[str | None]:
    _alone()
    return [
        evaluate(
            ModelOptions(checkpoint=folder, device="cpu"),
            ["lines_choice"],
            limit=5,
            include_path=tasks,
            output=output,
            json=as_json,
        )
        for as_json in (False, True)
    ]


def test_the_command_prints_a_table_or_json(expected: Any, tmp_path: Path) -> None:
    folder, tasks, _ = expected
    output = tmp_path / "new" / "results.json"
    [(table, text)] = run_ranks(1, _command, folder, tasks, str(output), timeout_s=110)
    assert "lines_choice" in table and "acc_norm" in table
    assert json.loads(text) == json.loads(output.read_text())
    found = json.loads(output.read_text())
    assert set(found["results"]["lines_choice"]) >= {"acc,none", "acc_norm,none"}


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron_lightning\[eval\]'"):
        evaluate(ModelOptions(checkpoint="nowhere"), "x")


def _fit(folder: str, tasks: str, layout: dict[str, Any] | None) -> Any:
    os.environ.update(OFFLINE)
    rows: Any = [
        {"tokens": torch.arange(20) + i, "labels": torch.arange(20) + i + 1} for i in range(8)
    ]
    results = []
    for evaluates in (False, True):
        losses = Losses()
        callback = EvaluateTasks(TASKS, limit=4, include_path=tasks, prefix="eval/")
        run = trainer(
            "auto" if layout is None else MegatronStrategy(**layout),
            max_steps=2,
            callbacks=[losses, *([callback] if evaluates else [])],
            val_check_interval=1,
        )
        module = GPTLightningModule(init_from_hf=folder, learning_rate=1e-3)
        run.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
        logged = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("eval/")}
        results.append((losses.losses, callback.values, logged))
    (plain, _, _), (found, values, logged) = results
    assert plain == found
    assert [step for step, _ in values] == [1, 2]
    # As Lightning logs them: fp32.
    assert logged == pytest.approx(values[-1][1], rel=1e-6)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{TP: 2}, {PP: 2}])
def test_tasks_in_a_fit(layout: dict[str, Any], expected: Any) -> None:
    """Weights of another layout differ by rounding, which Adam scales up: 1e-3."""
    folder, tasks, _ = expected
    [alone] = run_ranks(1, _fit, folder, tasks, None, timeout_s=110)
    for values in run_ranks(2, _fit, folder, tasks, layout, timeout_s=110):
        for (step, own), (at, others) in zip(values, alone, strict=True):
            assert step == at and own == pytest.approx(others, rel=1e-3)


def _draft(model: tuple[str, str], tasks: str, output: str, options: dict[str, Any]) -> None:
    _alone()
    own = ModelOptions(
        checkpoint=model[0],
        tokenizer_model=model[1],
        tokenizer_type="huggingface",
        device="cpu",
        **options,
    )
    evaluate(own, ["lines_choice", "lines_text"], include_path=tasks, output=output)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [{}, {TP: 2}])
def test_drafts_change_no_value(layout: dict[str, Any], tmp_path: Path) -> None:
    """fp32, sums of some log-probabilities: 1e-6."""
    model = make_drafting(tmp_path)
    tasks = write_tasks(tmp_path / "tasks")
    found = []
    for name, options in (("plain", {}), ("drafts", {"draft_tokens": 2, **layout})):
        output = tmp_path / f"{name}.json"
        run_ranks(1, _draft, model, tasks, str(output), options, timeout_s=250)
        results = json.loads(output.read_text())["results"]
        values = {
            (task, key): value
            for task, own in results.items()
            for key, value in own.items()
            if isinstance(value, float)
        }
        found.append(values)
    assert len(found[0]) > 2
    assert found[1] == pytest.approx(found[0], rel=1e-6)
