"""A joiner whose place another takes looks for the next; the hosts are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.config import Config
from skippipe_jax.connections.directory import HOST_ID
from skippipe_jax.connections.join_offer import Place
from skippipe_jax.training.elastic import joining
from skippipe_jax.training.elastic.join_measurements import JoinMeasurements
from skippipe_jax.training.elastic.joining import joined_by_address


class Search:
    """Finds one place after another."""

    def __init__(self, folder: Path, *places: Place):
        self.config, self.folder, self.run = Config(), folder, None
        self.asked, self.addresses = "10.0.0.1:1", ["10.0.0.1:1"]
        self.offer = SimpleNamespace(hosts=4, members=(0, 1))
        self._places = [*places]

    def fetch(self) -> Any:
        return nullcontext()

    def place(self) -> Place:
        return self._places.pop(0)

    def is_free(self, place: Place) -> bool:
        return True


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
    search, tried, left = Search(tmp_path, Place(2, (1,)), Place(3, (1,))), list[int](), list[int]()
    insists: list[bool] = []

    def why_not(*_: object, anyway: bool) -> None:
        insists.append(anyway)

    @contextmanager
    def joined(
        config: Any, address: str, hosts: int, host: int, **given: Any
    ) -> Iterator[SimpleNamespace]:
        tried.append(host)
        if host == 2:
            raise refusal
        yield SimpleNamespace(index=host)
        left.append(host)

    monkeypatch.setattr(joining, "joined", joined)
    monkeypatch.setattr(joining, "JoinSearch", lambda *given: search)
    monkeypatch.setattr(joining, "enable_compilation_cache", lambda folder: None)
    monkeypatch.setattr(joining, "_compile_and_measure", lambda *given: JoinMeasurements())
    monkeypatch.setattr(joining, "_decline_reason", why_not)
    coming = joined_by_address(["10.0.0.1:1"], None, [], anyway=True)
    if ends:
        with pytest.raises(type(refusal)), coming:
            pass
        assert tried == [2]
        return
    with coming as (_, host):
        assert (host.index, left) == (3, [])
    assert (tried, left) == ([2, 3], [3])
    assert insists == [True, True]
