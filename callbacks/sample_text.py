"""Text written by the model during training, in every logger."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from megatron_lightning.callbacks.text_callback import TextCallback
from megatron_lightning.data.images.image_prompts import Prompt
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.evaluate import drafts_of, sharing_of
from megatron_lightning.inference.commands.text_codec import Codec, prompt_ids
from megatron_lightning.inference.engine.continuation import final_text
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.uncached_loop import Sampling, check_num_samples
from megatron_lightning.inference.live.live_codec import find_image_prompts


class SampleText(TextCallback):
    """Continue prompts after each validation, or every so many optimizer steps, and log the texts.

    On every layout the texts equal the texts of one device. Writing leaves the training unchanged:
    losses are bit-equal, and memory is freed. Data-parallel ranks share the prompts.

    Texts go to TensorBoard, Weights & Biases, MLflow, Comet and Neptune as text, beside a
    CSVLogger's metrics into ``texts.jsonl``, and without a logger to the terminal. With
    ``EngineOptions(draft_tokens=…)`` the accepted share of drafts goes to the loggers as a metric
    ``<name>_draft_acceptance``.

    Args:
        prompts: Texts to continue.
        every_n_steps: Optimizer steps between two writings. None: after each validation.
        max_new_tokens: Tokens added to each prompt, at most.
        temperature: Divides the logits. 0 always takes the most likely token.
        top_k: Choose among this many of the most likely tokens. None: all.
        top_p: Choose among the most likely tokens with this probability in total.
        seed: Seed of the draws, the same each time.
        stop: Strings at the end of a text.
        num_samples: Texts of each prompt.
        chat: Whether each prompt is a user's message for the chat template.
        tokenizer_model: The tokenizer. None: the tokenizer saved with the model, or the data
            module's.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        name: Name in the loggers.
        options: Sizes of the engine. None: the defaults.
        images: Image files before each prompt, with ``chat``: a list for each prompt, which may be
            empty. Sound files if the model reads sounds and no images. None: prompts are text.

    Raises:
        ConfigError: If a value cannot work.
    """

    def __init__(  # noqa: PLR0917  # every one is a line of a YAML file
        self,
        prompts: list[str],
        every_n_steps: int | None = None,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 1234,
        stop: list[str] | None = None,
        num_samples: int = 1,
        chat: bool = False,
        tokenizer_model: str | None = None,
        tokenizer_type: TokenizerType = "sentencepiece",
        name: str = "text",
        options: EngineOptions | None = None,
        images: list[list[str]] | None = None,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(
                f"prompts is {prompts!r}; SampleText continues a list of texts. Set it to one, "
                "such as ['Once upon a time']."
            )
        super().__init__(every_n_steps, tokenizer_model, tokenizer_type, options)
        check_num_samples(num_samples)
        if images and (not chat or len(images) != len(prompts)):
            raise ConfigError(
                f"images has {len(images)} lists for {len(prompts)} prompts, and chat is {chat}. "
                "Set chat, and a list of files for each prompt."
            )
        self._images = images or [[] for _ in prompts]
        self._prompts = list(prompts)
        self._sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
        )
        self._num_samples = num_samples
        self._chat = chat
        self._name = name
        self.texts: list[tuple[int, list[list[str]]]] = []
        """Optimizer step, and the texts of each prompt, of each writing of this fit."""
        self.acceptance: list[tuple[int, float]] = []
        """Optimizer step, and the accepted share of drafts, of each writing with drafts."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin anew. Texts of a fit stay until the next fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.texts = []
            self.acceptance = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write, unless every so many steps."""
        self._compute_at_validation(trainer, pl_module)

    def _compute(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        codec, engine = self._codec_and_engine(trainer, module)
        prompts = self._made_prompts(module, codec)
        replicas = sharing_of(engine)
        own_prompts = list(enumerate(prompts))[replicas.rank :: replicas.size]
        texts = replicas.all_gather_object(self._continued(engine, codec, own_prompts))
        by_prompt: Mapping[int, list[str]] = {i: t for part in texts for i, t in part.items()}
        rows = [by_prompt[index] for index in range(len(prompts))]
        self.texts.append((trainer.global_step, rows))
        drafts = drafts_of(engine, replicas)
        if drafts.proposed:
            self.acceptance.append((trainer.global_step, drafts.acceptance))
        if trainer.is_global_zero:
            self._log(trainer, rows)
            for logger in trainer.loggers if drafts.proposed else ():
                values = {f"{self._name}_draft_acceptance": drafts.acceptance}
                logger.log_metrics(values, trainer.global_step)

    def _made_prompts(self, module: pl.LightningModule, codec: Codec) -> list[Prompt]:
        """Return the prompts.

        Raises:
            ConfigError: If prompts have images, and the model reads text alone.
        """
        maker = find_image_prompts(module, codec) if any(self._images) else None
        if maker is None and any(self._images):
            raise ConfigError(
                "images of SampleText is set, and the model reads text alone. Leave images out."
            )
        return [
            Prompt(prompt_ids(codec, text, as_chat=self._chat))
            if maker is None or not images
            else maker.of_question(text, images)
            for text, images in zip(self._prompts, self._images, strict=True)
        ]

    def _continued(
        self, engine: Any, codec: Codec, prompts: Sequence[tuple[int, Prompt]]
    ) -> dict[int, list[str]]:
        """Return the texts of a group of prompts by prompt index, each with its own seeds."""
        rows = engine.generate(
            [prompt.ids for _, prompt in prompts],
            self._sampling,
            self._num_samples,
            seeds=[self._sampling.seed + index * self._num_samples for index, _ in prompts],
            images=[prompt.entries for _, prompt in prompts],
        )
        stop = self._sampling.stop
        return {
            index: [final_text(codec.decode, prompt.ids, one.tokens, stop) for one in row]
            for (index, prompt), row in zip(prompts, rows, strict=True)
        }

    def _log(self, trainer: pl.Trainer, rows: Sequence[Sequence[str]]) -> None:
        pairs = [(p, text) for p, texts in zip(self._prompts, rows, strict=True) for text in texts]
        columns = [
            log_texts(logger, self._name, pairs, trainer.global_step) for logger in trainer.loggers
        ]
        if not any(columns):
            for prompt, text in pairs:
                print(
                    f"step {trainer.global_step}, {self._name}: {prompt!r} -> {text!r}", flush=True
                )


def log_texts(logger: Logger, name: str, pairs: Sequence[tuple[str, str]], step: int) -> bool:
    """Give prompts with texts to a logger. Return whether the logger takes text."""
    run: Any = getattr(logger, "experiment", None)
    text_only = "\n\n".join(f"{prompt}{text}" for prompt, text in pairs)
    writers: dict[str, Callable[[], object]] = {
        "TensorBoardLogger": lambda: run.add_text(name, _as_markdown(pairs), step),
        "WandbLogger": lambda: logger.log_text(  # type: ignore[attr-defined]
            name, columns=["prompt", "text"], data=[list(pair) for pair in pairs], step=step
        ),
        "MLFlowLogger": lambda: run.log_text(logger.run_id, text_only, f"{name}/{step}.txt"),  # type: ignore[attr-defined]
        "CometLogger": lambda: run.log_text(text_only, step=step, metadata={"name": name}),
        "NeptuneLogger": lambda: run[f"{name}"].append(text_only, step=step),
        "CSVLogger": lambda: _append(Path(logger.log_dir or "."), name, pairs, step),
    }
    writer = next(
        (writers[base.__name__] for base in type(logger).__mro__ if base.__name__ in writers), None
    )
    if writer is None:
        return False
    writer()
    return True


def _as_markdown(pairs: Sequence[tuple[str, str]]) -> str:
    """Return prompts and texts as indented blocks, without markup inside of a block."""
    blocks = [f"{prompt}⟶{text}" for prompt, text in pairs]
    return "\n\n---\n\n".join("    " + block.replace("\n", "\n    ") for block in blocks)


def _append(folder: Path, name: str, pairs: Sequence[tuple[str, str]], step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "texts.jsonl").open("a", encoding="utf-8") as file:
        for prompt, text in pairs:
            row = {"step": step, "name": name, "prompt": prompt, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
