"""Reading ahead changes when items are made, and nothing else."""

import threading

import pytest

from skippipe_jax.data.batches import ReadAhead


def threads() -> int:
    return sum(thread.name.startswith("read_ahead") for thread in threading.enumerate())


def test_what_was_announced_is_made_before_it_is_asked_for():
    made = {number: threading.Event() for number in range(4)}
    makers = {}

    def read(number: int) -> int:
        makers[number] = threading.current_thread()
        made[number].set()
        return number * number

    reader = ReadAhead(read)
    reader.announce([1, 2])
    assert made[1].wait(10)
    assert made[2].wait(10)
    assert [reader[number] for number in (1, 2, 3)] == [1, 4, 9]
    assert makers[1] is makers[2] is not threading.current_thread()
    assert makers[3] is threading.current_thread()
    assert not made[0].is_set()
    reader.close()
    assert threads() == 0


def test_what_was_announced_last_is_all_that_is_made():
    began, go_on = threading.Event(), threading.Event()
    made = []

    def read(number: int) -> int:
        began.set()
        assert go_on.wait(10)
        made.append(number)
        return number

    reader = ReadAhead(read)
    reader.announce(range(1000))
    assert began.wait(10)
    reader.announce([5000])
    go_on.set()
    assert reader[5000] == 5000
    reader.close()
    assert made == [0, 5000]


def test_an_error_is_raised_where_the_item_is_asked_for_and_no_thread_is_left():
    def read(number: int) -> int:
        raise ValueError(f"no item {number}")

    reader = ReadAhead(read)
    reader.announce([1, 2])
    with pytest.raises(ValueError, match="no item 1"):
        reader[1]
    reader.close()
    assert threads() == 0
