"""A Slurm of simulated nodes on this machine: munged, slurmctld and one slurmd for each node.

Needs root and Debian's packages: ``apt-get install --no-install-recommends slurmctld slurmd
slurm-client munge`` (22.05.8). There is no accounting, so that ``sacct`` fails.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.slurm import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
_CONFIG = """
ClusterName=simulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=3600
MailProg=/bin/true
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_missing() -> str | None:
    """Return why Slurm cannot run here. None: it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(absent)}" if absent else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: If it does not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s} s: {what}"
        time.sleep(0.2)


class Job:
    """A submitted job.

    Args:
        cluster: Where it runs.
        number: Slurm's id.
        output: File of its output, all starts together.
    """

    def __init__(self, cluster: Cluster, number: int, output: Path) -> None:
        self._cluster = cluster
        self.number = number
        self._file = output

    @property
    def output(self) -> str:
        """Output of all processes of all starts."""
        return self._file.read_text(errors="replace") if self._file.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of ``scontrol show job``."""
        text = self._cluster.call("scontrol", "show", "job", str(self.number))
        found = re.search(rf"\b{name}=(\S*)", text)
        assert found, f"no {name} in {text}"
        return found[1]

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        """Wait for a line of output."""
        self._wait(lambda: re.search(pattern, self.output) is not None, pattern, timeout_s)

    def wait_for_requeue(self, timeout_s: float) -> None:
        """Wait until Slurm has queued the job again."""
        self._wait(
            lambda: self.field("JobState") == "PENDING" and self.field("Restarts") != "0",
            "queued again",
            timeout_s,
        )

    def start_now(self) -> None:
        """Start a queued job without the two minutes that Slurm waits."""
        self.update(StartTime="now")

    def update(self, **fields: str) -> None:
        """Change fields of the job."""
        changes = [f"{name}={value}" for name, value in fields.items()]
        self._cluster.call("scontrol", "update", f"JobId={self.number}", *changes)

    def signal(self, name: str) -> None:
        """Send a signal to all tasks, as ``--signal`` does before a limit."""
        self._cluster.call("scancel", f"--signal={name}", str(self.number))

    def wait(self, timeout_s: float) -> tuple[str, int]:
        """Wait for the end. Return the state and the exit code of the script."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._wait(lambda: self.field("JobState") in ended, "ended", timeout_s)
        return self.field("JobState"), int(self.field("ExitCode").partition(":")[0])

    def _wait(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            wait_until(holds, f"{what}: job {self.number}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from error


class Cluster:
    """A running Slurm.

    Args:
        folder: Folder of its files.
        environment: Variables for its commands and jobs.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment

    def call(self, *command: str, **variables: str) -> str:
        """Run one of Slurm's commands. Return its output."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self,
        script: Path,
        *arguments: str,
        output: Path,
        options: tuple[str, ...],
        variables: Mapping[str, str],
    ) -> Job:
        """Submit a job script of which the ROOT is the folder of ``output``."""
        printed = self.call(
            "sbatch", "--parsable", f"--output={output}", f"--chdir={output.parent}", *options,
            str(script), *arguments, ROOT=str(output.parent), **variables,
        )  # fmt: skip
        return Job(self, int(printed.split(";")[0]), output)


@contextmanager
def slurm_cluster(num_nodes: int = 2, num_cpus: int = 4) -> Iterator[Cluster]:
    """Start a Slurm, and end all of its jobs and daemons."""
    # Paths of sockets have at most 107 characters, so that no folder of pytest will do.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname()
    text = _CONFIG.format(folder=folder, host=host, port=free_port())
    for node in range(1, num_nodes + 1):
        (folder / f"spool-n{node}").mkdir()
        text += (
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            f"CPUs={num_cpus} RealMemory=4000 State=UNKNOWN\n"
        )
    (folder / "slurm.conf").write_text(text)
    environment = {
        **os.environ,
        "PATH": _path(),
        "SLURM_CONF": str(folder / "slurm.conf"),
        "MASTER_ADDR": "127.0.0.1",  # names of simulated nodes do not resolve
    }
    cluster = Cluster(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    try:
        start(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        wait_until((folder / "munge.socket").exists, "munge")
        start("slurmctld", "-D", "-c")
        for node in range(1, num_nodes + 1):
            start("slurmd", "-D", "-N", f"n{node}")
        wait_until(lambda: _idle_nodes(cluster) == num_nodes, f"idle nodes ({folder})")
        yield cluster
    finally:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.call("scancel", "--signal=KILL", "--full", "--user=root")
            cluster.call("scancel", "--user=root")
            wait_until(lambda: not cluster.call("squeue", "--noheader"), "jobs end", 30)
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _idle_nodes(cluster: Cluster) -> int:
    with suppress(AssertionError):  # the controller does not answer yet
        return int(cluster.call("sinfo", "--noheader", "--states=idle", "--format=%D") or 0)
    return 0
