"""Bundles for a GPU machine without a package index: a newer NCCL, Transformer Engine, and the
packages of the command line.

    python -m benchmarks.gpu.bundles FOLDER                    # from PyPI's wheels
    python -m benchmarks.gpu --bundles FOLDER --budget 8m ...  # there: unpacked before use

For x86-64 machines with CUDA 13 and one architecture of GPUs. NCCL is loaded by ``LD_PRELOAD``, in
place of the one that torch brings. Transformer Engine's PyTorch extension is published as source
alone: compile it once on a GPU machine (``pip wheel transformer-engine-torch``), and name the file
with ``--extension``. Without it the tests of Transformer Engine are skipped. Git ignores ``.gpu``,
the usual FOLDER, and so should it ignore yours.
"""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import machine
from benchmarks.gpu import fatbins

NCCL = "nvidia-nccl-cu13==2.30.7"
ENGINE = ("transformer-engine==2.20.2", "transformer-engine-cu13==2.20.2", "nvdlfw-inspect==0.2.2")
NEEDED = ("pydantic==2.13.4",)
"""By the engine, with their own needs."""
COMMAND_LINE = ("jsonargparse==4.53.0", "docstring-parser==0.18.0", "typeshed-client==2.14.0")
"""Pure Python; PyTorch and Lightning bring what they need."""
ARCH = 90
"""Compute capability of the GPUs, times ten: H100 and H200."""
PYTHON = "3.12"
LIMIT_BYTES = 50 * 2**20
"""Of all bundles, packed."""
FOLDER = machine.ROOT / ".gpu"
PRELOAD = "LD_PRELOAD"
"""Variable that loads the NCCL."""
_LINUX = ("manylinux_2_28", "manylinux_2_18", "manylinux_2_17", "manylinux2014")
_UNUSED = ("wheel_lib/nccl_ep", "wheel_lib/libnccl_ep.so", "transformer_engine/jax", "nccl/include")
"""Parts of names in the wheels: code for JAX and for C++, and a library for other NCCLs."""


def build(folder: Path, extension: Path | None, arch: int = ARCH) -> dict[str, int]:
    """Download the wheels, prune and pack them; return the bytes of the bundles.

    Raises:
        ValueError: If they are larger than :data:`LIMIT_BYTES` together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    kinds = {"nccl": (NCCL,), "transformer_engine": ENGINE, "command_line": COMMAND_LINE}
    for name, packages in kinds.items():
        with tempfile.TemporaryDirectory() as work:
            site = Path(work) / "site"
            download(["--no-deps", *packages], Path(work))
            if name == "transformer_engine":
                download(NEEDED, Path(work))
            for wheel in sorted(Path(work).glob("*.whl"), key=lambda path: "cu13" in path.name):
                extract(wheel, site)
            for library in site.rglob("*.so*"):
                print(f"{library.name}: {fatbins.prune(library, {arch})}", flush=True)
            if extension is not None and name == "transformer_engine":
                add_extension(extension, site)
            sizes[name] = pack(site, folder / f"{name}.tar.xz")
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        raise ValueError(f"the bundles have {total} bytes, more than {LIMIT_BYTES}: {sizes}.")
    return sizes


def download(arguments: Sequence[str], folder: Path) -> None:
    """Download wheels for the GPU machine, which need not be wheels for this one.

    Args:
        arguments: Packages, and further options of pip.
        folder: Takes the wheels.
    """
    options = [f"--platform={name}_x86_64" for name in _LINUX]
    options += ["--abi=cp312", "--abi=abi3", "--abi=none", f"--python-version={PYTHON}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--dest={folder}"]
    subprocess.run([*command, *options, *arguments], check=True)


def extract(wheel: Path, site: Path) -> None:
    """Unpack what is used of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(part in name for part in _UNUSED)]
        archive.extractall(site, names)


def add_extension(extension: Path, site: Path) -> None:
    """Put a compiled extension, packed by xz or not, beside the packages, with its metadata."""
    data = extension.read_bytes()
    if extension.suffix == ".xz":
        data = lzma.decompress(data)
    version = ENGINE[0].partition("==")[2]
    (site / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").write_bytes(data)
    facts = site / f"transformer_engine_torch-{version}.dist-info"  # read when it is imported
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: {version}\n"
    )


def pack(site: Path, path: Path) -> int:
    """Pack a folder; return the bytes of the archive."""
    with tarfile.open(path, "w:xz", preset=6) as archive:
        archive.add(site, arcname=".")
    return path.stat().st_size


def unpack(folder: Path, target: Path) -> dict[str, str]:
    """Unpack the bundles of a folder; return the environment that uses them.

    Raises:
        FileNotFoundError: If the folder has no bundle.
    """
    bundles = sorted(folder.glob("*.tar.xz"))
    if not bundles:
        raise FileNotFoundError(
            f"{folder} has no bundles. Run python -m benchmarks.gpu.bundles {folder} where there "
            "is a package index."
        )
    for bundle in bundles:
        with tarfile.open(bundle) as archive:
            archive.extractall(target / bundle.name.partition(".")[0], filter="data")
    return environment(target)


def environment(target: Path) -> dict[str, str]:
    """Return the variables that use unpacked bundles."""
    env: dict[str, str] = {}
    for library in (target / "nccl").rglob("libnccl.so.2"):
        env[PRELOAD] = _before(PRELOAD, str(library))
    packages = [target / "command_line"]
    engine = target / "transformer_engine"
    if any(engine.glob("transformer_engine_torch*.so")):
        packages.append(engine)
        # The core library names functions of a newer cuBLAS, which Hopper never calls.
        env |= {"LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", *_libraries()), "LD_BIND_NOW": ""}
    found = [str(path) for path in packages if path.is_dir()]
    if found:
        env["PYTHONPATH"] = _before("PYTHONPATH", *found)
    return env


def _before(name: str, *values: str) -> str:
    """Return values before those that a variable has."""
    return os.pathsep.join(each for each in (*values, os.environ.get(name, "")) if each)


def _libraries() -> list[str]:
    """Return the folders of libraries that torch's packages brought."""
    found = find_spec("nvidia")
    roots = found.submodule_search_locations if found is not None else None
    return [str(path) for root in roots or () for path in sorted(Path(root).glob("*/lib"))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--extension", type=Path, help="transformer_engine_torch*.so, or .so.xz")
    parser.add_argument("--arch", type=int, default=ARCH, help=f"architecture; {ARCH}: sm_{ARCH}")
    options = parser.parse_args(arguments)
    sizes: Mapping[str, int] = build(options.folder, options.extension, options.arch)
    for name, size in sizes.items():
        print(f"{options.folder / name}.tar.xz: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
