"""No test may leave anything behind: variables, threads, processes, process groups or files in the
working directory."""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

# Before torch is imported; the fork server's ranks inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's compiler would keep worker processes for kernels of GPUs, which are no leak of a test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import psutil
import pytest

# Set by libraries on import or by Lightning for the life of the process; each is restored after the
# test.
LIBRARY_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_MODULE_LOADING",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "PYTEST_CURRENT_TEST",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TOKENIZERS_PARALLELISM",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
        "WORLD_SIZE",
    }
)
# Helpers of libraries that live as long as the process.
LIBRARY_THREADS = (
    "asyncio",
    "pytest_timeout",
    "QueueFeederThread",
    "ThreadPoolExecutor",
    "Dummy",
    "pydevd",
    "tqdm",
)
# Open MPI's daemon: Lightning's detection of MPI starts one where mpi4py is installed. Killing the
# daemon ends the process.
LIBRARY_PROCESSES = ("orted",)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slice``, for running the slow tests over several days."""
    parser.addoption(
        "--slice",
        metavar="K/N",
        help="of the tests chosen, run every N-th, from the K-th on (0 <= K < N)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the tests and their modules, which live to the end, out of every garbage collection."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the cases beside a spread, let ``-m`` choose, and leave the tests of ``--slice``."""
    _skip_without_gpu(items)
    _mark_cases_beside_the_spread(items)
    result = yield
    if text := config.getoption("--slice"):
        first, _, stride = text.partition("/")
        items[:] = items[int(first) :: int(stride)]
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note commit, date and torch's version in the report of each test, for the kept records."""
    if session.config.getoption("xmlpath"):
        from benchmarks import machine

        commit = machine.commit("megatron_lightning", "strategies", "callbacks", "tests")
        today = datetime.now(timezone.utc).date().isoformat()
        for item in session.items:
            facts = ("commit", commit or ""), ("date", today), ("torch", version("torch"))
            item.user_properties.extend(facts)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def _mark_cases_beside_the_spread(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a function with ``@pytest.mark.spread(n)`` but n evenly spread."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("spread") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("spread")
        usual = min(marker.args[0] if marker else 1, len(group))
        # The middle of each part: first cases are often the simplest.
        kept = {(2 * index + 1) * len(group) // (2 * usual) for index in range(usual)}
        for index, item in enumerate(group):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def no_leaked_variables() -> Iterator[None]:
    """Fail a test that leaves environment variables behind, and restore all of them."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    leaked = {
        name for name in after.keys() | before.keys() if after.get(name) != before.get(name)
    } - LIBRARY_VARIABLES
    assert not leaked, (
        f"the test left environment variables changed: {sorted(leaked)}; use monkeypatch.setenv"
    )


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves threads running."""
    before = set(threading.enumerate())
    yield
    leaked = _remaining(
        lambda: [
            thread
            for thread in threading.enumerate()
            if thread not in before
            and not thread.name.startswith(LIBRARY_THREADS)
            and type(thread).__name__ != "TMonitor"
        ]
    )
    assert not leaked, f"the test left threads running: {leaked}"


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fail a test that leaves child processes running, and end them."""
    before = set(_descendants())
    yield
    leaked = _remaining(lambda: [child for child in _descendants() if _is_leak(child, before)])
    for child in leaked:
        child.kill()
    assert not leaked, f"the test left processes running: {leaked}"


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Fail a test that leaves a process group, and destroy it."""
    yield
    dist = sys.modules.get("torch.distributed")
    initialized = dist is not None and dist.is_available() and dist.is_initialized()
    if dist is not None and initialized:
        dist.destroy_process_group()
    assert not initialized, (
        "the test left a process group; run it with tests.helpers.ranks.run_ranks"
    )


@pytest.fixture(autouse=True)
def no_leaked_files() -> Iterator[None]:
    """Fail a test that writes into the working directory."""
    folder = Path.cwd()
    before = set(os.listdir(folder))
    yield
    assert Path.cwd() == folder, (
        f"the test changed the working directory to {Path.cwd()}; use monkeypatch.chdir"
    )
    leaked = {
        name
        for name in set(os.listdir(folder)) - before
        if not name.startswith((".", "__pycache__"))
    }
    assert not leaked, f"the test left files in {folder}: {sorted(leaked)}; use tmp_path"


def _descendants() -> list[psutil.Process]:
    """Return all processes below this one."""
    pid = os.getpid()
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        return psutil.Process().children(recursive=True)
    # The kernel's lists: psutil would read the state of every process of the machine.
    return list(_below(pid))


def _below(pid: int) -> Iterator[psutil.Process]:
    for children in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # ended meanwhile
            for child in map(int, Path(children).read_text().split()):
                yield psutil.Process(child)
                yield from _below(child)


def _is_leak(child: psutil.Process, before: set[psutil.Process]) -> bool:
    servers = (
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    )
    try:
        return (
            child not in before
            and child.pid not in servers
            and child.name() not in LIBRARY_PROCESSES
            and child.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def _remaining(look: Callable[[], list[object]], patience_s: float = 2.0) -> list[object]:
    """Return what ``look`` still finds after giving it time to end."""
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
