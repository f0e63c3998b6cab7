"""``megatron-lightning generate``: continue prompts with a trained model, on a single process or on
a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.conversations import Chat, parse_row
from megatron_lightning.data.images.image_parts import WORDS, has_images
from megatron_lightning.data.images.image_prompts import ImagePrompts, Prompt
from megatron_lightning.data.rows.sources import read_rows
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.inference.commands.load import find_image_prompts
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.text_codec import Codec, chat_template, prompt_ids
from megatron_lightning.inference.commands.text_job import ModelJob
from megatron_lightning.inference.commands.text_progress import Progress
from megatron_lightning.inference.engine.continuation import final_text
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.inference.engine.uncached_loop import Sampling, check_num_samples


def generate(  # noqa: PLR0917  # every argument is an option of the command line
    model: ModelOptions,
    prompts: list[str] | str | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 1234,
    chat: bool = False,
    stop: list[str] | None = None,
    num_samples: int = 1,
    images: list[str] | None = None,
    messages: str | None = None,
    audio: list[str] | None = None,
) -> list[str]:
    """Continue prompts with a trained model.

    The checkpoint may come from any layout. The sizes given here are for generation. The same seed
    gives the same text on every layout. Keys and values of earlier tokens are cached. A text longer
    than the model's longest sequence continues from its last tokens, without the cache.

    Args:
        model: The model, its tokenizer, layout and engine.
        prompts: A text, or a list of texts, to continue.
        max_new_tokens: Tokens added to each prompt, at most. An end-of-document token ends a text
            earlier.
        temperature: Divides the logits. 0 always takes the most likely token.
        top_k: Choose among this number of the most likely tokens. Default: all.
        top_p: Choose among the most likely tokens with this total probability.
        seed: Seed of the draws.
        chat: Send each prompt as a user's message through the chat template, and print the answer
            alone.
        stop: Strings at the end of a text. The text is returned without a stop string.
        num_samples: Texts of each prompt.
        images: Image files before the text of each prompt, with ``chat``.
        messages: File of conversations to answer, a JSON object with ``messages`` a line. Images
            and sounds are parts, as in training data.
        audio: Sound files before the text of each prompt, with ``chat``.

    Returns:
        Each prompt with the continuation, or with ``chat`` the answers. Nothing on ranks of
        torchrun other than the first.

    Raises:
        ConfigError: If the values cannot work together, before any process is started.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    files = _Files.of(images, audio)
    _check_prompts(prompts, files, messages, chat=chat)
    job = ModelJob(model)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    check_num_samples(num_samples)
    job.check()
    texts = [prompts] if isinstance(prompts, str) else prompts or []
    # Texts become tokens here: ranks receive and return numbers alone.
    if messages is not None:
        ids = _conversations(model.checkpoint, job.codec, messages)
    elif files.paths:
        maker = find_image_prompts(model.checkpoint, job.codec, files.kind)
        files.check_kind(maker)
        ids = [maker.of_question(text, files.paths) for text in texts]
    else:
        ids = [Prompt(prompt_ids(job.codec, text, as_chat=chat)) for text in texts]
    continued = job.run(_continue, (ids, sampling, num_samples)) or []
    answers_only = chat or messages is not None
    return [
        _text(job.codec, prompt.ids, new_ids, sampling.stop, answer_only=answers_only)
        for prompt, samples in zip(ids, continued, strict=False)
        for new_ids in samples
    ]


class _Files(NamedTuple):
    """Files before the text of each prompt."""

    option: str
    kind: str
    paths: Sequence[str]

    @classmethod
    def of(cls, images: Sequence[str] | None, audio: Sequence[str] | None) -> _Files:
        """Return the files of the options.

        Raises:
            ConfigError: If both are set.
        """
        if images and audio:
            raise ConfigError("images and audio are both set; leave one out.")
        return cls("audio", "audio", audio) if audio else cls("images", "image", images or ())

    def check_kind(self, maker: ImagePrompts) -> None:
        """Check that the model reads such files.

        Raises:
            ConfigError: If it does not.
        """
        kind = maker.processor.kind
        if kind != self.kind:
            raise ConfigError(
                f"{self.option}={list(self.paths)} is set, and the model reads {WORDS[kind]}s; "
                f"leave {self.option} out."
            )


def _check_prompts(
    prompts: list[str] | str | None, files: _Files, messages: str | None, *, chat: bool
) -> None:
    """Check that one option names the prompts.

    Raises:
        ConfigError: If none does, or several.
    """
    if (prompts is None) == (messages is None):
        raise ConfigError(
            "prompts and messages are both set; leave one out."
            if messages is not None
            else "there is nothing to continue; set prompts, or messages to a file."
        )
    if files.paths and (not chat or prompts is None):
        raise ConfigError(
            f"{files.option}={list(files.paths)} belong to a user's message of a chat; set chat, "
            "and prompts to the question. With messages, they are parts of the conversations."
        )


def _conversations(checkpoint: str, codec: Codec, file: str) -> list[Prompt]:
    """Return the prompts of the conversations in a file."""
    folder, found = Path(file).resolve().parent, list[Prompt]()
    makers = dict[str, ImagePrompts]()  # by kind: a model may read images and sounds
    template: ChatTemplate | None = None
    for row in read_rows(file):
        if row.error is not None:
            raise row.error
        if "messages" not in row.fields:
            raise DataError(f"{row.where}: there is no key messages; a row is a conversation")
        chat = parse_row(row)
        if not isinstance(chat, Chat):
            raise DataError(f"{row.where}: messages stand beside input_ids; leave one of them out")
        if has_images(row.fields):
            kind = chat.images[0].kind if chat.images else "image"
            if kind not in makers:
                makers[kind] = find_image_prompts(checkpoint, codec, kind)
            found.append(makers[kind].of_chat(chat, folder))
        else:
            template = template or chat_template(codec)
            found.append(Prompt(codec.ids(template.prompt(chat), special=False)))
    if not found:
        raise DataError(f"messages={file}: the file has no row")
    return found


def _text(
    codec: Codec, prompt: list[int], new: list[int], stop: Sequence[str], *, answer_only: bool
) -> str:
    """Return a prompt with the continuation, or the continuation alone, up to a stop string."""
    text = final_text(codec.decode, prompt, new, stop)
    return text if answer_only else codec.decode(prompt) + text


def _continue(engine: TextModel, codec: Codec, arguments: Any) -> list[list[list[int]]]:
    """Return the new tokens of each prompt's samples, on a single rank."""
    prompts, sampling, num_samples = arguments
    ids, entries = [one.ids for one in prompts], [one.entries for one in prompts]
    most = len(prompts) * num_samples * sampling.max_new_tokens
    shows = engine.context.rank == 0
    with Progress("generating", most, shows=shows, drafts=engine.draft_counts) as progress:
        completions = engine.generate(
            ids, sampling, num_samples, images=entries, observe=progress.show
        )
    return [[one.tokens for one in samples] for samples in completions]
