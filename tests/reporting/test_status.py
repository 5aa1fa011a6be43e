"""The status of a run as text."""

from __future__ import annotations

import msgspec

from skippipe_jax.connections.status import HostPresence, LinkStatus
from skippipe_jax.reporting.status import MOST_SHOWN, status_text
from tests.connections.meshes import STATUS

SHOWN = """\
run runs/a: training (reported by host 0)
step 40/100  loss 2.500  2.00 s an iteration  2min left
generation 3, leader: host 1
stages lost: 1; hosts lost: 2

host  state    stages  location  address        name
0     present  0       Iowa      10.0.0.1:8476  host 0 (pid 7 on a)
1     present  0       Tokyo     10.0.0.2:4001  host 1 (pid 8 on b)
2     lost     1

stage  hosts
    0  0, 1
    1  lost

the 2 slowest of 2 links, measured
link    latency  bandwidth
0 -> 1  65.5 ms  2.50 MB/s
1 -> 0  65.5 ms  40.0 MB/s"""


def test_a_run_is_shown_on_one_screen_with_what_is_lost():
    assert status_text(STATUS) == SHOWN


def test_what_is_not_known_yet_is_left_out():
    hosts = (HostPresence(0, "present", (), None, None, None),)
    hosts += (HostPresence(1, "waited for", (), None, None, None),)
    given = {"generation": None, "progress": None, "links": (), "stages": (), "hosts": hosts}
    early = msgspec.structs.replace(STATUS, phase="gathering", leader=0, **given)
    assert status_text(early) == (
        "run runs/a: gathering (reported by host 0)\nleader: host 0\nhosts waited for: 1\n\n"
        "host  state       stages  location  address  name\n0     present\n1     waited for"
    )


def test_of_many_links_the_slowest_are_shown_and_no_text_moves_the_cursor():
    links = tuple(LinkStatus(0, 1 + target, 0.1, 1e6) for target in range(MOST_SHOWN + 4))
    shown = status_text(msgspec.structs.replace(STATUS, run="a\x1b[2J\nb", links=links))
    assert shown.count(" -> ") == MOST_SHOWN
    assert f"the {MOST_SHOWN} slowest of {len(links)} links" in shown
    assert "\x1b" not in shown
