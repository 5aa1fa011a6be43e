"""The recipes of experiments/launch, run with stand-ins for what starts processes far away.

A stand-in for `srun`, `ssh` or `gcloud` starts on this machine what it is told to start elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, TRY_AGAIN_EXIT_CODE

from skippipe_jax.cluster.membership import LOST_HOST_EXIT_CODE
from skippipe_jax.launch import PORTS, free_port
from skippipe_jax.storage import run_folder
from tests.fork_server import fork_server
from tests.multihost.processes import Processes, started_processes
from tests.training_runs import settings, steps_done, write_config

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
HOSTS = 2
STEPS = 3
MANY_STEPS = 100_000
PATIENCE_S = 120.0
CASE = {
    "nodes": 2,
    "locations": ["Belgium", "Iowa"],
    "links": "gcp12",
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "stages": [1, 1],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}

# Each of them has what it is to start as the last argument, or as the last ones.
SRUN = """\
while [ "${1#-}" != "$1" ]; do shift; done
[ -z "$SRUN_CODE" ] || exit "$SRUN_CODE"
for task in 0 1; do
    SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 "$@" &
done
# Like srun, it ends with the highest code of all.
code=0
for task in 0 1; do wait -n || { one=$?; [ $one -le $code ] || code=$one; }; done
exit $code
"""
SCONTROL = 'echo "$@" > scontrol.called\n'
SSH = """\
while [ "$1" = -o ]; do shift 2; done
[ "$1" != nowhere ] || { echo "no such host" >&2; exit 255; }
shift
exec sh -c "$*"
"""
GCLOUD = """\
for argument; do last=$argument; done
for worker in 0 1; do TPU_WORKER_ID=$worker bash -c "${last#--command=}" & done
wait -n && wait -n
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("config"),
        plan={"case": CASE, "method": "balanced"},
        train={"steps": STEPS},
    )


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Processes]:
    with started_processes(tmp_path / "output") as processes:
        yield processes


def run_python(python: str | None = None) -> str:
    """A script that is this Python, or the one whose commands of this project are forked."""
    return f'exec "{python or fork_server().programs / "python"}" "$@"\n'


def stand_in(folder: Path, name: str, script: str) -> None:
    """Put a program into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}")
    (folder / name).chmod(0o755)


def environment(folder: Path, python: str | None = None, **variables: str) -> dict[str, str]:
    """The environment in which the programs of `folder` come before those of this machine."""
    stand_in(folder, "python", run_python(python))
    path = f"{folder}:{os.environ['PATH']}"
    # In whatever folder a recipe starts Python.
    root = LAUNCH.parents[1]
    return {"PATH": path, "PYTHONPATH": f"{root}:{root / 'sched'}", **variables}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a recipe to its end."""
    return subprocess.run(
        command, text=True, capture_output=True, check=False, timeout=PATIENCE_S, **options
    )


def start(programs: Processes, *command: str | Path, **variables: str) -> None:
    """Start a recipe; it takes the place of the Python that is started."""
    become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    programs.start("-c", become, *command, **variables)


def assert_trained(folder: Path) -> None:
    assert [line["step"] for line in run_folder.read_metrics(folder)] == [1, 2, 3]


# SLURM.


def slurm(folder: Path, **variables: str) -> dict[str, str]:
    stand_in(folder / "bin", "srun", SRUN)
    stand_in(folder / "bin", "scontrol", SCONTROL)
    # JAX derives the port from the job's number: these 4096, in their order.
    job = str(free_port() - PORTS[0])
    return {**os.environ, **environment(folder / "bin", SLURM_JOB_ID=job, **variables)}


def test_slurm_job_trains(tmp_path: Path, config: Path):
    ended = run(
        LAUNCH / "slurm.sbatch", config, tmp_path / "run", cwd=tmp_path, env=slurm(tmp_path)
    )
    assert ended.returncode == 0, ended
    assert_trained(tmp_path / "run")
    assert not (tmp_path / "scontrol.called").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, 0), (2, 0, 0), (75, 0, 1), (137, 1, 1), (143, 0, 1), (75, 20, 0)],
)
def test_slurm_job_is_queued_again(tmp_path: Path, code: int, restarts: int, again: bool):
    variables = slurm(tmp_path, SRUN_CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    ended = run(LAUNCH / "slurm.sbatch", "config", "run", cwd=tmp_path, env=variables)
    assert ended.returncode == code
    called = tmp_path / "scontrol.called"
    assert called.exists() == again
    if again:
        assert called.read_text() == f"requeue {variables['SLURM_JOB_ID']}\n"


# SSH.


def hosts_file(folder: Path, *destinations: str) -> Path:
    """Hosts on loopback addresses of their own; all of 127.0.0.0/8 is this machine."""
    lines = [f"{name} 127.0.0.{index + 1}" for index, name in enumerate(destinations)]
    path = folder / "hosts"
    path.write_text("\n".join(["# host 0 first", "", *lines, ""]))
    return path


def ssh(folder: Path, python: str | None = None) -> dict[str, str]:
    stand_in(folder / "bin", "ssh", SSH)
    return environment(folder / "bin", python, PORT=str(free_port()), DIRECTORY=str(folder))


def test_ssh_hosts_listen_on_their_addresses_and_stop_together(
    tmp_path: Path, config: Path, programs: Processes
):
    many = settings(run_dir=tmp_path / "run", train__steps=MANY_STEPS)
    hosts = hosts_file(tmp_path, "alice@belgium", "bob@tokyo")
    command = ("bash", LAUNCH / "ssh.sh", hosts, "--config", config, *many)
    # They are told by their command lines.
    start(programs, *command, **ssh(tmp_path, sys.executable))
    programs.wait_until(lambda: steps_done(tmp_path / "run") > 0, PATIENCE_S)
    listening = {
        index: {
            connection.laddr.ip
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        for index, process in training_processes(programs.processes[0].pid).items()
    }
    assert listening == {"0": {"127.0.0.1"}, "1": {"127.0.0.2"}}
    programs.processes[0].send_signal(signal.SIGTERM)
    assert programs.exit_code(0, PATIENCE_S) == 128 + signal.SIGTERM
    assert "[host 0] stopped by SIGTERM after step " in programs.output(0)


def training_processes(ancestor: int) -> dict[str, psutil.Process]:
    """The processes that train, by the id of their host."""
    descendants = psutil.Process(ancestor).children(recursive=True)
    command_of = {process: process.cmdline() for process in descendants}
    return {
        command[-1]: process
        for process, command in command_of.items()
        if command[1:3] == ["-m", "skippipe_jax.train"]
    }


def test_ssh_stops_all_when_one_host_is_not_reached(tmp_path: Path, config: Path):
    began = time.monotonic()
    ended = run(
        *("bash", LAUNCH / "ssh.sh", hosts_file(tmp_path, "alice@belgium", "nowhere")),
        *("--config", config, *settings(run_dir=tmp_path / "run")),
        env={**os.environ, **ssh(tmp_path)},
    )
    assert ended.returncode == 255, ended
    assert "[host 1] no such host" in ended.stdout
    # Host 0 would have waited for the time of cluster.connect_timeout_s.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("script", "text", "words"),
    [
        ("ssh.sh", None, "no file to read"),
        ("ssh.sh", "# none yet\n", "holds no host"),
        ("ssh.sh", "alice@belgium 10.88.0.1\nbob@tokyo\n", "'bob@tokyo' is not NAME ADDRESS"),
        ("ssh.sh", "-v 10.88.0.1\n", "'-v 10.88.0.1' is not NAME ADDRESS"),
        ("firewall.sh", None, "no file to read"),
        ("firewall.sh", "alice@belgium 10.88.0.1\n", "TRANSFER_PORT = '': is no port"),
        ("wireguard.sh", None, "FOLDER = '': is missing"),
    ],
)
def test_scripts_say_in_one_line_what_is_wrong(
    script: str, text: str | None, words: str, tmp_path: Path
):
    hosts = tmp_path / "hosts"
    if text is not None:
        hosts.write_text(text)
    ended = run("bash", LAUNCH / script, *([] if script == "wireguard.sh" else [hosts]))
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr


# Kubernetes.


def objects() -> dict[str, dict[str, Any]]:
    """What `kubectl apply` is told of, by kind."""
    documents = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    return {document["kind"]: document for document in documents}


def jobset() -> dict[str, Any]:
    return objects()["JobSet"]


def test_jobset_gives_up_for_wrong_input_alone():
    """Pods that end with 75 come again, uncounted: one that is pending may keep them waiting."""
    [job] = jobset()["spec"]["replicatedJobs"]
    job_spec = job["template"]["spec"]
    actions = {}
    for rule in job_spec["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        [container] = job_spec["template"]["spec"]["containers"]
        assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
        actions |= dict.fromkeys(codes["values"], rule["action"])
    assert actions == {INPUT_ERROR_EXIT_CODE: "FailJob", TRY_AGAIN_EXIT_CODE: "Ignore"}
    # What a policy for pods asks for.
    assert job_spec["template"]["spec"]["restartPolicy"] == "Never"
    # Of failed jobs, those alone that this policy has failed end the set.
    [rule] = jobset()["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_jobset_lets_its_own_pods_reach_its_pods_and_nobody_else():
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset()["metadata"]["name"]}}
    policy = objects()["NetworkPolicy"]
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    # It is there before the first pod is.
    assert list(objects()) == ["NetworkPolicy", "JobSet"]


def test_jobset_has_no_rights_that_training_needs_not():
    [job] = jobset()["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    rights = pod["securityContext"]
    assert rights["runAsNonRoot"] is True
    assert min(rights["runAsUser"], rights["runAsGroup"], rights["fsGroup"]) > 0
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # What is written lies on volumes: the run, what is compiled, and sockets below /tmp.
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    for written in (given["RUN_DIR"], given["HOME"], "/tmp"):
        assert any(Path(written).is_relative_to(mount) for mount in mounts)


def test_jobset_trains_and_goes_on_after_a_lost_pod(
    tmp_path: Path, config: Path, programs: Processes
):
    [job] = jobset()["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = jobset()["metadata"]["name"]
    assert given["COORDINATOR"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    job_spec = job["template"]["spec"]
    assert int(given["HOSTS"]) == job_spec["completions"] == job_spec["parallelism"]

    def start_pods(steps: int) -> None:
        port = free_port()
        (tmp_path / "now.yaml").write_text(
            yaml.safe_dump(yaml.safe_load(config.read_text()) | {"train": {"steps": steps}})
        )
        for index in range(HOSTS):
            start(
                programs,
                *container["command"],
                **environment(tmp_path / "bin"),
                CONFIG=str(tmp_path / "now.yaml"),
                RUN_DIR=str(tmp_path / "run"),
                HOSTS=str(HOSTS),
                COORDINATOR=f"127.0.0.1:{port}",
                SKIPPIPE_BIND_ADDRESS="127.0.0.1",
                JOB_COMPLETION_INDEX=str(index),
            )

    start_pods(MANY_STEPS)
    programs.wait_until(lambda: steps_done(tmp_path / "run") > 0, PATIENCE_S)
    programs.processes[1].kill()
    assert programs.exit_code(0, PATIENCE_S) == LOST_HOST_EXIT_CODE
    # The failed job is made anew, whole: the pod that was killed counts.
    start_pods(STEPS)
    assert [programs.exit_code(index, PATIENCE_S) for index in (2, 3)] == [0, 0]
    assert_trained(tmp_path / "run")


# TPU pods.


def test_tpu_workers_train(tmp_path: Path, config: Path):
    stand_in(tmp_path / "skippipe-jax/.venv/bin", "python", run_python())
    variables = environment(
        tmp_path / "bin",
        NAME="slice",
        ZONE="zone",
        # What tells JAX that it runs on a TPU VM, and on which worker of how many.
        JAX_FORCE_TPU_INIT="1",
        JAX_PLATFORMS="cpu",
        JAX_COORDINATOR_PORT=str(free_port()),
        TPU_WORKER_HOSTNAMES="127.0.0.1,127.0.0.1",
        MEGASCALE_COORDINATOR_ADDRESS="127.0.0.1",
        MEGASCALE_NUM_SLICES="1",
        MEGASCALE_SLICE_ID="0",
        HOME=str(tmp_path),
    )
    stand_in(tmp_path / "bin", "gcloud", f"cd {tmp_path}\n{GCLOUD}")
    ended = run(
        *("bash", LAUNCH / "tpu_pod.sh", "train", "--config", config),
        *settings(run_dir=tmp_path / "run"),
        env={**os.environ, **variables},
    )
    assert ended.returncode == 0, ended
    assert_trained(tmp_path / "run")


# WireGuard.


@pytest.mark.skipif(shutil.which("wg") is None, reason="needs wireguard-tools")
def test_wireguard_joins_every_site_with_every_other(tmp_path: Path):
    endpoints = ["203.0.113.10:51820", "198.51.100.20:51820", "[2001:db8::3]:51821"]
    script = LAUNCH / "wireguard.sh"
    assert run("bash", script, tmp_path / "vpn", *endpoints).returncode == 0
    sites = [(tmp_path / "vpn" / str(site) / "wg0.conf").read_text() for site in range(3)]
    own_keys = []
    for site, text in enumerate(sites):
        assert f"Address = 10.88.0.{site + 1}/24" in text
        assert f"ListenPort = {endpoints[site].rsplit(':')[-1]}" in text
        stripped = run("wg-quick", "strip", tmp_path / "vpn" / str(site) / "wg0.conf")
        assert stripped.returncode == 0, stripped.stderr
        private = text.split("PrivateKey = ")[1].split("\n")[0]
        own_keys.append(run("wg", "pubkey", input=private).stdout.strip())
    for site, text in enumerate(sites):
        peers = [part.strip().splitlines() for part in text.split("[Peer]")[1:]]
        assert [peer[:3] for peer in peers] == [
            [
                f"PublicKey = {own_keys[other]}",
                f"Endpoint = {endpoints[other]}",
                f"AllowedIPs = 10.88.0.{other + 1}/32",
            ]
            for other in range(3)
            if other != site
        ]
    # The keys of a network in use are not written over.
    assert run("bash", script, tmp_path / "vpn", *endpoints).returncode == 2
