"""What is left of another case than there is now, and what began with it, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from skippipe_sched.errors import InputError

from skippipe_jax.experts.members import Arm, Member, MemberFactory
from skippipe_jax.experts.stale_results import Texts, require_same_inputs
from skippipe_jax.experts.tasks import Workspace
from skippipe_jax.experts.work import trainings
from skippipe_jax.storage.checkpoint import DATA, CommitRecord, commit, file_digest, step_folder
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.planning import make_plan, make_plans
from tests.experts.examples import CONFIG, place_in

NOW: tuple[str, ...] = ("prose", "code", "tables")
DOMAINS: list[tuple[str, ...]] = [NOW, *((name,) for name in NOW)]
TEXTS = Texts({own: " ".join(own) for own in DOMAINS}, {})


def begin(place: Workspace, member: Member, text: str | None = None) -> None:
    """What the folder of a run holds once it has its plan; and once it has read a text."""
    config, run = member.config(), place.run_dir(member)
    RunDir(run).create(config, make_plans(config, place.configs, None))
    if text is not None:
        unfinished = run / "unfinished"
        unfinished.mkdir()
        (unfinished / DATA).write_text(json.dumps({"fingerprint": text}))
        folder = step_folder(run, 1)
        folder.parent.mkdir()
        files = {DATA: file_digest(unfinished / DATA)}
        commit(unfinished, folder, CommitRecord(step=1, stage_layers=(1, 1), files=files))


def refused(place: Workspace, arm: Arm, texts: Texts) -> set[str]:
    """The domains of the runs that are refused."""
    try:
        require_same_inputs(place, trainings(place, [arm]), texts)
    except InputError as error:
        return {word.split("-")[1] for word in error.problem.split() if word.startswith("runs/")}
    return set()


def test_what_began_with_a_run_of_another_text_is_refused_with_it(folder: Path):
    place = place_in(folder)
    [arm] = MemberFactory(place.config).arms()
    for own in trainings(place, [arm]):
        begin(place, own.member, TEXTS.training[own.member.domains])
    assert refused(place, arm, TEXTS) == set()
    # The expert on code began with that on prose.
    changed = Texts({**TEXTS.training, ("prose",): "other"}, {})
    assert refused(place, arm, changed) == {"prose", "code"}
    assert refused(place, arm, Texts({**TEXTS.training, NOW: "other"}, {})) == {"all", *NOW}


@pytest.mark.parametrize("key", ["case", "file"])
def test_a_case_or_plan_that_has_changed_in_its_file_is_refused(folder: Path, key: str):
    def write(forward_s: float) -> None:
        case = CONFIG["run"]["plan"]["case"] | {"forward_s": forward_s}
        Path("case.yaml").write_text(yaml.safe_dump(case))
        make_plan(case, "balanced").save(Path("plan.json"))

    write(0.1)
    plan = {"method": "balanced", key: {"case": "case.yaml", "file": "plan.json"}[key]}
    place = place_in(folder, run=CONFIG["run"] | {"plan": plan})
    [arm] = MemberFactory(place.config).arms()
    for own in trainings(place, [arm])[:2]:
        begin(place, own.member)
    assert refused(place, arm, TEXTS) == set()
    write(0.2)
    assert refused(place, arm, TEXTS) == {"all", "prose"}
