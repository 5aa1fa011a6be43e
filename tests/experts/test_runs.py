"""An ensemble trained, scored and compared by the command, killed now and then, and used."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.campaign.running import Task, ordered
from skippipe_jax.cli.main import main
from skippipe_jax.config import MixtureConfig
from skippipe_jax.config.data import FOR_SCORES
from skippipe_jax.config.parsing import leaves
from skippipe_jax.experts import work
from skippipe_jax.experts.config import load_experts
from skippipe_jax.experts.members import MemberFactory
from skippipe_jax.experts.scoring import score_asked
from skippipe_jax.experts.tasks import Scored, Workspace
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scores import score
from skippipe_jax.storage.run_dir import RunDir
from tests.experts.examples import CONFIG, write_config, write_text
from tests.harness.processes import started_processes

SECTIONS: dict[str, Any] = {
    "domains": CONFIG["domains"][:3],
    "outside": ["tables"],
    "sizes": {"S": {}},
    "lanes": "measured",
    "experts": {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}},
    "arms": {
        "equal": {"size": "S", "steps": 5},
        "mean": {"kind": "averaged", "of": "equal"},
    },
}
TIMEOUT_S = 300.0


def write_inputs(folder: Path) -> None:
    write_text(folder)
    write_config(folder, **SECTIONS)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "experts" / work.RESULTS).read_text())


def run_here(tasks: Sequence[Task], *_: Any) -> None:
    """Run the tasks as `run_all` does, but all in this process."""
    for task in ordered(tasks):
        for command in () if task.is_done() else task.commands():
            module, *words = command()
            if module == "skippipe_jax.train":
                assert main(["train", *words]) == 0
            else:
                assert score_asked(Path(words[0])) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which an ensemble has been trained undisturbed; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(StringIO()) as printed:
        patched.chdir(folder)
        patched.setattr(work, "run_all", run_here)
        assert main(["experts", "experts.yaml"]) == 0
    assert "mean, outside" in printed.getvalue()
    return folder


def marks(folder: Path) -> int:
    """How far an ensemble has come, in files that are written one after the other."""
    files = [name for _, _, names in os.walk(folder / "experts") for name in names]
    return sum(name.endswith(("config.yaml", "COMMITTED", ".npz")) for name in files)


@pytest.mark.nightly
def test_it_gives_the_same_when_it_is_killed_and_started_again(trained: Path, tmp_path: Path):
    """Whoever is killed leaves trainings behind, which the next one waits for."""
    write_inputs(tmp_path)
    whole = marks(trained)
    moments = sorted(random.Random(0).sample(range(1, whole), 2))
    with started_processes(tmp_path) as processes:
        command = ("-m", "skippipe_jax", "experts", "experts.yaml")
        for moment in moments:
            processes.start(*command, folder=tmp_path)
            own = processes.processes[-1]
            while own.poll() is None and marks(tmp_path) < moment:
                time.sleep(0.005)
            own.kill()
            own.wait()
        processes.start(*command, folder=tmp_path)
        code = processes.exit_code(len(moments), TIMEOUT_S)
        logs = (tmp_path / "experts" / "logs").glob("*")
        told = "\n".join([processes.outputs(), *(path.read_text() for path in logs)])
    assert code == 0, told
    # A process that trains alone has more threads, which may round otherwise.
    expected = {
        key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
        for key, value in leaves(results(trained))
    }
    assert dict(leaves(results(tmp_path))) == expected, f"killed at {moments} of {whole}\n{told}"
    assert "Traceback" not in told
    assert marks(tmp_path) == whole


def test_results_tell_of_every_arm_and_domain(trained: Path):
    found = results(trained)
    assert set(found["arms"]) == {"equal", "mean"}
    assert set(found["difficulty"]) == {"prose", "code"}
    for own in found["arms"].values():
        assert set(own["domains"]) == {"prose", "code", "tables"}
        assert own["mean"] == pytest.approx(np.mean([*own["domains"].values()]), abs=1e-4)
    assert found["arms"]["equal"]["training_flops"] > 0
    ElementTree.parse(trained / "experts" / work.PICTURE)
    # Each has trained on its own domain alone, and so is the best one there.
    place = place_of(trained)
    [equal, *_] = MemberFactory(place.config, found["difficulty"]).arms()
    losses = {
        name: {d: Scored(place, (own,)).scores(d, FOR_SCORES).loss for d in equal.members}
        for name, own in equal.members.items()
    }
    for domain in equal.members:
        assert min(losses, key=lambda name, d=domain: losses[name][d]) == domain


def place_of(folder: Path) -> Workspace:
    config = load_experts(folder / "experts.yaml")
    return Workspace(config, folder / config.folder)


def require_done(tasks: Sequence[Task], *_: Any) -> None:
    assert all(task.is_done() for task in tasks), "something trains"


def test_nothing_is_trained_or_scored_twice(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(work, "run_all", require_done)
    assert work.train(place_of(trained)) == results(trained)


@pytest.mark.parametrize("domain", ["prose", "tables"])
def test_a_changed_text_is_refused_before_anything_trains(
    domain: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    monkeypatch.chdir(folder)

    monkeypatch.setattr(work, "run_all", require_done)
    for document in (folder / "text" / domain).iterdir():
        document.write_text(document.read_text() + "?")
    with pytest.raises(InputError, match="of another text") as refused:
        work.train(place_of(folder))
    assert refused.value.field == "folder"
    made = {f"{own.parent.name}/{own.name}" for own in (folder / "experts").glob("[rs]*s/*")}
    if domain == "tables":  # Nothing is trained on it, and probes score their own domain alone.
        made = {own for own in made if own.startswith("scores/") and "/probe-" not in own}
    assert made
    assert set(refused.value.problem.partition(": ")[2].split(", ")) == made
    # They are named for who removes them.
    for name in made:
        shutil.rmtree(folder / "experts" / name)
    with pytest.raises(AssertionError, match="something trains"):
        work.train(place_of(folder))


@pytest.mark.nightly
def test_it_is_compared_again_by_a_process_of_its_own(trained: Path):
    expected = results(trained)
    for name in (work.RESULTS, work.PICTURE):
        (trained / "experts" / name).unlink()
    words = [sys.executable, "-m", "skippipe_jax", "experts", "evaluate", "experts.yaml"]
    path = os.pathsep.join(
        map(os.path.abspath, os.environ.get("PYTHONPATH", ".").split(os.pathsep))
    )
    subprocess.run(
        words,
        cwd=trained,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
    )
    assert results(trained) == expected
    assert (trained / "experts" / work.PICTURE).exists()


def test_runs_began_with_those_before_them(trained: Path):
    place = place_of(trained)
    arms = MemberFactory(place.config, results(trained)["difficulty"]).arms()
    for own in [run for arm in arms for member in arm.members.values() for run in member.lineage()]:
        told = RunDir(place.run_dir(own)).parent()
        assert (told is None) == (own.kind == "seed")
        if told is not None:
            assert told["init_from"] == place.origin(own)


def test_exported_experts_say_what_they_said(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(trained)
    place = place_of(trained)
    folders = work.export(place)
    assert work.export(place) == folders
    [equal, _] = MemberFactory(place.config, results(trained)["difficulty"]).arms()
    members = [*equal.members.values()]
    assert {folder.name for folder in folders} == {own.name for own in members}
    for own, folder in zip(members, folders, strict=True):
        assert folder.name == own.name
        source = open_source(hf=folder)
        domains = tuple(MixtureConfig(**one) for one in place.asked()["domains"])
        told = own.config().data
        data = replace(told, mixture=domains, tokenizer=source.config.data.tokenizer)
        known = Scored(place, (own,)).scores("prose", FOR_SCORES)
        found = score(source.model(), data, "prose", FOR_SCORES, len(known.counted))
        assert found.text == known.text
        np.testing.assert_allclose(
            found.log_probabilities, known.log_probabilities, rtol=1e-4, atol=1e-4
        )
