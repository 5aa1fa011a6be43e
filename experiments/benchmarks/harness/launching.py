"""Processes of this machine that stand for hosts: where they run, started, waited for and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from skippipe_sched.errors import InputError

from skippipe_jax.local.hosts import free_port

# With the threads of one core, hosts do not stand in each other's way more than they must.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
}
QUICKSTART = Path("experiments/quickstart.yaml")
PATIENCE_S = 1200.0


class Network(Protocol):
    """Where hosts run: the words before a command on a host, and the host's address."""

    def command(self, host: int) -> list[str]: ...

    def address(self, host: int) -> str: ...


class Loopback:
    """Hosts that share this machine and its cores."""

    def command(self, host: int) -> list[str]:
        """Return no words."""
        del host
        return []

    def address(self, host: int) -> str:
        """Return the address of this machine."""
        del host
        return "127.0.0.1"


class OwnCores(Loopback):
    """Two hosts on this machine, each on a core that the other leaves alone."""

    def __init__(self):
        """Take the first two cores that this process may use.

        Raises:
            InputError: if there is one only.
        """
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self._cores) < 2:
            remedy = "Allow this process two cores"
            raise InputError("cores", self._cores, "the two hosts need two", remedy)

    def command(self, host: int) -> list[str]:
        """Return the words that run a command on the host's core.

        XLA's flag for single-threaded operations leaves it the threads that run them side by side.
        """
        return ["taskset", "--cpu-list", str(self._cores[host])]


def started(
    words: Sequence[str], output: Path, before: Sequence[str] = (), lower: int = 0
) -> subprocess.Popen[bytes]:
    """Start Python with these words, with those of a network before it.

    What it prints goes to `output`, a new file. Its priority is lower than that of this process by
    as many steps of `nice`.
    """
    priority = ["nice", "-n", str(lower)] if lower else []
    with output.open("wb") as file:
        return subprocess.Popen(
            [*priority, *before, sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
        )


def run_alone(words: Sequence[str], output: Path) -> None:
    """Start Python with these words, and wait for its end.

    Raises:
        RuntimeError: if it ends otherwise than well.
    """
    if code := started(words, output).wait():
        raise RuntimeError(f"{words[1]} exited with code {code}; see {output}")


def kill(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """End all of these processes at once."""
    processes = list(processes)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def set_words(*overrides: str) -> list[str]:
    """Return the arguments that override keys of a configuration, from KEY=VALUE each."""
    return [word for override in overrides for word in ("--set", override)]


def alike_nodes(stages: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return a case of nodes that are all alike, in one place, with full paths if not told else."""
    case = {
        "nodes": sum(stages),
        "locations": ["here"],
        "links": [],
        "activation_bytes": "auto",
        "stage_bytes": "auto",
        "forward_s": 0.1,
        "stages": list(stages),
        "path_length": len(stages),
        "memory": 3,
    }
    return case | more


def small_run(
    folder: Path,
    shape: tuple[int, int, int, int],
    plan: Mapping[str, Any],
    steps: int,
    **sections: Any,
) -> dict[str, Any]:
    """Configure a run of a small model in a folder, which saves its last step alone.

    `shape` is the width, the blocks of the model, the sequences of a microbatch, and their length.
    What `sections` say of a section is added to it.
    """
    width, layers, microbatch_size, length = shape
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "compilation_cache": str(folder / "compiled"),
        "model": {"width": width, "layers": layers, "ffn_width": 3 * width, "context": length},
        "plan": dict(plan),
        "data": {"sequence_length": length, "microbatch_size": microbatch_size},
        "train": {"steps": steps},
        "checkpoint": {"every": steps},
    }
    for name, own in sections.items():
        config[name] = config.get(name, {}) | own if isinstance(own, dict) else own
    return config


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """Write a configuration; returns its file."""
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return path


class AllHosts:
    """All hosts of a network, which run one command after another."""

    def __init__(self, network: Network, folder: Path, count: int):
        """What they print goes to files in `folder`."""
        self.network = network
        self.folder = folder
        self.count = count

    def run(self, name: str, module: str, *words: str | Path) -> None:
        """Run a command on all hosts until all have ended.

        Raises:
            RuntimeError: with what the first that failed has printed.
        """
        coordinator = f"{self.network.address(0)}:{free_port()}"
        command = ["-m", module, *map(str, words), "--coordinator", coordinator]
        command += ["--hosts", str(self.count), "--host-id"]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for host in range(self.count):
                place = self._output(name, host), self.network.command(host)
                processes.append(started([*command, str(host)], *place))
            self._wait(name, processes)
        finally:
            kill(processes)

    def _wait(self, name: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (codes := [process.poll() for process in processes]) != [0] * self.count:
            failed = [host for host, code in enumerate(codes) if code]
            if failed or time.monotonic() > deadline:
                host = failed[0] if failed else codes.index(None)
                said = self._output(name, host).read_text(errors="replace")
                how = f"ended with {codes[host]}" if failed else f"took over {PATIENCE_S:g} s"
                raise RuntimeError(f"{name}: host {host} {how}:\n{said[-3000:]}")
            time.sleep(0.1)

    def _output(self, name: str, host: int) -> Path:
        (self.folder / "output").mkdir(exist_ok=True)
        return self.folder / "output" / f"{name}_{host}.txt"
