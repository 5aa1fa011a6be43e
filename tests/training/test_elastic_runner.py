"""A host among others that are lost or join: what it decides, and what it has to go on with."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE, exit_decision
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import AveragingConfig, ClusterConfig
from skippipe_jax.config.cluster import RecoveryConfig, ReplanConfig
from skippipe_jax.connections import waiting
from skippipe_jax.consensus.generations import Abandoned, Generation, Tick
from skippipe_jax.errors import GenerationEnded, HostLeft, PeerTimeout, TransferTimeout
from skippipe_jax.storage.checkpoint import Checkpoint, CommitRecord
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.elastic import coordinator, runner
from skippipe_jax.training.elastic.coordinator import (
    JOINING,
    RECONNECTS_AFTER_S,
    Cause,
    Confirming,
    CoordinatorEvent,
    CoordinatorState,
    Entered,
    Failed,
    HostPolicy,
    Opening,
    Signal,
    StateOrigin,
    StateSource,
    Stopped,
    Suspended,
    Training,
    advance,
)
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.report import GenerationReport
from skippipe_jax.training.session import HeldState
from skippipe_jax.training.setup import HostSetup
from tests.harness.step_metrics import metrics_of

OWN, STEP = 1, 20
POLICY = HostPolicy(OWN, 60.0, 20.0, "rewind", replicas_diverge=False)


def generation(number: int, **fields: Any) -> Generation:
    return Generation(number, (0, OWN, 2), (0, 0, 0), leader=0, step=STEP, **fields)


def source(origin: StateOrigin, step: int = STEP) -> StateSource:
    return StateSource(step, origin)


SECOND = generation(2)
HELD, SAVED, THEIRS = map(source, StateOrigin)
OPENING, TRAINING = Opening(SECOND, HELD), Training(SECOND)
LOOKS, RETRIES = Confirming(TRAINING, False, 20.0), Confirming(TRAINING, True, RECONNECTS_AFTER_S)
OPEN_RETRIES = Confirming(OPENING, True, RECONNECTS_AFTER_S)
FRESH = generation(3, fresh=(OWN,))
BEGINNING = Opening(FRESH, THEIRS)


@pytest.mark.parametrize(
    ("state", "event", "following"),
    [
        (JOINING, Entered(FRESH), Opening(FRESH, source(StateOrigin.PEERS, 0))),
        (Suspended(1, None), Entered(SECOND, STEP), OPENING),
        (Suspended(2, None), Entered(FRESH, STEP), BEGINNING),
        (Suspended(1, HELD), Entered(SECOND), OPENING),
        (OPENING, Signal.OPENED, TRAINING),
        (OPENING, Signal.ROLLED_BACK, Opening(SECOND, SAVED)),
        (BEGINNING, Signal.ROLLED_BACK, BEGINNING),
        (OPENING, Signal.ENDED, Suspended(2, HELD)),
        (TRAINING, Signal.ENDED, Suspended(2, None)),
        (OPENING, Failed(Cause.OWN), OPENING),
        (TRAINING, Failed(Cause.OWN), TRAINING),
        (TRAINING, Failed(Cause.SILENCE), Confirming(TRAINING, False, 0.0)),
        (TRAINING, Failed(Cause.CHECKPOINT), LOOKS),
        (TRAINING, Failed(Cause.TRANSFER), RETRIES),
        (OPENING, Failed(Cause.TRANSFER), OPEN_RETRIES),
        (LOOKS, Signal.ENDED, Suspended(2, None)),
        (LOOKS, Signal.MISSED, Suspended(2, None, abandons=True)),
        (LOOKS, Signal.TIME_OVER, TRAINING),
        (RETRIES, Signal.ENDED, Suspended(2, None)),
        (RETRIES, Signal.MISSED, Suspended(2, None, abandons=True)),
        (RETRIES, Signal.TIME_OVER, Suspended(2, None, has_reconnected=True, abandons=True)),
        (OPEN_RETRIES, Signal.TIME_OVER, Suspended(2, HELD, has_reconnected=True, abandons=True)),
    ],
)
def test_states_follow_each_other(
    state: CoordinatorState, event: CoordinatorEvent, following: CoordinatorState
):
    assert advance(state, event, POLICY) == following


@pytest.mark.parametrize(
    ("state", "event", "error", "text"),
    [
        (Suspended(0, THEIRS), Signal.TIME_OVER, PeerTimeout, "not admitted to the run within"),
        (Suspended(2, None), Signal.TIME_OVER, PeerTimeout, "no majority of hosts within"),
        (Suspended(2, None), Signal.LEFT, HostLeft, "continue without this host"),
        (Suspended(2, HELD), Signal.LEFT, HostLeft, "continue without this host"),
        (Suspended(2, THEIRS), Entered(generation(3)), PeerTimeout, "local state is at step 20"),
    ],
)
def test_a_host_stops(
    state: CoordinatorState, event: CoordinatorEvent, error: type[Exception], text: str
):
    following = advance(state, event, POLICY)
    assert isinstance(following, Stopped)
    assert isinstance(following.error, error)
    assert text in str(following.error)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_transfers_that_fail_again_before_a_step_has_been_made_are_this_hosts_own_error(
    is_open: bool, has_stepped: bool
):
    state = advance(RETRIES if is_open else OPEN_RETRIES, Signal.TIME_OVER, POLICY)
    state = advance(state, Entered(generation(3), STEP if is_open else None), POLICY)
    opened = advance(state, Signal.OPENED, POLICY)
    state = advance(opened, Failed(Cause.TRANSFER, has_stepped), POLICY)
    assert isinstance(state, Confirming)
    assert state.seconds == (RECONNECTS_AFTER_S if has_stepped else 20.0)
    again = Suspended(3, None, has_reconnected=True, abandons=True)
    assert advance(state, Signal.TIME_OVER, POLICY) == (again if has_stepped else opened)


def test_what_cannot_come_is_an_error():
    for state, event in [
        (Stopped(HostLeft("it left")), Signal.ENDED),
        (TRAINING, Signal.OPENED),
        (TRAINING, Entered(SECOND)),
    ]:
        with pytest.raises(ValueError, match="is not possible in state"):
            advance(state, event, POLICY)


REWOUND = generation(3, is_rewound=True)
APART = generation(3, is_rewound=True, fresh=(OWN,), diskless=(OWN,))


@pytest.mark.parametrize(
    ("entered", "held", "chosen"),
    [
        (generation(3), HELD, HELD),
        (generation(3, fresh=(OWN,)), source(StateOrigin.OWN, 24), source(StateOrigin.PEERS, 24)),
        (generation(3, fresh=(OWN,)), SAVED, THEIRS),
        (REWOUND, source(StateOrigin.OWN, 24), source(StateOrigin.CHECKPOINT, 24)),
        (REWOUND, THEIRS, SAVED),
        # It was to read a checkpoint, and that generation ended before it had: so it still is.
        (generation(3), source(StateOrigin.CHECKPOINT, 24), source(StateOrigin.CHECKPOINT, 24)),
        # Who reaches no folder reads no checkpoint.
        (APART, HELD, THEIRS),
    ],
)
def test_a_host_goes_on_with_what_its_generation_has_for_it(
    entered: Generation, held: StateSource, chosen: StateSource
):
    assert advance(Suspended(2, held), Entered(entered), POLICY) == Opening(entered, chosen)


@pytest.mark.parametrize("diverge", [False, True])
@pytest.mark.parametrize("step", [STEP - 1, STEP + 2])
def test_only_hosts_whose_replicas_diverge_may_be_ahead(step: int, diverge: bool):
    policy = HostPolicy(OWN, 60.0, 20.0, "rewind", replicas_diverge=diverge)
    state = advance(Suspended(2, source(StateOrigin.OWN, step)), Entered(generation(3)), policy)
    if diverge and step > STEP:
        assert state == Opening(generation(3), source(StateOrigin.OWN, step))
    else:
        assert isinstance(state, Stopped)
        assert f"local state is at step {step}, the run at step 20" in str(state.error)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"diskless": (0, OWN, 2)}, "host 3 was lost; only diskless hosts remain"),
        ({}, "a stage is lost and cannot be .*recovery.lost_stage = rewind"),
    ],
)
def test_the_last_generation_says_why_the_run_ends(fields: dict[str, Any], text: str):
    last = generation(3, is_last=True, cause="host 3 was lost", **fields)
    state = advance(Suspended(2, HELD), Entered(last), POLICY)
    assert isinstance(state, Stopped)
    with pytest.raises(PeerTimeout, match=text):
        raise state.error


# What a host has to go on with when others are lost, whatever it held before.


KEPT: Any = {(0, None): "a state"}
GOES_BACK = HeldState(STEP, 0, {}, restores_checkpoint=True)
NOTHING = HeldState(STEP, 0, {})


class Openings(ElasticRunner):
    """Opens no session: all groups end meanwhile, but for the last of some generations."""

    def __init__(self, folder: Path, *generations: Generation):
        host = Membership(ClusterConfig(heartbeat_timeout_s=0.01), OWN, 3)
        config = SimpleNamespace(
            cluster=ClusterConfig(heartbeat_timeout_s=0.01),
            replan=ReplanConfig(),
            recovery=RecoveryConfig(),
            averaging=AveragingConfig(),
        )
        callbacks = SimpleNamespace(of_run=())
        run: Any = SimpleNamespace(
            run_dir=folder, config=config, membership=host, callbacks=callbacks
        )
        unused: Any = None
        setup = HostSetup(schedule=unused, host_of=(0, OWN, 2), programs={})
        super().__init__(run, setup)
        self.groups = [*map(host.group_of, generations)]
        self.held: list[HeldState] = []
        self.error: Exception = GenerationEnded()

    def _open(self, group: Group, state: HeldState, since_s: float) -> Any:
        self.held.append(state)
        if self.groups:
            raise self.error

    def _await(self, after: int, seconds: float) -> Entered:
        self._group = self.groups.pop(0)
        return Entered(self._group.generation)

    def after(self, state: HeldState) -> list[HeldState]:
        """What the host has in each generation, if it had this before."""
        origin = StateOrigin.CHECKPOINT if state.restores_checkpoint else StateOrigin.OWN
        self._held, self._state = state, Suspended(1, StateSource(state.step, origin))
        self._tell(self._await(1, 0.0))
        self._until_open(0.0)
        return self.held


@pytest.fixture(autouse=True)
def no_other_places(monkeypatch: pytest.MonkeyPatch):
    """Nobody comes beside these hosts, and nobody decides by rules."""
    monkeypatch.setattr(runner, "host_by_node", lambda config, host_of: host_of)
    rules = SimpleNamespace(serves=lambda *_: ())
    monkeypatch.setattr(runner, "elastic_rules", lambda *_: rules)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Checkpoint]:
    """The checkpoint that all hosts find, to which they go back: its last, if it is changed."""
    saved = [Checkpoint(tmp_path, CommitRecord(step=STEP, stage_layers=(1,), files={}))]
    monkeypatch.setattr(runner, "parts_to_restore", lambda *_: lambda checkpoint: {"stage_0"})
    monkeypatch.setattr(runner, "load_data_state", lambda saved: {"microbatches": saved.step * 4})
    monkeypatch.setattr(runner, "from_host_0", lambda group, name, make, timeout_s: make())
    monkeypatch.setattr(Membership, "control", SimpleNamespace(tell=lambda *told: None))

    def rewind(*_: Any, parts: Any, **__: Any) -> tuple[int, Checkpoint | None]:
        return saved[-1].step, None if parts is None else saved[-1]

    monkeypatch.setattr(runner, "rewind", rewind)
    return saved


def gone_back(openings: Openings, group: Generation, state: HeldState) -> HeldState:
    """What a host has that had this, after what its group goes on from."""
    setup: Any = SimpleNamespace(mirror=None)
    openings._state = Opening(group, StateSource(state.step, StateOrigin.OWN))
    given = openings._membership.group_of(group), setup, replace(state, step=group.step)
    after, state = openings._roll_back(*given)
    assert after.generation.step == state.step
    return state


def test_who_goes_back_to_a_checkpoint_does_so_although_its_team_ends_meanwhile(
    found: list[Checkpoint], tmp_path: Path
):
    openings = Openings(tmp_path, generation(2, is_rewound=True), generation(3))
    assert openings.after(HeldState(STEP, 104, KEPT)) == [GOES_BACK, GOES_BACK]
    # It may have found out that an earlier one is the newest that is intact, and others not.
    openings = Openings(tmp_path, generation(3))
    earlier = replace(GOES_BACK, step=STEP - 10)
    assert openings.after(earlier) == [earlier]
    assert gone_back(openings, generation(3), GOES_BACK) == HeldState(STEP, 80, {}, found[0])


def test_all_go_back_to_an_older_checkpoint_where_the_newest_is_damaged_for_one(
    found: list[Checkpoint], tmp_path: Path
):
    older = Checkpoint(tmp_path, CommitRecord(step=STEP - 10, stage_layers=(1,), files={}))
    found.append(older)
    openings = Openings(tmp_path)
    openings.metrics_tail.lines.extend(metrics_of(step) for step in range(15))
    lost = generation(2, is_rewound=True, lost=(1,))
    openings.recoveries.begin_recovery(lost, "rewind", STEP + 4, 2.5)
    expected = HeldState(STEP - 10, 40, {}, older)
    assert gone_back(openings, lost, GOES_BACK) == expected
    assert openings.metrics_tail.lines[-1].step == STEP - 10
    told = openings.recoveries.pending()
    assert told is not None
    assert (told["step"], told["steps_old"]) == (STEP - 10, 14)
    # Also who has read the newest one already, of which another had not when hosts were lost.
    assert gone_back(openings, generation(3), HeldState(STEP, 80, KEPT)) == expected
    assert gone_back(openings, generation(3, fresh=(OWN,)), NOTHING).checkpoint is None


def test_who_went_back_further_reads_that_checkpoint_although_its_team_ends_meanwhile(
    found: list[Checkpoint], tmp_path: Path
):
    """The next generation begins with the earlier step, of which this host's own states are not."""
    found.append(Checkpoint(tmp_path, CommitRecord(step=STEP - 10, stage_layers=(1,), files={})))

    class GoesBack(Openings):
        def _open(self, group: Group, state: HeldState, since_s: float) -> Any:
            if len(self.groups) == 1:
                setup: Any = SimpleNamespace(mirror=None)
                self._roll_back(group, setup, replace(state, restores_checkpoint=True))
            return super()._open(group, state, since_s)

    openings = GoesBack(tmp_path, generation(2), replace(generation(3), step=STEP - 10))
    before = HeldState(STEP, 88, KEPT)
    assert openings.after(before) == [before, GOES_BACK]


def test_whoever_leads_keeps_the_folder_from_other_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RunDir, "append_generation", lambda *_: None)
    openings: Any = Openings(tmp_path)
    host = openings._membership
    follows, leads = (Generation(2, (OWN, 2), (0, 0), leader, STEP) for leader in (2, OWN))
    setup: Any = SimpleNamespace(plan=None, agreed=SimpleNamespace(reports=[]))
    openings._write(host.group_of(follows), setup)
    with RunLock(tmp_path) as other:
        other.acquire()
    openings._write(host.group_of(leads), setup)
    with RunLock(tmp_path) as other, pytest.raises(TemporaryError, match="another training"):
        other.acquire()
    openings.close()


def test_where_one_goes_on_from_a_checkpoint_all_do_whose_replicas_diverge(
    found: list[Checkpoint], tmp_path: Path
):
    openings: Any = Openings(tmp_path, generation(2))
    assert gone_back(openings, generation(2), HeldState(STEP, 88, KEPT)) == HeldState(
        STEP, 88, KEPT
    )
    openings._config.averaging = AveragingConfig(mode="outer")
    # Unless another goes on from a checkpoint: then all do.
    back = gone_back(openings, generation(2), HeldState(STEP, 88, KEPT))
    assert back == HeldState(STEP, 80, {}, found[0])


def test_a_run_that_has_saved_nothing_begins_anew(tmp_path: Path):
    first = Generation(2, (0, OWN, 2), (0, 0, 0), leader=0, step=0, is_rewound=True)
    assert Openings(tmp_path, first).after(HeldState(STEP, 12, KEPT)) == [HeldState(STEP, 0)]


def test_a_host_that_dies_as_all_open_for_the_first_time_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint: Any = SimpleNamespace(step=STEP)
    openings = Openings(tmp_path, generation(2))
    first = openings._membership.group_of(generation(1))
    monkeypatch.setattr(Membership, "outlive", lambda *_, **__: first)
    error: Exception = jax.errors.JaxRuntimeError("INTERNAL: socket closed")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ElasticRunner, "_invite", fail)
    setup: Any = SimpleNamespace(
        transfers=SimpleNamespace(close=lambda: None),
        plan=SimpleNamespace(stages=()),
        checkpoint=checkpoint,
        agreed=SimpleNamespace(reports=3 * [GenerationReport()], microbatches_read=80),
    )
    openings.open(setup)
    assert openings.held == [GOES_BACK]
    error = ValueError("is no fault of another host")
    with pytest.raises(ValueError, match="no fault"):
        openings.open(setup)


@pytest.mark.parametrize(
    "error", [GenerationEnded(), jax.errors.JaxRuntimeError("INTERNAL: socket closed")]
)
def test_what_fails_because_a_host_dies_is_done_again_with_those_that_are_left(
    error: Exception, tmp_path: Path
):
    before = HeldState(STEP, 88, KEPT)
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = error
    assert openings.after(before) == [before, before]
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = ValueError("is no fault of another host")
    with pytest.raises(ValueError, match="no fault"):
        openings.after(before)


@pytest.mark.parametrize(
    "error",
    [jax.errors.JaxRuntimeError("INTERNAL: socket closed"), TransferTimeout("step 3: timed out")],
)
def test_transfers_that_fail_while_all_hosts_live_are_made_again_once(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(Group, "has_ended", False)
    monkeypatch.setattr(Membership, "misses", lambda *given: False)
    monkeypatch.setattr(coordinator, "RECONNECTS_AFTER_S", 0.0)
    told: list[Any] = []
    control = SimpleNamespace(tell=lambda *events: told.extend(events))
    monkeypatch.setattr(Membership, "control", control)
    before = HeldState(STEP, 88, KEPT)
    openings = Openings(tmp_path, generation(2), generation(3))
    openings.error = error
    assert openings.after(before) == [before, before]
    assert told == [Abandoned(2), Tick()]
    assert f"{error}; all hosts are alive, and connect again" in "".join(capsys.readouterr())
    openings = Openings(tmp_path, generation(2), generation(3), generation(4))
    openings.error = error
    with pytest.raises(PeerTimeout, match=rf"failed again .*: {error}") as raised:
        openings.after(before)
    # As a process that is started again this host may do better.
    decision = exit_decision(raised.value, is_training=True, joined=False)
    assert decision.code == LOST_HOST_EXIT_CODE


def test_a_host_that_waits_for_long_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(waiting, "FIRST_S", 0.0)
    monkeypatch.setattr(Membership, "misses", lambda self, hosts: 2 in hosts)
    said = threading.Event()
    monkeypatch.setattr(waiting.log, "info", lambda line: (print(line), said.set()))

    def next_group(*_: object) -> None:
        assert said.wait(30.0)
        said.clear()

    monkeypatch.setattr(Membership, "next_group", next_group)
    openings: Any = Openings(tmp_path)
    openings._run.preemption = SimpleNamespace(has_left=lambda: False)
    openings._group = openings._membership.group_of(generation(2))
    assert ElasticRunner._await(openings, 2, 1.0) == Signal.TIME_OVER
    assert ElasticRunner._await(openings, 0, 1.0) == Signal.TIME_OVER
    first, second = capsys.readouterr().out.splitlines()
    assert first == "host 1: waiting for a majority of hosts; not reachable: host 2"
    assert second == "host 1: waiting for admission to the run; not reachable: host 2"
