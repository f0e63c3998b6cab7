"""Files of a new folder: names and sizes as in ``huggingface_hub``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron_lightning.bridge.folders.safetensors_file import Header, StoredTensor
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.shard_file import header_bytes, header_entry
from megatron_lightning.optional import HF_FOLDER, require


class NewFiles(NamedTuple):
    """Weight files to be written."""

    headers: dict[str, Header]
    """File name -> header."""
    index_file: bytes | None
    """Content of the index. None: there is a single file."""


def header_of(tensors: Mapping[str, TensorInfo]) -> Header:
    """Return the header of a file with these tensors, in their order."""
    entries, end, stored = {"__metadata__": {"format": "pt"}}, 0, []
    for name, info in tensors.items():
        start, end = end, end + info.num_bytes()
        entries[name] = header_entry(info.dtype, info.shape, start, end)
        stored.append(StoredTensor(name, info.dtype, info.shape, start, end))
    text = header_bytes(entries)
    moved = [t._replace(start=t.start + len(text), stop=t.stop + len(text)) for t in stored]
    return Header(text, tuple(moved))


def new_files(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_shard_size: str = "5GB"
) -> NewFiles:
    """Distribute tensors over files.

    Args:
        tensors: Name -> shape and dtype.
        max_shard_size: Largest file, in the notation of ``save_pretrained``.
    """
    require("huggingface_hub", HF_FOLDER)
    from huggingface_hub import split_state_dict_into_shards_factory

    infos = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}
    split = split_state_dict_into_shards_factory(
        infos,
        get_storage_size=lambda info: info.num_bytes(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    headers = {
        file: header_of({name: infos[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    if not split.is_sharded:
        return NewFiles(headers, None)
    table = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return NewFiles(headers, json.dumps(table, indent=2, sort_keys=True).encode() + b"\n")
