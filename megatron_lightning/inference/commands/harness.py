"""lm-evaluation-harness over an engine: tasks, metrics and tables on any layout.

Every rank runs the harness on all requests. Replicas share the work inside of each call and
exchange the results, so that all ranks have all results. Texts are encoded and cut as in the
harness's own ``hf`` model, and give equal values.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_lightning.data.images.image_parts import TAG
from megatron_lightning.data.images.image_prompts import ImagePrompts, Prompt
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.text_codec import Codec, Message
from megatron_lightning.inference.engine.continuation import final_text
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.optional import missing
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.printed_json import json_text

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as error:
    raise missing("lm_eval", "evaluation by lm-evaluation-harness", error=error) from error

Item = TypeVar("Item")
Result = TypeVar("Result")
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_MOST_NEW_TOKENS = 256  # the harness's default
_IGNORED = ("until", "do_sample", "use_cache")


@dataclass(frozen=True)
class _Writing:
    """A request for a text."""

    prompt: str
    options: Mapping[str, Any]
    repeat: int
    """Number of equal requests before."""
    pictures: Sequence[Any] = ()
    """Pictures of Pillow at each ``<image>`` of the prompt."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """An engine as a model of lm-evaluation-harness.

    Args:
        engine: The engine. All ranks of a replica make the same calls.
        codec: The tokenizer.
        replicas: Ranks sharing the work.
        images: Makes prompts with images. None, or of sounds: tasks are of text alone.
    """

    def __init__(
        self,
        engine: TextModel,
        codec: Codec,
        replicas: AxisGroup,
        images: ImagePrompts | None = None,
    ) -> None:
        super().__init__()
        self._images = images if images and images.processor.kind == "image" else None
        self.MULTIMODAL = self._images is not None  # the harness's name
        self.engine = engine
        self.codec = codec
        self.tokenizer = getattr(codec, "tokenizer", None)
        self._replicas = replicas
        self._device = engine.context.device

    @property
    def eot_token_id(self) -> int:
        """Token at the end of a text."""
        return self.codec.stops[0]

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context."""
        return self.codec.prefix

    @property
    def max_length(self) -> int:
        """Most input tokens of the model."""
        return self.engine.longest

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return self.codec.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text. A text beginning with BOS gets no second BOS."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.codec.text_of(self.codec.prefix))
        return self.codec.ids(string, special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a text."""
        has_image = any(TAG in str(message.get("content")) for message in chat_history)
        if self._images is not None and has_image and add_generation_prompt:
            return self._images.text(chat_history)
        return self.codec.chat_text(chat_history, continues=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, for the record."""
        if self.tokenizer is None:
            return ""
        template: str | None = super().chat_template(chat_template)
        return template

    def _shared(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]
    ) -> list[Result]:
        """Return the results of all items. Each replica computes a share."""
        rank, size = self._replicas.rank, self._replicas.size
        parts = self._replicas.all_gather_object(list(work(items[rank::size])))
        return [parts[index % size][index // size] for index in range(len(items))]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether the continuation is greedy.

        Raises:
            ConfigError: If a request has images or sounds.
        """
        if any(_pictures(request) for request in requests):
            raise ConfigError(
                "the task scores answers about images by their likelihood, and models write such "
                "answers here. Choose a task of the output_type generate_until."
            )
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether the continuation is greedy.
        Requests with the same context go to the same replica, which computes the context once.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            context = request[1]
            # A single token, as before a text without context, is no work to share.
            key = tuple(context) if len(context) > 1 else (-1 - index,)
            groups.setdefault(key, []).append(index)

        def score(own: Sequence[list[int]]) -> list[list[tuple[float, bool]]]:
            indices = [index for group in own for index in group]
            scores = self.engine.score(
                [requests[index][1] for index in indices],
                [requests[index][2] for index in indices],
            )
            values = ((score.logprob, score.is_greedy) for score in scores)
            return [list(islice(values, len(group))) for group in own]

        results = self._shared(list(groups.values()), score)
        found = dict[int, tuple[float, bool]]()
        for group, values in zip(groups.values(), results, strict=True):
            found.update(zip(group, values, strict=True))
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        pairs = [(None, *window) for of_text in windows for window in of_text]
        scores = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to the first of the text's stop strings."""
        counts = Counter[str]()
        items = []
        for request in requests:
            prompt, options = request.args[:2]
            pictures = _pictures(request)
            # A task with repeats sends equal requests, and expects different draws.
            digests = [hashlib.sha256(one.tobytes()).hexdigest() for one in pictures]
            key = json.dumps([prompt, options, digests], sort_keys=True, default=str)
            items.append(_Writing(prompt, options, counts[key], pictures))
            counts[key] += 1
        return self._shared(items, self._texts)

    def _texts(self, items: Sequence[_Writing]) -> list[str]:
        """Return continuations. Requests with equal options are computed together."""
        texts = [""] * len(items)
        groups: dict[Sampling, list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault(self._sampling(item.options), []).append(index)
        for sampling, indices in groups.items():
            room = self.max_length - sampling.max_new_tokens
            found = [self._prompt(items[index], room) for index in indices]
            prompts, images = [one.ids for one in found], [one.entries for one in found]
            seeds = [
                _seed(sampling.seed, prompt, items[index].repeat)
                for prompt, index in zip(prompts, indices, strict=True)
            ]
            for index, [one] in zip(
                indices,
                self.engine.generate(prompts, sampling, seeds=seeds, images=images),
                strict=True,
            ):
                # As the harness's own models decode: without the prompt.
                texts[index] = final_text(self.codec.decode, (), one.tokens, sampling.stop)
        return texts

    def _prompt(self, item: _Writing, room: int) -> Prompt:
        """Return the ids of a prompt, and the entries of its images. Text is cut from the left.

        Raises:
            ConfigError: If a prompt with images is too long.
        """
        if not item.pictures or self._images is None:
            return Prompt(self.tok_encode(item.prompt)[-room:] or [self.prefix_token_id])
        prompt = self._images.of_text(item.prompt, item.pictures)
        if len(prompt.ids) > room:
            raise ConfigError(
                f"a prompt of the task has {len(prompt.ids)} tokens with its images, and "
                f"{room} fit beside the answer. Lower max_gen_toks, or take smaller images."
            )
        return prompt

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        """Return the harness's options of a request in our words.

        Raises:
            ConfigError: For options unknown to the engine.
        """
        until = options.get("until") or []
        # Tasks name the number of new tokens in several ways, as the harness's own models read it.
        most = next((int(options[name]) for name in _NEW_TOKENS if options.get(name)), None)
        draws = options.get("do_sample", float(options.get("temperature", 0.0)) > 0.0)
        known_names = {"temperature", "top_p", "top_k", *_NEW_TOKENS, *_IGNORED}
        unknown = [name for name in options if name not in known_names]
        if unknown:
            raise ConfigError(
                f"the task's generation_kwargs have {', '.join(unknown)}, which the engine does "
                "not have. Leave them out of the task's YAML file, or evaluate the exported folder "
                "with lm_eval's own models."
            )
        if most is None:
            most = min(_MOST_NEW_TOKENS, self.max_length // 2)
        if most >= self.max_length:
            raise ConfigError(
                f"max_gen_toks={most} leaves no room for a prompt in the {self.max_length} tokens "
                "that the model sees. Lower it in the task's generation_kwargs."
            )
        return Sampling(
            max_new_tokens=most,
            temperature=float(options.get("temperature", 1.0)) if draws else 0.0,
            top_k=options.get("top_k") or None,
            top_p=float(options.get("top_p", 1.0)),
            stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
        )


def evaluate_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    limit: float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    include_path: str | None = None,
    confirm_run_unsafe_code: bool = False,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Return the harness's results, on every rank. Random generators keep their states.

    Args:
        model: The model.
        tasks: Names of tasks and groups.
        limit: Documents of each task, or a fraction below 1. None: all.
        num_fewshot: Examples before each document. None: the task's own number.
        apply_chat_template: Whether documents go through the chat template.
        include_path: Folder with tasks of your own.
        confirm_run_unsafe_code: Whether tasks may run code written by the model.
        log_samples: Whether results hold each document's answer.

    Raises:
        ConfigError: If there is no such task.
    """
    manager = _task_manager(tasks, include_path)
    with _random_states_kept(), model.engine.active():
        results = simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            task_manager=manager,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            log_samples=log_samples,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
    # The harness gives results to the first rank of a node.
    shared_results: dict[str, Any] = model.engine.context.axis("world").broadcast_object(results)
    return shared_results


def _task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return the harness's list of tasks: only tasks of the folder, if sufficient.

    Raises:
        ConfigError: If there is no such task.
    """
    unknown: list[str] = []
    # Reading the thousands of tasks shipped with the harness takes many seconds.
    for has_defaults in (False, True) if include_path else (True,):
        manager = TaskManager(include_path=include_path, include_defaults=has_defaults)
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise ConfigError(
        f"lm_eval knows no task {', '.join(unknown)}. Set include_path to the folder with tasks of "
        "your own, or choose one that `lm_eval ls tasks` lists."
    )


def values_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return ``task/metric`` -> value, of tasks and groups."""
    values: dict[str, float] = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if isinstance(value, float | int) and not metric.endswith("_stderr"):
                name = (
                    f"{task}/{metric}"
                    if filter_name in ("", "none")
                    else f"{task}/{metric},{filter_name}"
                )
                values[name] = float(value)
    return {name: value for name, value in values.items() if not name.endswith("/sample_len")}


def table_of(results: Mapping[str, Any]) -> str:
    """Return the harness's tables of tasks and groups."""
    groups = [make_table(results, "groups")] if results.get("groups") else []
    return "\n".join([make_table(results), *groups])


def write_results(results: Mapping[str, Any], path: str) -> None:
    """Write results as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"{json_of(results)}\n")


def json_of(results: Mapping[str, Any]) -> str:
    """Return results as JSON."""
    return json_text(results, default=str)


def _pictures(request: Any) -> Sequence[Any]:
    """Return the pictures of a request of the harness.

    Raises:
        ConfigError: If the request has sounds.
    """
    further: Mapping[str, Any] = request.args[2] if len(request.args) > 2 else {}
    if further.get("audio") is not None:
        raise ConfigError(
            "the task asks about sounds (doc_to_audio), and tasks ask about text and images here. "
            "Leave the task out, or ask about sounds by generate --messages."
        )
    return list(further.get("visual") or ())


def _seed(seed: int, prompt: Sequence[int], repeat: int) -> int:
    """Return the seed of a request's draws. The place among other requests does not count, so that
    replicas and limits draw the same texts.
    """
    digest = hashlib.sha256(repr((seed, list(prompt), repeat)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the default random generators after the block: the harness seeds the generators."""
    python, of_numpy = random.getstate(), np.random.get_state()
    # Without a GPU there is nothing to keep. With a GPU the GPU's generators are seeded as well.
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)
