"""Run ``tools/preprocess_data.py`` of a Megatron-LM checkout beside an installed megatron-core.

    python -m benchmarks.megatron_preprocess CHECKOUT/tools/preprocess_data.py OPTIONS...

The tool takes its tokenizer from modules that import GPU kernels. Here the tokenizer comes from
megatron-core's class of the same library.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import types
from typing import Any


def add_tokenizer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a Hugging Face tokenizer."""
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--tokenizer-model")
    return parser


def build_tokenizer(args: argparse.Namespace) -> Any:
    """Return megatron-core's Hugging Face tokenizer."""
    from megatron.core.tokenizers import MegatronTokenizer  # type: ignore[import-not-found]

    kind = {"library": "huggingface"}
    return MegatronTokenizer.from_pretrained(
        args.tokenizer_model, metadata_path=kind, use_fast=True
    )


def main() -> None:
    """Run the tool with these two functions in the place of its own."""
    contents: dict[str, dict[str, Any]] = {
        "megatron.training": {"__path__": []},
        "megatron.training.arguments": {"_add_tokenizer_args": add_tokenizer_args},
        "megatron.core.tokenizers.utils": {"__path__": []},
        "megatron.core.tokenizers.utils.build_tokenizer": {"build_tokenizer": build_tokenizer},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
