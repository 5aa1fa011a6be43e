"""A host lives through the generations that it enters one after another."""

from __future__ import annotations

from skippipe_jax.cluster.generation_queue import GenerationQueue
from skippipe_jax.cluster.mailboxes import Mailboxes
from skippipe_jax.consensus.generations import Enter, Generation, NotMember


def generation(number: int, *, is_rewound: bool = False) -> Generation:
    return Generation(number, (0, 1), (5, 6), 0, 20, is_rewound=is_rewound)


def number_after(succession: GenerationQueue, after: int) -> int | None:
    found = succession.next(after, 0.0)
    return None if found is None else found.number


def test_no_generation_is_passed_over_though_it_has_ended():
    succession = GenerationQueue(Mailboxes())
    for number in (1, 2, 3):
        succession.follow(Enter(generation(number, is_rewound=number == 2)))
    found = succession.next(1, 0.0)
    assert found == generation(2, is_rewound=True)
    assert [number_after(succession, after) for after in (2, 3)] == [3, None]


def test_who_is_left_out_goes_on_with_what_it_enters_next():
    succession = GenerationQueue(Mailboxes())
    succession.follow(Enter(generation(1)))
    succession.follow(Enter(generation(2)))
    succession.follow(NotMember(generation(3)))
    assert number_after(succession, 1) is None
    succession.follow(Enter(generation(4)))
    assert number_after(succession, 1) == 4
