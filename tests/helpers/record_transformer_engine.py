"""Record signatures and modules of the real Transformer Engine, on a machine without a GPU.

    pip download --no-deps transformer-engine==2.20.2 and unpack the wheel into FOLDER
    pip install --target FOLDER pydantic einops nvdlfw-inspect
    python -m tests.helpers.record_transformer_engine FOLDER

The wheel holds the Python sources; the compiled extension is replaced by one without kernels, with
which modules can be built, and not run. Writes ``te_contract.json`` and ``te_modules.json`` in
``tests/oracles``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

_CLASSES = {
    "Linear": ("__init__", "forward"),
    "LayerNormLinear": ("__init__", "forward"),
    "LayerNormMLP": ("__init__", "forward"),
    "GroupedLinear": ("__init__", "forward"),
    "RMSNorm": ("__init__",),
    "LayerNorm": ("__init__",),
    "DotProductAttention": ("__init__", "forward"),
    "Fp8Padding": ("__init__", "forward"),
    "Fp8Unpadding": ("__init__", "forward"),
    "autocast": ("__init__",),
}
_FUNCTIONS = (
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "quantized_model_init",
)  # fmt: skip
_FUNCTIONS_OF_TENSORS = (
    "post_all_gather_processing", "quantize_master_weights", "replace_raw_data",
)  # fmt: skip
_RECIPES = (
    "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "QParams",
)  # fmt: skip
_PLACES = {
    "FP8FwdTensors": [
        f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")
    ],
    "FP8BwdTensors": [f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")],
}
"""Enums of the extension that are places in lists, in the order of its ``common.h``."""
_ABSENT = ("triton", "onnx", "onnxscript")
_ORACLES = Path(__file__).parents[1] / "oracles"


class _Named(type):
    """Class of placeholders: has every attribute, is a number, and can be called."""

    numbers: ClassVar[dict[str, int]] = {}
    enums: ClassVar[dict[str, list[str]]] = {}

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return dict.fromkeys(_Named.enums.get(cls.__name__, []))
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__name__}_{name}")

    def __int__(cls) -> int:
        return _Named.numbers.setdefault(cls.__name__, len(_Named.numbers))


_MADE: dict[str, type] = {}


def _placeholder(name: str) -> type:
    if name not in _MADE:
        methods: dict[str, Any] = {
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": lambda self, *args, **kwargs: 0,
            "__getattr__": lambda self, attribute: _placeholder(f"{name}_{attribute}"),
        }
        _MADE[name] = _Named(name, (), methods)
    return _MADE[name]


class _Absent(ModuleType):
    """Module that has every name."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.split(".")[0] in _ABSENT or name == "transformer_engine_torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def load_without_kernels(folder: str) -> Any:
    """Return the real ``transformer_engine.pytorch`` from ``folder``."""
    import torch._inductor.utils
    import torch.onnx  # before their dependencies appear to be there

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # does not load the core library
    sys.path.insert(0, folder)
    sources = Path(folder) / "transformer_engine" / "pytorch"
    for enum, prefix, file in (
        ("DType", "tex.DType", "constants.py"),
        ("NVTE_Fused_Attn_Backend", "NVTE_Fused_Attn_Backend", "cpp_extensions/fused_attn.py"),
    ):
        text = (sources / file).read_text()
        _Named.enums[enum] = re.findall(rf"int\({re.escape(prefix)}\.(\w+)\)", text)
    for enum, kinds in _PLACES.items():
        names = [f"{enum}_{kind}" for kind in kinds]
        _Named.numbers |= {name: index for index, name in enumerate(names)}
    sys.meta_path.append(_Finder())
    import transformer_engine.common as common

    common.load_framework_extension = lambda *args, **kwargs: None
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: properties  # type: ignore[assignment]
    import transformer_engine.pytorch as te

    return te


def _parameters(function: Any) -> list[dict[str, Any]]:
    return [
        {"name": p.name, "kind": p.kind.name}
        | ({} if p.default is inspect.Parameter.empty else {"default": repr(p.default)})
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def _quantize(tensor: Tensor, quantizer: Any, *_: Any) -> Any:
    """Return a quantized tensor of per-tensor scaling, of zeros, as the kernel would."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    return Float8Tensor(
        shape=tensor.shape,
        dtype=tensor.dtype,
        data=torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device),
        fp8_scale_inv=torch.ones(1, device=tensor.device),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        device=tensor.device,
    )


def _signatures(te: Any, recipe: Any, tensors: Any) -> dict[str, Any]:
    found = {
        f"{name}.{method}": _parameters(vars(getattr(te, name))[method])
        for name, methods in _CLASSES.items()
        for method in methods
    }
    for name in ("RMSNorm", "LayerNorm"):  # they pass keywords on to their base
        own = [one for one in found[f"{name}.__init__"] if one["kind"] != "VAR_KEYWORD"]
        names = [one["name"] for one in own]
        base = _parameters(getattr(te, name).__base__.__init__)
        found[f"{name}.__init__"] = own + [one for one in base if one["name"] not in names]
    found |= {name: _parameters(getattr(te, name)) for name in _FUNCTIONS}
    found |= {name: _parameters(getattr(tensors, name)) for name in _FUNCTIONS_OF_TENSORS}
    found |= {f"{name}.__init__": _parameters(getattr(recipe, name)) for name in _RECIPES}
    return found


def main(folder: str) -> None:
    """Write the oracles."""
    te = load_without_kernels(folder)
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.tensor import utils as tensors

    from megatron_lightning.precision.transformer_engine.library import Library
    from tests.helpers.transformer_engine_cases import describe_cases

    version = next(Path(folder).glob("transformer_engine-*.dist-info")).stem.split("-")[1]
    contract = {
        "version": version,
        "signatures": _signatures(te, recipe, tensors),
        "recipes": list(_RECIPES),
        "formats": [one.name for one in recipe.Format],
    }
    tex.quantize = _quantize
    tex.fp8_transpose = lambda codes, *_, **__: codes.t().contiguous()
    modules = describe_cases(Library(te, recipe, tensors, version))
    for name, content in (("te_contract", contract), ("te_modules", modules)):
        text = json.dumps(content, indent=1, sort_keys=name == "te_modules")
        (_ORACLES / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
