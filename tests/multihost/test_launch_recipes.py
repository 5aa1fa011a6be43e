"""The recipes of experiments/launch, run with stand-ins for what starts processes far away.

A stand-in for `srun`, `ssh` or `gcloud` starts on this machine what it is told to start elsewhere.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, TEMPORARY_EXIT_CODE

from skippipe_jax import Run
from skippipe_jax.cli import join, train
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.connections.keys import SECRET_VARIABLE, derived, make_secret
from skippipe_jax.local.hosts import PORTS
from skippipe_jax.storage.run_dir import RunDir
from tests.harness.fork_server import fork_server
from tests.harness.ports import free_port
from tests.harness.processes import Processes
from tests.harness.training_runs import SMALL_CASE, settings, steps_done, write_config

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
HOSTS = 2
STEPS = 3
MANY_STEPS = 100_000
PATIENCE_S = 120.0
# The program that Python is told to be.
BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
CASE = SMALL_CASE | {"nodes": 2, "stages": [1, 1]}
# Each of two hosts has a replica of both stages.
REPLICAS = {
    "case": CASE | {"nodes": 4, "stages": [2, 2]},
    "method": "balanced",
}
HOST_OF_NODE = [0, 1, 0, 1]

# Each of them has what it is to start as the last argument, or as the last ones.
SRUN = """\
wait=60
while [ "${1#-}" != "$1" ]; do
    case $1 in --wait=*) wait=${1#*=} ;; esac
    shift
done
[ -z "$SRUN_CODE" ] || exit "$SRUN_CODE"
for task in 0 1; do
    SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 "$@" &
done
# Like srun, it ends with the highest code of all.
code=0
for task in 0 1; do
    wait -n || { one=$?; [ $one -le $code ] || code=$one; }
    # It would end the others.
    [ $wait = 0 ] || exit 99
done
exit $code
"""
SCONTROL = 'echo "$@" > scontrol.called\n'
SSH = """\
while [ "$1" = -o ]; do shift 2; done
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


@pytest.fixture(scope="module")
def outliving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run whose hosts go on without each other."""
    cluster = {"runtime": "independent", "host_of_node": HOST_OF_NODE, "connect_timeout_s": 120}
    return write_config(
        tmp_path_factory.mktemp("outliving"),
        plan=REPLICAS,
        train={"steps": MANY_STEPS},
        checkpoint={"every": 10_000},
        cluster=cluster | {"heartbeat_timeout_s": 20},
    )


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


def start(processes: Processes, *command: str | Path, **variables: str) -> None:
    """Start a recipe; it takes the place of the Python that is started."""
    processes.start("-c", BECOME, *command, **variables)


def assert_trained(folder: Path) -> None:
    assert [line["step"] for line in Run(folder).metrics] == [1, 2, 3]


def assert_is_nowhere(secret: str, folder: Path) -> None:
    """Neither a secret nor the key that follows from it is in any file, by any name."""
    key, _ = derived(secret)
    [text] = key.decode().splitlines()[1:-1]
    told = [secret.encode(), text.encode(), base64.b64decode(text)[-32:]]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if any(one in path.read_bytes() for one in told)] == []


def wait_until_all_are_back(processes: Processes, run_dir: Path) -> None:
    """Wait until a run that has lost a host makes steps with all again."""
    deadline_s = time.monotonic() + 2 * PATIENCE_S  # One starts for real beside one that trains.
    steps: list[dict[str, Any]] = []
    while not any(line["generation"] > 2 and line["hosts"] == HOSTS for line in steps):
        assert time.monotonic() < deadline_s, processes.outputs()
        time.sleep(0.02)
        steps = Run(run_dir).metrics


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
    assert RunDir(tmp_path / "run").config().cluster.runtime == "independent"


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


@pytest.mark.nightly
def test_ssh_hosts_listen_on_their_addresses_come_back_and_stop_together(
    tmp_path: Path, outliving: Path, processes: Processes
):
    run_dir = tmp_path / "run"
    hosts = hosts_file(tmp_path, "alice@belgium", "bob@tokyo")
    command = ("bash", LAUNCH / "ssh.sh", hosts, "--config", outliving)
    # They are told by their command lines.
    start(processes, *command, *settings(run_dir=run_dir), **ssh(tmp_path, sys.executable))
    processes.wait_until(lambda: steps_done(run_dir) > 0, PATIENCE_S)
    found = {process.cmdline()[-1]: process for process in training(processes)}
    listening = {
        index: {
            connection.laddr.ip
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        for index, process in found.items()
    }
    assert listening == {"0": {"127.0.0.1"}, "1": {"127.0.0.2"}}
    # They have one secret, which nobody else on the machine sees.
    [secret] = {process.environ()[SECRET_VARIABLE] for process in found.values()}
    assert len(secret) == 44
    descendants = psutil.Process(processes.processes[0].pid).children(recursive=True)
    commands = [process.cmdline() for process in descendants]
    assert not any(secret in word for command in commands for word in command)
    found["0"].kill()
    said = "host 0 ended with exit code 137: restart in 1 s"
    processes.wait_until(lambda: said in processes.output(0), PATIENCE_S)
    wait_until_all_are_back(processes, run_dir)
    assert "[host 0] host 0 rejoined at step" in processes.output(0)
    processes.processes[0].send_signal(signal.SIGTERM)
    assert processes.exit_code(0, PATIENCE_S) == 128 + signal.SIGTERM
    assert "received SIGTERM: all hosts stop after step " in processes.output(0)


def training(processes: Processes) -> list[psutil.Process]:
    """The processes that train, of those that the first program has started."""
    descendants = psutil.Process(processes.processes[0].pid).children(recursive=True)
    words_of = {process: process.cmdline() for process in descendants}
    trains = "skippipe_jax.train"
    return [own for own, words in words_of.items() if trains in words and "python" in words[0]]


def test_ssh_names_a_file_of_a_secret_that_is_not_there(tmp_path: Path):
    hosts = hosts_file(tmp_path, "alice@belgium", "bob@tokyo")
    ended = run("bash", LAUNCH / "ssh.sh", hosts, env={**os.environ, "SECRET": "nowhere"})
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: SECRET = 'nowhere': cannot be read.")
    assert ended.stderr.count("\n") == 1


# Of two hosts the second fails, until the first has seen enough of that and is trained.
FAILS = """\
[ "$1" != -c ] || exit 1
host=${*: -1}
echo "$host $*" >> tried
[ "$host" = 0 ] || exit CODE
until [ "$(grep -c "^1 " tried)" -ge ENOUGH ]; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("code", "settled_s", "enough", "tries", "ended"),
    [
        # Lost again and again.
        (134, 60, 4, range(4, 100), 0),
        # By faults of its own, long after it was started; and a wrong input then.
        (1, 0, 6, [6], 0),
        (2, 0, 1, [1], 0),
        # At once, so that the other would wait for it in vain.
        (1, 60, 100, [1], 1),
        (2, 60, 100, [1], 2),
        # As ssh ends where it does not reach a host.
        (255, 60, 100, [1], 255),
    ],
)
def test_ssh_starts_again_what_may_go_better(
    code: int,
    settled_s: int,
    enough: int,
    tries: Collection[int],
    ended: int,
    tmp_path: Path,
):
    text = (LAUNCH / "ssh.sh").read_text()
    quick = {"telling": 0, "first_pause": 0, "longest_pause": 0, "settled": settled_s}
    for name, seconds in quick.items():
        text, count = re.subn(f"^{name}=[0-9]+$", f"{name}={seconds}", text, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "quick.sh").write_text(text)
    variables = ssh(tmp_path)
    fails = FAILS.replace("CODE", str(code)).replace("ENOUGH", str(enough))
    stand_in(tmp_path / "bin", "python", fails)
    hosts = hosts_file(tmp_path, "alice@belgium", "bob@tokyo")
    done = run(
        *("bash", tmp_path / "quick.sh", hosts, "--config", "config.yaml"),
        env={**os.environ, **variables},
    )
    assert done.returncode == ended, done
    lines = (tmp_path / "tried").read_text().splitlines()
    assert sum(line.startswith("1 ") for line in lines) in tries, done


@pytest.mark.parametrize(
    ("script", "text", "words"),
    [
        ("ssh.sh", None, "is not a readable file"),
        ("ssh.sh", "# none yet\n", "lists no host"),
        ("ssh.sh", "alice@belgium 10.88.0.1\nbob@tokyo\n", "'bob@tokyo' is not NAME ADDRESS"),
        ("ssh.sh", "-v 10.88.0.1\n", "'-v 10.88.0.1' is not NAME ADDRESS"),
        ("firewall.sh", None, "is not a readable file"),
        ("firewall.sh", "alice@belgium 10.88.0.1\n", "TRANSFER_PORT = '': is not a port"),
        ("wireguard.sh", None, "FOLDER = '': is missing"),
        ("tpu_pod.sh", None, "NAME = '': is missing"),
        ("slurm.sbatch", None, "CONFIG RUN_DIR = '': must be two arguments"),
    ],
)
def test_scripts_say_in_one_line_what_is_wrong(
    script: str, text: str | None, words: str, tmp_path: Path
):
    hosts = tmp_path / "hosts"
    if text is not None:
        hosts.write_text(text)
    takes_hosts = script in ("ssh.sh", "firewall.sh")
    variables = {name: text for name, text in os.environ.items() if name not in ("NAME", "ZONE")}
    ended = run("bash", LAUNCH / script, *([hosts] if takes_hosts else []), env=variables)
    assert ended.returncode == 2
    assert re.fullmatch(r"error: [A-Z:_ ]+ = '.*': .*\. .*\.\n", ended.stderr)
    assert words in ended.stderr


# Kubernetes.


def jobset() -> dict[str, Any]:
    """What `kubectl apply` is told of, behind the policy for networks."""
    _, document = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    return document


def job_of_jobset() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What it says of its one job, of a pod and of the container."""
    [job] = jobset()["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return job["template"]["spec"], pod, container


def test_jobset_makes_each_pod_anew_and_gives_up_for_wrong_input_alone():
    """Pods that end with 75 come again, uncounted: one that is pending may keep them waiting."""
    job_spec, pod, container = job_of_jobset()
    *of_codes, drained = sorted(
        job_spec["podFailurePolicy"]["rules"], key=lambda rule: "onPodConditions" in rule
    )
    actions = {}
    for rule in of_codes:
        codes = rule["onExitCodes"]
        assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
        actions |= dict.fromkeys(codes["values"], rule["action"])
    stopped = 128 + signal.SIGTERM
    assert actions == {
        INPUT_ERROR_EXIT_CODE: "FailJob",
        TEMPORARY_EXIT_CODE: "Ignore",
        stopped: "Ignore",
    }
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == (
        "Ignore", "DisruptionTarget",
    )  # fmt: skip
    # What a policy for pods, and limits for each of them, ask for.
    assert pod["restartPolicy"] == "Never"
    assert job_spec["completionMode"] == "Indexed"
    assert job_spec["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in job_spec
    assert jobset()["spec"]["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.nightly
def test_jobset_trains_and_takes_a_pod_back_that_was_made_anew(
    tmp_path: Path, outliving: Path, processes: Processes
):
    job_spec, _, container = job_of_jobset()
    [job] = jobset()["spec"]["replicatedJobs"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = jobset()["metadata"]["name"]
    # The secret comes from one of Kubernetes' own, and is written nowhere.
    [source] = [e["valueFrom"] for e in container["env"] if e["name"] == SECRET_VARIABLE]
    assert source == {"secretKeyRef": {"name": name, "key": "secret"}}
    secret = "thisPodHasTheSecretOfThisRunAndNobodyElse"
    assert given["COORDINATOR"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert int(given["HOSTS"]) == job_spec["completions"] == job_spec["parallelism"]
    port = free_port()

    def start_pod(index: int, address: str) -> None:
        start(
            processes,
            *container["command"],
            **environment(tmp_path / "bin"),
            CONFIG=str(outliving),
            RUN_DIR=str(tmp_path / "run"),
            HOSTS=str(HOSTS),
            COORDINATOR=f"127.0.0.1:{port}",
            SKIPPIPE_BIND_ADDRESS=address,
            SKIPPIPE_SECRET=secret,
            JOB_COMPLETION_INDEX=str(index),
        )

    start_pod(0, "127.0.0.1")
    start_pod(1, "127.0.0.2")
    processes.wait_until(lambda: steps_done(tmp_path / "run") > 0, PATIENCE_S)
    processes.processes[1].kill()
    assert processes.exit_code(1, PATIENCE_S) == -signal.SIGKILL
    # A pod that is made anew has another address.
    start_pod(1, "127.0.0.3")
    wait_until_all_are_back(processes, tmp_path / "run")
    assert "host 1 rejoined at step" in processes.output(2)
    # All go: the node pool is drained.
    for index in (0, 2):
        processes.processes[index].send_signal(signal.SIGTERM)
    stopped = 128 + signal.SIGTERM
    assert [processes.exit_code(index, PATIENCE_S) for index in (0, 2)] == [stopped] * 2
    assert_is_nowhere(secret, tmp_path)


# systemd.

UNIT = LAUNCH / "skippipe.service"


def unit() -> dict[str, dict[str, str]]:
    """The sections of the unit."""
    sections: dict[str, dict[str, str]] = {}
    name = ""
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            sections[name] = {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            assert key not in sections[name]
            sections[name][key] = value
    return sections


def test_service_starts_again_what_may_go_better():
    service = unit()["Service"]
    stopped = {130, 128 + signal.SIGTERM}
    assert service["Restart"] == "on-failure"
    assert {*map(int, service["SuccessExitStatus"].split())} == stopped
    assert int(service["RestartPreventExitStatus"]) == INPUT_ERROR_EXIT_CODE
    # Pauses grow, and no number of starts is too great.
    assert unit()["Unit"]["StartLimitIntervalSec"] == "0"
    pauses = ("RestartSec", "RestartSteps", "RestartMaxDelaySec")
    first_s, steps, longest_s = (int(service[key]) for key in pauses)
    assert 0 < first_s < longest_s
    assert steps > 1
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) >= 120


@pytest.mark.nightly
@pytest.mark.parametrize("has_begun", [False, True])
def test_service_goes_on_with_a_run_that_has_begun(has_begun: bool, tmp_path: Path):
    example = re.findall("^#   ([A-Z_]+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    given = dict(example) | {"RUN_DIR": str(tmp_path / "a run")}
    del given["JOIN"]  # which is for hosts that do not reach the run
    (tmp_path / "a run").mkdir()
    if has_begun:
        (tmp_path / "a run" / CONFIG).touch()
    stand_in(tmp_path, "python", 'printf "%s\\n" "$@"')
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # systemd makes one dollar of two.
    command = [word.replace("$$", "$") for word in shlex.split(unit()["Service"]["ExecStart"])]
    words = run(*command, env=given | path).stdout.splitlines()
    assert words[:2] == ["-m", "skippipe_jax.train"]
    told = arguments_of(train, words[2:])
    assert (told.config, told.set) == (Path(given["CONFIG"]), [f"run_dir={given['RUN_DIR']}"])
    assert told.resume == has_begun
    place = (told.coordinator, str(told.hosts), str(told.host_id))
    assert place == (given["COORDINATOR"], given["HOSTS"], given["HOST_ID"])


def arguments_of(command: ModuleType, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_service_is_one_that_systemd_takes():
    checked = run("systemd-analyze", "verify", UNIT)
    assert checked.returncode == 0, checked.stderr
    # Those before 254 do not know how pauses grow.
    known = [line for line in checked.stderr.splitlines() if "RestartSteps" not in line]
    assert [line for line in known if "RestartMaxDelaySec" not in line] == []


# Joining.

JOIN = "10.88.0.1:8476 10.88.0.2:8477 --set data.path=text"


def recipe(name: str, folder: Path) -> tuple[list[str | Path], dict[str, str]]:
    """The command of a recipe, and its environment; by `slurm` and `ssh` there are two hosts."""
    run_dir = folder / "a run"
    told = {**os.environ, "RUN_DIR": str(run_dir), SECRET_VARIABLE: "that of the run"}
    if name == "slurm":
        return [LAUNCH / "slurm.sbatch", "-", run_dir], told | slurm(folder, python="none")
    if name == "ssh":
        (folder / "secret").write_text("that of the run\n")
        hosts = hosts_file(folder, "alice@belgium", "bob@tokyo")
        return ["bash", LAUNCH / "ssh.sh", hosts], told | ssh(folder, "none") | {
            "SECRET": str(folder / "secret")
        }
    told["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    if name == "service":
        words = shlex.split(unit()["Service"]["ExecStart"])
        return [word.replace("$$", "$") for word in words], told
    *_, container = job_of_jobset()
    assert {"name": "JOIN", "value": ""} in container["env"]
    return container["command"], told


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("service", ["a run"]),
        ("jobset", ["a run"]),
        ("slurm", ["a run/0", "a run/1"]),
        ("ssh", [None, None]),
    ],
)
def test_a_recipe_has_hosts_join(name: str, folders: list[str | None], tmp_path: Path):
    command, variables = recipe(name, tmp_path)
    stand_in(tmp_path / "bin", "python", 'printf "%s\\n" "$@" > "$SAID/said-$$"')
    ended = run(*command, env=variables | {"JOIN": JOIN, "SAID": str(tmp_path)}, cwd=tmp_path)
    assert ended.returncode == 0, ended
    said = [path.read_text().splitlines() for path in tmp_path.glob("said-*")]
    assert [words[:3] for words in said] == [["-m", "skippipe_jax", "join"]] * len(folders)
    told = [arguments_of(join, words[3:]) for words in said]
    assert all(one.address == ["10.88.0.1:8476", "10.88.0.2:8477"] for one in told)
    assert all(one.set == ["data.path=text"] for one in told)
    own = sorted(str(one.run_dir.relative_to(tmp_path)) for one in told if one.run_dir is not None)
    assert own == [folder for folder in folders if folder is not None]


@pytest.mark.parametrize("name", ["slurm", "ssh"])
def test_a_recipe_makes_no_secret_to_join_by(name: str, tmp_path: Path):
    command, variables = recipe(name, tmp_path)
    variables |= {"JOIN": JOIN, SECRET_VARIABLE: "", "SECRET": ""}
    ended = run(*command, env=variables, cwd=tmp_path)
    assert ended.returncode == INPUT_ERROR_EXIT_CODE
    assert re.fullmatch(r"error: .*SECRET = '': is required with JOIN\. .*\.\n", ended.stderr)


# TPU pods.


@pytest.mark.nightly
def test_tpu_workers_train(tmp_path: Path, config: Path):
    stand_in(tmp_path / "skippipe-jax/.venv/bin", "python", run_python())
    make_secret(tmp_path / "skippipe-secret")  # as `install` does
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
