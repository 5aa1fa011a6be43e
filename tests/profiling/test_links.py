"""What is made of the transfers over one link."""

from typing import Any, cast

import pytest

from skippipe_jax.profiling import links

# Seconds of a link of 52 kB/s, on which some bytes pass at once after a rest.
AN_ACTIVATION, ITS_SECONDS = 101376, 1.927


class Way:
    """That link; `late_s` is how late the host notices the first marker before an activation."""

    other, host = 1, 0

    def __init__(self, late_s: float = 0.0):
        self.late_s = late_s

    def ask(self, size: int) -> tuple[float, float]:
        quick = 8192 / 0.143 if size == links.SMALLEST_BYTES else 59.26e3
        if size != AN_ACTIVATION:
            return 0.0, size / quick
        late_s, self.late_s = self.late_s, 0.0
        return late_s, ITS_SECONDS - late_s


def test_small_transfers_that_agree_do_not_say_how_quick_a_link_is():
    way = cast(Any, Way())
    link = links._measure(way, [0.0], AN_ACTIVATION, links.TRANSFER_S)
    assert link.bandwidth == pytest.approx(AN_ACTIVATION / ITS_SECONDS)
    assert link.overhead_s == pytest.approx(0.0, abs=1e-9)


def test_an_activation_whose_marker_was_noticed_late_is_sent_again():
    way = cast(Any, Way(late_s=0.6))
    link = links._measure(way, [0.0], AN_ACTIVATION, links.TRANSFER_S)
    assert link.bandwidth == pytest.approx(AN_ACTIVATION / ITS_SECONDS)
    assert link.overhead_s == pytest.approx(0.0, abs=1e-9)
