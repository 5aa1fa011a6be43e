"""What a host has to go on with when others are lost, whatever it held before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.cluster.agreement import DeadlinePassed
from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import AveragingConfig, ClusterConfig
from skippipe_jax.config.recovery import RecoveryConfig
from skippipe_jax.config.replan import ReplanConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage.hold import Hold
from skippipe_jax.storage.layout import Checkpoint
from skippipe_jax.training import survival
from skippipe_jax.training.report import GenerationReport, SessionPlan, plan_session
from skippipe_jax.training.setup import Settled
from skippipe_jax.training.survival import GOES_BACK, Holding, Survival

OWN, STEP = 1, 20
KEPT: Any = {(0, None): "a state"}


class Openings(Survival):
    """Opens no stretch: all teams end meanwhile, but for the last of some generations."""

    def __init__(self, folder: Path, *generations: Generation):
        host = Membership(ClusterConfig(heartbeat_timeout_s=0.01), OWN, 3)
        config = SimpleNamespace(
            cluster=ClusterConfig(heartbeat_timeout_s=0.01),
            replan=ReplanConfig(),
            recovery=RecoveryConfig(),
            averaging=AveragingConfig(),
        )
        trainer: Any = SimpleNamespace(
            folder=folder, config=config, membership=host, steps_done=STEP
        )
        unused: Any = None
        settled = Settled(unused, (0, OWN, 2), {}, None, (), None, None, None)
        super().__init__(trainer, settled)
        self.teams = [Team(host, generation) for generation in generations]
        self.held: list[Holding] = []
        self.error: Exception = TeamEnded()

    def _open(self, team: Team, holding: Holding, since_s: float) -> Any:
        self.held.append(holding)
        if self.teams:
            raise self.error

    def _next(self, team: Team) -> Team:
        return self.teams.pop(0)

    def after(self, holding: Holding) -> list[Holding]:
        """What the host has in each generation, if it had this before."""
        self._opened(self.teams.pop(0), holding, 0.0)
        return self.held


@pytest.fixture(autouse=True)
def no_other_places(monkeypatch: pytest.MonkeyPatch):
    """Nobody comes beside these hosts, and nobody decides by rules."""
    monkeypatch.setattr(survival, "host_of_places", lambda config, host_of: host_of)
    rules = SimpleNamespace(serves=lambda *_: ())
    monkeypatch.setattr(survival, "rules_of", lambda *_: rules)


def generation(number: int, **fields: Any) -> Generation:
    return Generation(number, (0, OWN, 2), (0, 0, 0), leader=0, step=STEP, **fields)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Checkpoint]:
    """The checkpoint that all hosts find, to which they go back: its last, if it is changed."""
    saved = [Checkpoint(tmp_path, STEP, (1,), {})]
    monkeypatch.setattr(survival, "parts_of", lambda *_: lambda checkpoint: {"stage_0"})
    monkeypatch.setattr(survival, "read_data_state", lambda saved: {"microbatches": saved.step * 4})
    monkeypatch.setattr(survival, "from_host_0", lambda team, name, make, timeout_s: make())
    monkeypatch.setattr(Membership, "control", SimpleNamespace(went_back=lambda *told: None))

    def go_back(*_: Any, parts: Any, **__: Any) -> tuple[int, Checkpoint | None]:
        return saved[-1].step, None if parts is None else saved[-1]

    monkeypatch.setattr(survival, "go_back", go_back)
    return saved


def gone_back(openings: Openings, team: Generation, holding: Holding) -> tuple[int, Holding]:
    """After which step a team goes on, of which a host had this, and what it has then."""
    settled: Any = SimpleNamespace(mirror=None)
    given = Team(openings._trainer.membership, team), settled, holding
    after, holding = openings._gone_back(*given)
    return after.generation.step, holding


def test_a_host_goes_on_with_what_it_has(tmp_path: Path):
    before = Holding(88, KEPT)
    assert Openings(tmp_path, generation(2), generation(3)).after(before) == [before, before]


def test_who_goes_back_to_a_checkpoint_does_so_although_its_team_ends_meanwhile(
    found: list[Checkpoint], tmp_path: Path
):
    openings = Openings(tmp_path, generation(2, is_rewound=True), generation(3))
    assert openings.after(Holding(104, KEPT)) == [GOES_BACK, GOES_BACK]
    # It may have found out that an earlier one is the newest that is intact, and others not.
    openings = Openings(tmp_path, generation(3))
    openings._trainer.steps_done = STEP - 10
    assert openings.after(GOES_BACK) == [GOES_BACK]
    assert gone_back(openings, generation(3), GOES_BACK) == (STEP, Holding(80, {}, found[0]))


def test_all_go_back_to_an_older_checkpoint_where_the_newest_is_damaged_for_one(
    found: list[Checkpoint], tmp_path: Path
):
    older = Checkpoint(tmp_path, STEP - 10, (1,), {})
    found.append(older)
    openings = Openings(tmp_path)
    openings.lines.lines.extend({"step": step, "loss": 1.0} for step in range(15))
    lost = generation(2, is_rewound=True, lost=(1,))
    openings.recoveries.begin_one(lost, "rewind", STEP + 4, 2.5)
    expected = STEP - 10, Holding(40, {}, older)
    assert gone_back(openings, lost, GOES_BACK) == expected
    assert openings._trainer.steps_done == STEP - 10
    assert openings.lines.lines[-1]["step"] == STEP - 10
    told = openings.recoveries.told()
    assert told is not None
    assert (told["step"], told["steps_old"]) == (STEP - 10, 14)
    # Also who has read the newest one already, of which another had not when hosts were lost.
    assert gone_back(openings, generation(3), Holding(80, KEPT)) == expected
    assert gone_back(openings, generation(3, fresh=(OWN,)), Holding(0, {}))[1].checkpoint is None


@pytest.mark.parametrize("fresh", [(OWN,), (0,)], ids=["this host", "another"])
def test_what_a_lost_stage_cost_is_known_to_hosts_that_were_not_there(
    fresh: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Any of them may lead when the first step is made after it."""
    for name, stub in (
        ("_write", lambda *_: None),
        ("_replanned", lambda self, stretch, *_: stretch),
    ):
        monkeypatch.setattr(Survival, name, stub)
    monkeypatch.setattr(
        survival, "open_servers", lambda *_: SimpleNamespace(connect=print, endpoint={})
    )
    monkeypatch.setattr(survival, "regrouped", lambda _, settled, *__: settled)
    monkeypatch.setattr(survival, "Stretch", lambda *_: SimpleNamespace())
    theirs = {"step_before": 24, "loss_before": 2.25}

    def exchange(
        team: Team, generation: Generation, own: GenerationReport, timeout_s: float
    ) -> SessionPlan:
        other = GenerationReport(recovery=None if 0 in fresh else theirs)
        return plan_session(generation, [other, own])

    monkeypatch.setattr(survival, "exchange_reports", exchange)
    monkeypatch.setattr(Team, "here", lambda _: {})
    monkeypatch.setattr(Team, "has_ended", False)
    openings: Any = Openings(tmp_path)
    openings.lines.lines.append({"step": 24, "loss": 2.5})
    trainer = openings._trainer
    trainer.steps_done = 24
    trainer.config.recovery = SimpleNamespace(lost_stage="rewind")
    lost = Generation(2, (0, OWN), (0, 0), 0, 20, is_rewound=True, lost=(1,), fresh=fresh)
    Survival._open(openings, Team(trainer.membership, lost), Holding(0), 0.0)
    told = openings.recoveries.told()
    assert told is not None
    known = 2.25 if OWN in fresh else 2.5
    assert (told["step_before"], told["loss_before"]) == (24, known)


def test_whoever_leads_keeps_the_folder_from_other_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(survival.run_folder, "append_generation", lambda *_: None)
    openings: Any = Openings(tmp_path)
    host = openings._trainer.membership
    follows, leads = (Generation(2, (OWN, 2), (0, 0), leader, STEP) for leader in (2, OWN))
    settled: Any = SimpleNamespace(plan=None, agreed=SimpleNamespace(members=[]))
    openings._write(Team(host, follows), settled)
    with Hold(tmp_path) as other:
        other.take()
    openings._write(Team(host, leads), settled)
    with Hold(tmp_path) as other, pytest.raises(TemporaryError, match="another training"):
        other.take()
    openings.close()


def test_a_resumed_run_that_loses_hosts_as_it_begins_begins_with_its_checkpoint(
    found: list[Checkpoint], tmp_path: Path
):
    openings = Openings(tmp_path, generation(2))
    assert openings.after(GOES_BACK) == [GOES_BACK]
    assert gone_back(openings, generation(2), GOES_BACK) == (STEP, Holding(80, {}, found[0]))


def test_nobody_goes_on_from_a_step_with_the_state_after_another(tmp_path: Path):
    openings = Openings(tmp_path, generation(2))
    openings._trainer.steps_done = STEP - 1
    with pytest.raises(DeadlinePassed, match="the state after step 19, and the others go on from"):
        openings.after(Holding(88, KEPT))


def test_a_host_whose_replicas_are_apart_may_be_ahead_and_keeps_what_it_has(
    found: list[Checkpoint], tmp_path: Path
):
    openings: Any = Openings(tmp_path, generation(2))
    assert gone_back(openings, generation(2), Holding(88, KEPT)) == (STEP, Holding(88, KEPT))
    openings._trainer.config.averaging = AveragingConfig(mode="outer")
    openings._trainer.steps_done = STEP + 2
    assert openings.after(Holding(88, KEPT)) == [Holding(88, KEPT)]
    # Unless another goes on from a checkpoint: then all do.
    back = gone_back(openings, generation(2), Holding(88, KEPT))
    assert back == (STEP, Holding(80, {}, found[0]))
    openings = Openings(tmp_path, generation(2))
    openings._trainer.config.averaging = AveragingConfig(mode="outer")
    openings._trainer.steps_done = STEP - 1
    with pytest.raises(DeadlinePassed, match="the state after step 19"):
        openings.after(Holding(88, KEPT))


def test_who_was_left_out_has_read_nothing_that_counts(tmp_path: Path):
    openings = Openings(tmp_path, generation(2, fresh=(OWN,)))
    assert openings.after(Holding(104, KEPT)) == [Holding(0, kept={})]


def test_who_is_apart_reads_no_checkpoint_and_takes_the_state_of_who_has(
    found: list[Checkpoint], tmp_path: Path
):
    rewound = generation(2, is_rewound=True, fresh=(OWN,), apart=(OWN,))
    assert Openings(tmp_path, rewound).after(Holding(104, KEPT)) == [Holding(0, kept={})]


def test_where_all_that_are_left_are_apart_the_run_ends(tmp_path: Path):
    last = generation(2, is_last=True, apart=(0, OWN, 2), cause="host 3 was lost")
    with pytest.raises(DeadlinePassed, match="host 3 was lost, and all hosts that are left have j"):
        Openings(tmp_path, last).after(Holding(104, KEPT))


def test_a_run_that_has_saved_nothing_begins_anew(tmp_path: Path):
    first = Generation(2, (0, OWN, 2), (0, 0, 0), leader=0, step=0, is_rewound=True)
    assert Openings(tmp_path, first).after(Holding(12, KEPT)) == [Holding(0, kept=None)]


def test_a_host_that_dies_as_all_open_for_the_first_time_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint: Any = "a checkpoint"
    openings = Openings(tmp_path, generation(2))
    first = Team(openings._trainer.membership, generation(1))
    monkeypatch.setattr(Membership, "outlive", lambda *_, **__: first)
    error: Exception = jax.errors.JaxRuntimeError("INTERNAL: socket closed")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Survival, "_agreed", fail)
    openings._settled = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        data=None, transfers=None, plan=SimpleNamespace(stages=())
    )
    openings.begin(openings._trainer.membership, checkpoint, 80)
    assert openings.held == [GOES_BACK]
    error = ValueError("is no fault of another host")
    with pytest.raises(ValueError, match="no fault"):
        openings.begin(openings._trainer.membership, checkpoint, 80)


def test_what_fails_because_a_host_dies_is_done_again_with_those_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = Holding(88, KEPT)
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = jax.errors.JaxRuntimeError("INTERNAL: socket closed")
    assert openings.after(before) == [before, before]
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = ValueError("is no fault of another host")
    with pytest.raises(ValueError, match="no fault"):
        openings.after(before)
    monkeypatch.setattr(Team, "has_ended", False)
    monkeypatch.setattr(Membership, "misses", lambda *given: False)
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = jax.errors.JaxRuntimeError("INTERNAL: socket closed")
    with pytest.raises(jax.errors.JaxRuntimeError):
        openings.after(before)
