"""A machine joins a run: whether that pays, which place it takes, and what it says meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import pytest
from skippipe_sched.errors import InputError, TemporaryError
from skippipe_sched.problem.links import Link
from skippipe_sched.problem.node_addition import NewNode

from skippipe_jax.config import ClusterConfig, Config, DataConfig, parse_config, to_yaml
from skippipe_jax.config.resume import identity, settings
from skippipe_jax.connections.asking import JoinClient, NoListener
from skippipe_jax.connections.directory import HOST_ID
from skippipe_jax.connections.join_offer import JoinOffer, Place, describe_files
from skippipe_jax.connections.join_server import RUN_ENDED
from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.metrics_log import MetricsTail
from skippipe_jax.training.elastic import join_measurements as measuring
from skippipe_jax.training.elastic import join_search, joining
from skippipe_jax.training.elastic.extra_hosts import extend_case
from skippipe_jax.training.elastic.join_measurements import (
    JoinMeasurements,
    forward_seconds,
    new_nodes,
)
from skippipe_jax.training.elastic.join_offers import JoinOffers
from skippipe_jax.training.elastic.join_search import JoinSearch
from skippipe_jax.training.elastic.joining import Admission, admission
from tests.harness.step_metrics import metrics_of
from tests.harness.training_runs import MODEL
from tests.sched.examples import plan_of

RUN = Config(
    run_dir="runs/far",
    data=DataConfig(source="text", path="text"),
    cluster=ClusterConfig(rejoin_s=20.0),
)
CONTENTS = {"config.yaml": to_yaml(RUN).encode(), "plan.json": b"{}"}
DATA, INNER = Place(0, (0,)), Place(2, (1, 2))
TEXT = "0123"


class Hosts:
    """Answer a joiner, at each time it asks with the next of what there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.now_s = 0.0
        self.answers: list[Sequence[Place] | TemporaryError] = []
        self.asked: list[list[str]] = []
        monkeypatch.chdir(folder)
        monkeypatch.setattr(JoinClient, "ask", self.ask)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def ask(
        self, addresses: Sequence[str], wanted: Collection[str] | None = None
    ) -> tuple[str, JoinOffer]:
        self.asked.append([*addresses])
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, TemporaryError):
            raise answer
        [asking] = self.joiners
        for name, content in CONTENTS.items():
            if (wanted is None or name in wanted) and name not in asking.contents:
                asking.contents[name] = content
                asking.fetched += len(content)
        files = describe_files(CONTENTS)
        return addresses[0], JoinOffer(1, 4, {1: "10.0.0.1:1"}, tuple(answer), files, TEXT)

    def seeking(self, find_text: Callable[[Config], str], *overrides: str) -> JoinSearch:
        seeking = JoinSearch(["10.0.0.1:1"], None, overrides, find_text, self)
        self.joiners = [seeking._join_client]
        return seeking


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hosts:
    return Hosts(monkeypatch, tmp_path)


def has_text(config: Config) -> str:
    return TEXT


def has_other_text(config: Config) -> str:
    return "4567"


def has_no_text(config: Config) -> str:
    raise InputError("data.path", config.data.path, "cannot read it", "Name a file")


def test_a_newcomer_keeps_what_it_fetches_in_a_folder_named_after_the_runs(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    hosts.answers = [[INNER]]
    seeking = hosts.seeking(has_text, "data.path=here")
    with seeking.fetch():
        assert seeking.folder == Path("far")
        assert (tmp_path / "far" / "plan.json").exists()
        assert (seeking.config.run_dir, seeking.config.data.path) == ("far", "here")
        # It is a host of the run by what the run was told, whatever differs here.
        assert seeking.run.identity == identity(RUN)
        assert seeking.run.settings == settings(RUN)
        assert seeking.place() == INNER
        with (
            pytest.raises(TemporaryError, match="another host that has joined uses this folder"),
            hosts.seeking(has_text).fetch(),
        ):
            pass
    size = sum(map(len, CONTENTS.values()))
    connected = "connected to host 1 of 4 at 10.0.0.1:1, run runs/far"
    assert capsys.readouterr().out == f"{connected}; 2 files in far, {size:,} bytes downloaded\n"
    # What the folder is called is known by the configuration alone.
    with hosts.seeking(has_text).fetch():
        assert f"{len(CONTENTS['config.yaml']):,} bytes downloaded" in capsys.readouterr().out
    RunLock(Path("far")).acquire()  # It has been let go of.


@pytest.mark.parametrize(
    ("places", "find_text", "chosen"),
    [
        ([INNER, DATA], has_text, DATA),
        ([DATA, INNER], has_no_text, INNER),
        ([DATA, INNER], has_other_text, INNER),
        ([Place(0, (0,), 5.0), INNER], has_text, INNER),
        ([Place(1, (0, 1)), INNER], has_no_text, INNER),
        # Beside the four that the run began with.
        ([Place(4, (1,)), INNER], has_text, INNER),
        ([DATA, Place(4, (1,))], has_no_text, Place(4, (1,))),
    ],
)
def test_it_takes_the_first_place_that_it_can_serve(
    hosts: Hosts,
    capsys: pytest.CaptureFixture[str],
    places: list[Place],
    find_text: Callable[[Config], str],
    chosen: Place,
):
    hosts.answers = [places]
    seeking = hosts.seeking(find_text)
    with seeking.fetch():
        capsys.readouterr()
        assert seeking.place() == chosen
        assert seeking.is_free(chosen)
        hosts.answers = [[INNER, chosen]]
        assert seeking.is_free(chosen) == (chosen.host < 4), "a lost host's place comes first"
        hosts.answers = [[]]
        assert not seeking.is_free(chosen)
    assert capsys.readouterr().out == ""
    assert hosts.now_s == 0.0


@pytest.mark.parametrize(
    ("places", "find_text", "why"),
    [
        ([], has_text, "the run is full: no failed host, and all extra hosts of join.places"),
        (
            [DATA],
            has_no_text,
            "(host 0), but this host cannot read the training text: data.path = 'text'",
        ),
        ([DATA], has_other_text, "are needed (host 0), but this host has another training text"),
    ],
)
def test_it_waits_for_a_place_says_so_once_and_ends(
    hosts: Hosts,
    capsys: pytest.CaptureFixture[str],
    places: list[Place],
    find_text: Callable[[Config], str],
    why: str,
):
    hosts.answers = [places]
    seeking = hosts.seeking(find_text)
    with seeking.fetch():
        capsys.readouterr()
        with pytest.raises(TemporaryError) as caught:
            seeking.place()
        assert why in str(caught.value)
        assert "not admitted within cluster.rejoin_s = 20 s: " in str(caught.value)
        assert hosts.now_s == 20.0
        [line] = capsys.readouterr().out.splitlines()
        assert why in line
        assert line.endswith("; waiting up to 20 s")
        # Or one becomes free meanwhile.
        hosts.answers = [places, places, [*places, INNER]]
        assert seeking.place() == INNER


def test_it_waits_as_long_as_a_place_is_held_back(hosts: Hosts, capsys: pytest.CaptureFixture[str]):
    hosts.answers = [[Place(2, (1,), 8.0)], [Place(2, (1,), 8.0)], [Place(2, (1,))]]
    seeking = hosts.seeking(has_no_text)
    with seeking.fetch():
        assert seeking.place() == Place(2, (1,))
    assert hosts.now_s == 8.0
    told = "host 2 failed right after its last join; retrying in 8 s"
    assert told in capsys.readouterr().out


def test_it_waits_longer_each_time_where_it_does_not_pay_to_come(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
):
    hosts.answers = [[Place(4, (1,))]]
    seeking, waited_s = hosts.seeking(has_text), []
    with seeking.fetch():
        capsys.readouterr()
        for _ in range(4):
            before_s = hosts.now_s
            seeking.wait("too dear")
            waited_s.append(hosts.now_s - before_s)
        with pytest.raises(TemporaryError, match=r"cluster\.rejoin_s = 20 s: too dear"):
            seeking.wait("too dear")
    assert waited_s == [2.0, 4.0, 8.0, 6.0]
    assert capsys.readouterr().out.splitlines()[1] == "too dear; retrying in 4 s"


def test_it_asks_again_until_a_host_answers_and_knows_where_the_others_are(hosts: Hosts):
    silent = TemporaryError("join", "10.0.0.1:1", "no host of a run answered", "Ask again")
    hosts.answers = [silent, silent, [INNER]]
    with hosts.seeking(has_text).fetch():
        assert hosts.now_s == 2 * join_search.AGAIN_S
        assert hosts.asked[-1] == ["10.0.0.1:1", "10.0.0.1:1"]
    hosts.answers = [silent]
    with (
        pytest.raises(TemporaryError, match="no host of a run answered"),
        hosts.seeking(has_text).fetch(),
    ):
        pass
    assert hosts.now_s > join_search.FIND_S


def test_it_says_that_the_run_has_ended(hosts: Hosts):
    ended = TemporaryError("join", "host 0", RUN_ENDED, "Join again after it is resumed")
    gone = NoListener("join", "10.0.0.1:1", "connection refused", "Give another")
    hosts.answers = [[INNER], [INNER], ended]
    seeking = hosts.seeking(has_text)
    with seeking.fetch():
        with pytest.raises(TemporaryError, match="the run has ended: it finished, or"):
            seeking.is_free(INNER)
        assert hosts.now_s == 0.0, "it asks nobody again"
        # Or it asks when the hosts have gone.
        hosts.answers = [gone]
        with pytest.raises(TemporaryError, match="no host of the run listens any more: the run "):
            seeking.is_free(INNER)


def test_an_address_at_which_nobody_listens_is_refused_at_once(hosts: Hosts, tmp_path: Path):
    gone = NoListener("join", "10.0.0.1:1", "connection refused", "Give another")
    hosts.answers = [gone]
    with pytest.raises(NoListener), hosts.seeking(has_text).fetch():
        pass
    assert hosts.now_s == 0.0
    # Of a run that is known one may come back.
    hosts.answers = [[INNER]]
    with hosts.seeking(has_text).fetch():
        pass
    hosts.answers = [gone, gone, [INNER]]
    again = JoinSearch(["10.0.0.1:1"], tmp_path / "far", (), has_text, hosts)
    hosts.joiners = [again._join_client]
    with again.fetch():
        assert hosts.now_s == 2 * join_search.AGAIN_S


def test_a_host_tells_whose_places_are_free_and_what_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    clock: Any = SimpleNamespace(now=lambda: now_s)
    now_s = 0.0
    own, served = JoinOffers(tmp_path, 3, clock), {1: (0,), 2: (1,), 3: (0, 1), 4: ()}
    serves = served.__getitem__
    assert own.places({1, 2}) == []
    own.entered(Generation(1, (0, 1, 2), (5, 6, 7), 0, 0), serves, TEXT)
    assert own.places(set()) == []
    assert own.places({3, 4}) == [Place(3, (0, 1))], "at place 4 nobody could serve"
    assert own.places({1, 3}) == [], "the others go on without host 1 in a moment"
    own.entered(Generation(2, (0, 2), (5, 7), 0, 0), serves, None)
    assert own.text == TEXT
    assert own.places({1}) == [Place(1, (0,))]
    assert own.places(set()) == [], "its new process has said hello"
    assert own.places({3}) == [], "nobody comes beside the hosts of the start while one is out"
    assert own.places({1, 3}) == [Place(1, (0,)), Place(3, (0, 1))]
    own.entered(Generation(3, (0, 1, 2), (5, 8, 7), 0, 0), serves, None)
    own.entered(Generation(4, (0,), (5,), 0, 0), serves, None)
    assert own.places({1, 2}) == [Place(1, (0,), 1.0), Place(2, (1,))]
    assert [file.name for file in own.files()[0]] == ["config.yaml", "plan.json"]
    before = own.files()
    assert own.files() is before
    (tmp_path / "plan.json").write_bytes(b"{1}")
    assert own.files()[0][1].size == 3
    (tmp_path / "plan.json").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        own.files()


def test_who_leads_without_lines_of_its_own_goes_on_with_those_of_whoever_is_furthest():
    lines = MetricsTail()
    steps = [msgspec.to_builtins(metrics_of(step)) for step in (3, 4)]
    lines.adopt([[], steps, steps[:1]])
    assert lines.snapshot() == steps
    lines.adopt([[], []])
    assert lines.snapshot() == []


# A joiner whose place another takes looks for the next; the hosts are made up.


@pytest.mark.parametrize(
    ("refusal", "ends"),
    [
        (InputError(HOST_ID, 2, "host 2 has joined with this id", "give it another"), False),
        (InputError("the version of jax", "0", "is another", "install the same"), True),
        (TemporaryError(HOST_ID, 2, "the run is at its end", "start it again"), True),
    ],
)
def test_who_finds_its_place_taken_looks_for_the_next(
    refusal: InputError, ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    @contextmanager
    def refuse(*_: object, **__: object) -> Iterator[None]:
        raise refusal
        yield

    monkeypatch.setattr(joining, "connect", refuse)
    offer, asks = SimpleNamespace(hosts=4), {"asked": "", "addresses": [], "run": None}
    seeking: Any = SimpleNamespace(config=Config(), folder=tmp_path, offer=offer, **asks)
    given = ExitStack(), seeking, Place(2, (1,)), JoinMeasurements()
    with pytest.raises(type(refusal)) if ends else nullcontext():
        assert joining._try_join(*given) is None


# Whether it pays that a host comes, and what it has measured of itself.


# Node 0 sends all, and nodes 1 and 2 share what comes after.
PLAN = plan_of([[0], [1, 2]], [[0, 1], [0, 2]] * 3, path_length=2)
HOST_OF = (0, 1, 2, 3, 4)
LINKS = {
    0: MeasuredLink(0.1, 1.0, 1e9),
    1: MeasuredLink(0.1, 1.0, 100.0),
    2: MeasuredLink(0.5, 1.0, 1000.0),
}
SIZES = (1e6, 2000.0)


def coming(members: tuple[int, ...], forward_s: float = 0.001) -> Admission:
    fast = {node: Link(0.0, 1e12) for node in range(3)}
    new = {3: NewNode("place 3", forward_s, links_to=fast, links_from=fast)}
    return admission(PLAN, HOST_OF, 3, members, PLAN.stages, new, LINKS, SIZES)


def test_it_pays_where_what_is_saved_within_the_horizon_is_more_than_what_it_takes():
    found = coming((0, 1, 2))
    assert found.transfer_s == pytest.approx(0.5 + 2000.0 / 1000.0)
    assert 0 < found.saved < 1
    assert found.is_redundant
    even_s = found.transfer_s / found.saved
    assert found.pays(1.01 * even_s)
    assert not found.pays(0.99 * even_s)
    told = found.decline_reason(100.0)
    assert "stalls the run 2.5 s" in told
    saved_s = 100 * found.saved
    assert f"({found.saved:.2%}) save {saved_s:.3g} s within join.horizon = 100 s" in told


def test_a_slow_host_saves_nothing():
    found = coming((0, 1, 2), forward_s=1e3)
    assert found.saved == 0.0
    assert not found.pays(1e9)
    assert "join --anyway overrides this" in found.decline_reason(1e9)
    assert found.pays(1e9, anyway=True)


def test_a_stage_of_a_single_host_is_always_worth_another():
    found = coming((0, 1), forward_s=1e3)
    assert not found.is_redundant
    assert found.pays(0.0)
    assert found.transfer_s == pytest.approx(0.1 + 2000.0 / 100.0), "the only host that gives it"


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1)], ids=["of two", "of one"])
def test_it_never_pays_where_no_host_is_reached_that_has_the_state(
    members: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(LINKS, 1)
    monkeypatch.delitem(LINKS, 2)
    found = coming(members)
    assert found.transfer_s == math.inf
    assert not found.pays(1e9)
    assert not found.pays(1e9, anyway=True)
    assert "could not reach a host with the state" in found.decline_reason(1e9)


def test_what_a_host_has_measured_is_kept_told_and_planned_for(tmp_path: Path):
    assert JoinMeasurements.kept(tmp_path) is None
    own = JoinMeasurements(
        {0: MeasuredLink(0.1, 10.0, 20.0), 4: MeasuredLink(0.2, 30.0, 40.0)}, 0.25
    )
    own.keep(tmp_path)
    kept = JoinMeasurements.kept(tmp_path)
    assert kept is not None
    assert JoinMeasurements.parse(kept) == own
    assert JoinMeasurements.parse(own.to_json()) == own
    # Host 0 has nodes 0 and 1, and places 3 and 4 have one each.
    found = new_nodes({3: own, 0: JoinMeasurements()}, (0, 0, 1, 3, 4), 3)
    to = {0: Link(0.1, 10.0), 1: Link(0.1, 10.0), 4: Link(0.2, 30.0)}
    back = {0: Link(0.1, 20.0), 1: Link(0.1, 20.0), 4: Link(0.2, 40.0)}
    assert found == {3: NewNode("place 3", 0.25, links_to=to, links_from=back)}
    plan = extend_case(PLAN, (0, 1, 2, 3, 4), found)
    latency_s, bandwidth = plan.case.link_matrices
    assert (latency_s[4, 3], bandwidth[4, 3]) == pytest.approx((0.2, 40.0))
    assert (latency_s[3, 4], bandwidth[3, 4]) == pytest.approx((0.2, 30.0))
    assert plan.case.nodes[3].forward_s == 0.25
    assert extend_case(PLAN, (0, 1, 2), {}) is PLAN


def test_seconds_are_measured_where_those_of_the_case_were(monkeypatch: pytest.MonkeyPatch):
    data = {"sequence_length": 32, "microbatch_size": 2}
    here = NodeSharding((jax.local_devices()[0],))
    monkeypatch.setattr(measuring, "STAGE_S", 0.0)
    told = parse_config({"model": MODEL, "data": data})
    assert forward_seconds(told, PLAN, 1, here) is None
    config = parse_config({"model": MODEL, "data": data, "plan": "auto"})
    seconds = forward_seconds(config, PLAN, 1, here)
    assert seconds is not None
    assert 0 < seconds < 10
