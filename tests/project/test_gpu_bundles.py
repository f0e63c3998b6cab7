"""Bundles for a GPU machine, and what its tests need of them."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.gpu import bundles, fatbins


def _library(path: Path, sections: dict[str, bytes]) -> None:
    """Write an ELF file with sections."""
    sections = {**sections, ".shstrtab": b"\0".join([b"", *map(str.encode, sections), b""])}
    sections[".shstrtab"] += b".shstrtab\0"
    names, body, headers = sections[".shstrtab"], bytearray(64), bytearray()
    for name, content in sections.items():
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        headers += struct.pack("<IIQQQQ", offset, 1, 0, 0, len(body), len(content)) + bytes(24)
        body += content
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(sections), len(sections) - 1)
    path.write_bytes(body + headers)


def _container(*codes: tuple[int, bytes]) -> bytes:
    entries = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32)
        + code
        for arch, code in codes
    )  # fmt: skip
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_gpu_code_of_other_architectures_is_blanked(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    sections = {
        ".nv_fatbin": _container((90, b"A" * 8), (80, b"B" * 8)) + bytes(8)
        + _container((100, b"C" * 8)),
        "__nv_relfatbin": _container((90, b"D" * 8)),
        ".debug_info": b"E" * 8,
        ".text": b"F" * 8,
    }  # fmt: skip
    _library(path, sections)
    expected = path.read_bytes()
    for letter in (b"B", b"C", b"D", b"E"):
        expected = expected.replace(8 * letter, bytes(8))
    assert fatbins.prune(path, {90}) == fatbins.Counts(kept=8, blanked=24, debug=8)
    assert path.read_bytes() == expected
    with pytest.raises(ValueError, match=r"has no GPU code for sm_120. Keep another"):
        fatbins.prune(path, {120})


def test_bundles_are_packed_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(arguments: list[str], folder: Path) -> None:
        name = next(each for each in arguments if "==" in each).partition("==")[0]
        library = folder / "lib.so"
        _library(library, {".nv_fatbin": _container((90, b"A"), (80, b"B"))})
        inner = "nvidia/nccl/lib/libnccl.so.2" if "nccl" in name else f"{name}/lib.so"
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
            wheel.write(library, inner)
            wheel.writestr("transformer_engine/jax/big.py", "unused")
        library.unlink()

    extension = tmp_path / "extension.so"
    extension.write_bytes(b"compiled")
    monkeypatch.setattr(bundles, "download", download)
    sizes = bundles.build(tmp_path / "packed", extension)
    assert set(sizes) == {"nccl", "transformer_engine", "command_line"} and all(sizes.values())
    monkeypatch.setenv("PYTHONPATH", "/before")
    env = bundles.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert Path(env["LD_PRELOAD"].split(":")[0]).is_file()
    command_line, engine = map(Path, env["PYTHONPATH"].removesuffix(":/before").split(":"))
    assert command_line.name == "command_line" and any(command_line.iterdir())
    assert next(engine.glob("transformer_engine_torch*.so")).read_bytes() == b"compiled"
    assert not [*engine.rglob("jax")]
    monkeypatch.setattr(bundles, "LIMIT_BYTES", 10)
    with pytest.raises(ValueError, match=r"the bundles have \d+ bytes, more than 10"):
        bundles.build(tmp_path / "packed", None)
    with pytest.raises(FileNotFoundError, match=r"has no bundles. Run python -m benchmarks.gpu"):
        bundles.unpack(tmp_path / "none", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_gpu_tests_are_collected_without_the_packages_of_the_command_line() -> None:
    """A GPU machine may lack them, and then whole files would be lost."""
    lines = "import sys, pytest; sys.modules.update(jsonargparse=None, docstring_parser=None); "
    arguments = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    command_line = [sys.executable, "-c", f"{lines}sys.exit(pytest.main({arguments}))"]
    said = subprocess.run(command_line, cwd=machine.ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-3000:]
