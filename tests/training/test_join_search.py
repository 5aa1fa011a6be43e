"""Search of a joiner for a place: its choice, its waits and its messages; the hosts are made up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.config import ClusterConfig, Config, DataConfig, to_yaml
from skippipe_jax.config.resume import identity, settings
from skippipe_jax.connections.asking import JoinClient, NoListener
from skippipe_jax.connections.join_offer import Files, JoinOffer, Place
from skippipe_jax.connections.join_server import RUN_ENDED
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.metrics_log import MetricsTail
from skippipe_jax.training.elastic import join_search
from skippipe_jax.training.elastic.join_offers import JoinOffers
from skippipe_jax.training.elastic.join_search import JoinSearch
from tests.harness.step_metrics import metrics_of

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
        told = Files(CONTENTS).told
        return addresses[0], JoinOffer(1, 4, {1: "10.0.0.1:1"}, tuple(answer), told, TEXT)

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
    assert [file.name for file in own.files().told] == ["config.yaml", "plan.json"]
    before = own.files()
    assert own.files() is before
    (tmp_path / "plan.json").write_bytes(b"{1}")
    assert own.files().told[1].size == 3
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
