"""Load the model in a checkpoint or a Hugging Face folder into the layout of the running
processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.left_out import refuse_partial
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.auto import AutoBridge, is_checkpoint
from megatron_lightning.bridge.folders.folder_record import read_kept
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.hf_models.meta_models import deferred_weights
from megatron_lightning.bridge.hf_models.transformers_model import read_weights
from megatron_lightning.bridge.low_bit.rounded_tensors import layers_of_gpt
from megatron_lightning.checkpoint import CheckpointSource, open_checkpoint
from megatron_lightning.checkpoint.kept_files import (
    KeptFiles,
    read_kept_files,
    read_kept_tokenizer,
)
from megatron_lightning.checkpoint.text_record import end_tokens, read_texts
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.config.class_paths import config_of_checkpoint
from megatron_lightning.data.images.image_prompts import ImagePrompts, prompts_if_any
from megatron_lightning.data.images.processor_parts import NoProcessorError
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import (
    CheckpointError,
    ConfigError,
    MissingCheckpointError,
)
from megatron_lightning.file_names import ADAPTER_CONFIG, CONFIG, SENTENCEPIECE
from megatron_lightning.inference.commands.model_options import Dtype
from megatron_lightning.inference.commands.text_codec import (
    Codec,
    codec_of_files,
    end_tokens_of,
    load_codec,
)
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.expert_routes import refuse_routes
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.requests import Decode, RequestMaker
from megatron_lightning.inference.engine.speculative import check_drafts
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import ALONE, ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.peft import load_adapters
from megatron_lightning.peft.base_digest import check_loaded_base
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.methods.table import method_of
from megatron_lightning.peft.record import read_records
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.precision.served.layer_inputs import NOT_ROUNDED, LayerInputs
from megatron_lightning.precision.served.qat import qat_of, read_qat
from megatron_lightning.rules import check_model_layout

_PREFIX = "state_dict.model."
"""Prefix of the model's names in a checkpoint of ``GPTLightningModule``."""
_Fill = Callable[[nn.Module, Part, ParallelContext], object]


@dataclass(frozen=True)
class SavedModel:
    """A saved model."""

    config: TransformerConfig | None
    """Sizes of a :class:`GPTModel`. None: the model's own ``generate`` is used."""
    vocab_size: int
    """Number of token ids."""
    longest: int
    """Most input tokens of the model."""
    build: Callable[[], nn.Module]
    """Returns the model on ``meta``."""
    fill: _Fill
    """Reads the weights of a rank's part, after the model is sharded."""
    refusal: str | None = None
    """Why the model cannot be a :class:`GPTModel`. None: the model is a :class:`GPTModel`."""


def read_config(checkpoint: str | os.PathLike[str]) -> TransformerConfig:
    """Return the configuration of the :class:`GPTModel` in a checkpoint, without reading tensors.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or holds no such model.
    """
    config = find_model(checkpoint).config
    if config is None:
        raise CheckpointError(f"{checkpoint} holds another model than a GPTModel.")
    return config


def find_model(
    checkpoint: str | os.PathLike[str],
    context: ParallelContext | None = None,
    *,
    adapters: str | os.PathLike[str] | None = None,
) -> SavedModel:
    """Return the model in a checkpoint, a Hugging Face folder, or of a Hub id, without reading
    tensors of the model. With a context a collective.

    Args:
        checkpoint: The model.
        context: Groups of this rank. None: this process alone.
        adapters: Folder of ``peft``, or checkpoint, with adapters for the model.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or holds another kind of model.
    """
    saved = _find_model(checkpoint, context)
    return saved if adapters is None else _with_adapters(saved, adapters)


def _find_model(checkpoint: str | os.PathLike[str], context: ParallelContext | None) -> SavedModel:
    is_hub_id = not is_checkpoint(str(checkpoint)) and not Path(checkpoint).exists()
    if is_hub_id or (Path(checkpoint) / CONFIG).is_file():
        return _of_bridge(AutoBridge.from_hf_pretrained(str(checkpoint)))
    source = open_checkpoint(checkpoint, group=ALONE if context is None else context.axis("world"))
    saved = source.state().get("hyper_parameters", {})
    _check_base(source, str(checkpoint))
    if isinstance(saved.get("config"), Mapping):
        return _of_checkpoint(source, saved)
    if (entry := read_kept(checkpoint)) is not None:
        trained = read_qat(source.state(), str(checkpoint)).get(entry[1])
        bridge = AutoBridge.from_checkpoint(checkpoint, rounds=True)
        if trained is not None:  # adapters inside of the rounding are in the weights
            return _of_bridge(bridge, trained.inputs)
        model = _of_bridge(bridge)
        has_adapters = bool(list(read_records(source.state(), str(checkpoint))))
        return _with_adapters(model, checkpoint) if has_adapters else model
    raise CheckpointError(
        f"{checkpoint} has no hyper_parameters.config that describes a model: it was not saved by "
        "GPTLightningModule or HuggingFaceModule. Give the checkpoint of one, or call "
        "megatron_lightning.inference.sample with a model of your own."
    )


def _check_base(source: CheckpointSource, checkpoint: str) -> None:
    """Check that a checkpoint leaves no weights out."""
    for record in read_records(source.state(), checkpoint):
        if record.left_out:
            origin = record.base.origin or "BASE"
            raise CheckpointError(
                f"{checkpoint} holds adapters alone, without the {len(record.left_out)} tensors of "
                f"their base. Name both: --checkpoint {origin} --adapters {checkpoint}."
            )
    refuse_partial(source.state(), checkpoint)


def _of_checkpoint(source: CheckpointSource, saved: Mapping[str, Any]) -> SavedModel:
    config = config_of_checkpoint(saved["config"])
    records = read_records(source.state(), "the checkpoint")
    adapters = next((record.applied.method for record in records), None)
    if adapters is None and saved.get("peft") is not None:  # saved by Lightning's own strategy
        adapters = method_of(saved["peft"])

    trained = next(iter(read_qat(source.state(), "the checkpoint").values()), None)

    def build() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = GPTModel(config)
            if trained is not None:
                trained.apply(model)
            return model if adapters is None else adapters.apply(model)

    def fill(model: nn.Module, part: Part, context: ParallelContext) -> None:
        state = ModuleState(model, part, context)
        names = state.local_tensors() if adapters is None else ()
        loaded_apart = {name for name in names if ".adapters." in name}
        state.load_module(source, prefix=_PREFIX, left_out=loaded_apart)

    return SavedModel(config, config.vocab_size, config.max_sequence_length, build, fill)


def _with_adapters(saved: SavedModel, adapters: str | os.PathLike[str]) -> SavedModel:
    """Return the model with adapters loaded. The adapters' base is checked by digest."""

    def build() -> nn.Module:
        model = saved.build()
        if applied_to(model):
            raise ConfigError(
                f"adapters={adapters}, and the model has adapters of its own, which are loaded "
                "with it. Merge those first (megatron-lightning adapters merge), or leave the "
                "option out."
            )
        try:
            return load_adapters(model, adapters)
        except MissingCheckpointError:
            raise
        except (CheckpointError, ConfigError) as error:
            raise type(error)(
                f"{error} If the adapters belong to this base, merge them into it "
                "(megatron-lightning adapters merge), and name the merged folder."
            ) from error

    def fill(model: nn.Module, part: Part, context: ParallelContext) -> None:
        saved.fill(model, part, context)
        check_loaded_base(ModuleState(model, part, context))

    return replace(saved, build=build, fill=fill)


def _of_bridge(bridge: AutoBridge, inputs: LayerInputs = NOT_ROUNDED) -> SavedModel:
    """Return the model of a bridge.

    Args:
        bridge: The bridge.
        inputs: Rounded inputs, by the layers of the untouched model.
    """
    try:
        config = bridge.to_config()
        own_inputs = inputs.renamed(layers_of_gpt(bridge)) if inputs.forms else inputs
    except ConfigError as error:  # no rules for the architecture, or for the settings
        text = bridge.config.get_text_config()  # of a model with a tower
        longest = getattr(text, "max_position_embeddings", None) or 1 << 30
        build = partial(_deferred, bridge, "transformers", inputs)
        vocab_size = text.vocab_size
        return SavedModel(None, vocab_size, longest, build, read_weights, refusal=str(error))
    build = partial(_deferred, bridge, "gpt", own_inputs)
    return SavedModel(config, config.vocab_size, config.max_sequence_length, build, read_weights)


def _deferred(
    bridge: AutoBridge, kind: Literal["gpt", "transformers"], inputs: LayerInputs
) -> nn.Module:
    """Return a model on ``meta``. When the model is sharded, each rank reads local shards."""
    with deferred_weights():
        return inputs.apply(bridge.to_model(kind))


def find_codec(
    checkpoint: str | os.PathLike[str], adapters: str | os.PathLike[str] | None = None
) -> Codec:
    """Return the codec of the tokenizer saved with a model.

    Args:
        checkpoint: The model.
        adapters: Folder of ``peft``, or checkpoint, with adapters for the model. Their tokenizer
            and template win, since training taught them last.

    Raises:
        ConfigError: If there is none.
        CheckpointError: If the checkpoint cannot be read.
    """
    codec = None if adapters is None else _codec_of_adapters(adapters)
    if codec is not None:
        return codec
    if not is_checkpoint(str(checkpoint)):
        return load_codec(str(checkpoint), "huggingface")
    files = read_texts(checkpoint)
    codec = None if files is None else codec_of_files(files, str(checkpoint))
    tokenizer_files = read_kept_tokenizer(checkpoint) if codec is None else None
    if tokenizer_files is not None:
        kind, name, contents = tokenizer_files
        with contents.unpacked() as folder:
            files_there = {"sentencepiece": folder / SENTENCEPIECE}
            model = files_there.get(kind, folder) if contents.contents else name
            codec = load_codec(str(model), cast(TokenizerType, kind))
    if codec is None:
        raise ConfigError(
            f"{checkpoint} has no tokenizer of its own. Set tokenizer_model to the tokenizer that "
            "made the training data."
        )
    return codec


def _codec_of_adapters(adapters: str | os.PathLike[str]) -> Codec | None:
    """Return the codec of the tokenizer saved with adapters. None: there is no tokenizer."""
    is_folder = (Path(adapters) / ADAPTER_CONFIG).is_file()
    files = KeptFiles.of_folder(Path(adapters)) if is_folder else read_texts(adapters)
    return None if files is None else codec_of_files(files, str(adapters))


def find_image_prompts(
    checkpoint: str | os.PathLike[str], codec: Codec, kind: str = "image", **limits: int | None
) -> ImagePrompts:
    """Return the maker of prompts with images, or sounds, of a model.

    Args:
        checkpoint: The model.
        codec: Codec of its tokenizer.
        kind: ``image`` or ``audio``, of models that read both.
        limits: See :class:`ImagePrompts`.

    Raises:
        ConfigError: If the model has no processor of images or sounds.
        CheckpointError: If the checkpoint cannot be read.
    """
    tokenizer = getattr(codec, "tokenizer", None)
    with ExitStack() as stack:
        if not is_checkpoint(str(checkpoint)):
            folder = local_folder(str(checkpoint), weights=False)
        elif (files := read_kept_files(checkpoint)) is not None:
            folder = stack.enter_context(files.unpacked())
        else:
            tokenizer = None
        if tokenizer is None:
            raise NoProcessorError(
                f"{checkpoint} has no processor of images or sounds: it is no model of "
                "transformers with a tower. Leave images and sounds out, or name such a model."
            )
        return ImagePrompts.load(folder, tokenizer, kind, **limits)


def image_prompts_of(
    engine: TextModel,
    checkpoint: str | os.PathLike[str],
    codec: Codec,
    **limits: int | None,
) -> ImagePrompts | None:
    """Return the maker of prompts with images of a loaded model. None: the model reads text alone.
    See :func:`find_image_prompts`.
    """
    if not isinstance(engine, OwnGenerate):
        return None
    return prompts_if_any(lambda: find_image_prompts(checkpoint, codec, "image", **limits))


def find_stops(
    checkpoint: str | os.PathLike[str], adapters: str | os.PathLike[str] | None = None
) -> tuple[int, ...]:
    """Return the end tokens of a model's generation configuration, and of its adapters. Many chat
    models have several. Without a generation configuration return none.
    """
    own: tuple[int, ...] = ()
    if not is_checkpoint(str(checkpoint)):
        own = end_tokens_of(str(checkpoint))
    elif (files := read_texts(checkpoint)) is not None:
        own = end_tokens(files.contents)
    return own if adapters is None else tuple(dict.fromkeys([*own, *find_stops(adapters)]))


def load_engine(
    checkpoint: str | os.PathLike[str],
    layout: ParallelLayout | None = None,
    *,
    adapters: str | os.PathLike[str] | None = None,
    options: EngineOptions | None = None,
    pipeline_schedule: str | list[str] = "auto",
    device: torch.device | str = "cpu",
    dtype: Dtype | None = None,
    stops: Sequence[int] | None = None,
    decode: Decode | None = None,
) -> TextModel:
    """Return an engine for a saved model. See :meth:`Engine.load`. For a model not supported by the
    engine the model's own ``generate`` is used.
    """
    layout = layout or ParallelLayout()
    choice = resolve(pipeline_schedule, num_ranks=layout.pp, num_chunks=layout.vpp)
    context = ParallelContext(layout, device=device)
    saved = find_model(checkpoint, context, adapters=adapters)
    check_model(saved, layout, context.world_size)
    ends = find_stops(checkpoint, adapters) if stops is None else stops
    with _default_dtype(dtype):
        # Built without values: each rank keeps its part, and then reads the boxes of its shards.
        model = saved.build().eval()
        part = assemble(model, context, None, choice.placement, PipelineOptions())
    saved.fill(model, part, context)
    for record in qat_of(model).values():
        if record.rounding is not None:
            record.rounding.keep()  # not once for each token
    model.to(context.device)  # buffers that no file has
    if not isinstance(model, GPTModel):
        refuse_routes(options)
        check_drafts(None, options or EngineOptions())
        maker = RequestMaker(longest=saved.longest, stops=frozenset(ends), decode=decode)
        own = OwnGenerate(model, context, maker)
        own.part = part
        return own
    executor = PipelineExecutor(context, choice.placement)
    return Engine(
        model,
        part,
        context,
        executor,
        longest=saved.longest,
        options=options,
        stops=ends,
        decode=decode,
    )


def check_model(saved: SavedModel, layout: ParallelLayout, world_size: int) -> None:
    """Check that a model can write text on a layout.

    Raises:
        ConfigError: If the layout is not supported.
    """
    if saved.config is not None:
        check_model_layout(saved.config, layout, world_size)
    elif layout.pp > 1:
        raise ConfigError(
            f"pipeline_model_parallel_size={layout.pp}: the model writes text by its own generate, "
            "which calls the whole model for each token. Set it to 1, and "
            "tensor_model_parallel_size above 1 to divide the model. The engine does not support "
            f"the model: {saved.refusal}"
        )
    if layout.cp > 1:
        raise ConfigError(
            f"context_parallel_size={layout.cp}: a text grows by one token at a time, which ranks "
            "cannot share. Set it to 1, and tensor_model_parallel_size or "
            "pipeline_model_parallel_size above 1 to divide a model."
        )


@contextmanager
def _default_dtype(dtype: Dtype | None) -> Iterator[None]:
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_before if dtype is None else getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype_before)
