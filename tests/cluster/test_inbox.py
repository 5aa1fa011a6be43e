"""What hosts have told each other is kept until it is asked for, and never without end."""

from __future__ import annotations

import tracemalloc

import pytest

from skippipe_jax.cluster import inbox
from skippipe_jax.cluster.inbox import Inbox
from skippipe_jax.consensus.generations import Enter, Generation, NotMember
from skippipe_jax.errors import GenerationEnded, PeerTimeout


def test_what_nobody_asks_for_grows_to_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inbox, "MOST_CHARACTERS", 1 << 20)
    own = Inbox()
    own.post(1, 0, "mine", "here")
    tracemalloc.start()
    for count in range(500):
        own.post(2, 0, f"key {count}", "x" * (1 << 17))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 2 << 20
    # The last of it is there, and what others have told.
    assert len(own.take("key 499", 0.0, 2, 0)) == 1 << 17
    assert own.take("mine", 0.0, 1, 0) == "here"
    with pytest.raises(PeerTimeout):
        own.take("key 0", 0.0, 2, 0)


def test_small_values_are_not_kept_without_end_either(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inbox, "MOST_VALUES", 10)
    own = Inbox()
    for count in range(100):
        own.post(1, 0, f"{count}", "")
        own.post(1, 0, "again", f"{count}")
    assert own.take("again", 0.0, 1, 0) == "99"
    assert own.take("91", 0.0, 1, 0) == ""
    with pytest.raises(PeerTimeout):
        own.take("90", 0.0, 1, 0)


def test_room_is_given_back_for_what_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inbox, "MOST_CHARACTERS", 100)
    own = Inbox()
    own.post(1, 0, "kept", "x" * 40)
    for count in range(10):
        own.post(1, 0, f"{count}", "x" * 40)
        own.take(f"{count}", 0.0, 1, 0)
    assert own.take("kept", 0.0, 1, 0) == "x" * 40


def test_no_host_speaks_for_another():
    own = Inbox()
    own.post(2, 0, "run/0", "theirs")
    with pytest.raises(PeerTimeout):
        own.take("run/0", 0.0, 0, 0)
    own.post(0, 0, "run/0", "right")
    assert own.take("run/0", 0.0, 0, 0) == "right"


def test_a_generation_takes_with_it_what_was_told_in_it():
    own = Inbox()
    own.post(1, 1, "key", "of the first")
    own.post(1, 2, "key", "of the second")
    own.begin(2)
    with pytest.raises(GenerationEnded):
        own.take("key", 0.0, 1, 1)
    assert own.take("key", 0.0, 1, 2) == "of the second"


def generation(number: int, *, is_rewound: bool = False) -> Generation:
    return Generation(number, (0, 1), (5, 6), 0, 20, is_rewound=is_rewound)


def number_after(own: Inbox, after: int) -> int | None:
    found = own.next(after, 0.0)
    return None if found is None else found.number


def test_no_generation_is_passed_over_though_it_has_ended():
    own = Inbox()
    for number in (1, 2, 3):
        own.follow(Enter(generation(number, is_rewound=number == 2)))
    found = own.next(1, 0.0)
    assert found == generation(2, is_rewound=True)
    assert [number_after(own, after) for after in (2, 3)] == [3, None]


def test_who_is_left_out_goes_on_with_what_it_enters_next():
    own = Inbox()
    own.follow(Enter(generation(1)))
    own.follow(Enter(generation(2)))
    own.follow(NotMember(generation(3)))
    assert number_after(own, 1) is None
    own.follow(Enter(generation(4)))
    assert number_after(own, 1) == 4
