"""Lines of a run: at once before `configure`, and then by threads, so that nobody waits."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from skippipe_jax import log

LINE = "x" * 1000
LINES = 200  # More than a pipe holds.
PATIENCE_S = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def run(program: str, *, reads: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program, whose stderr nobody reads unless the test `reads` it."""
    ends = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if reads else ends[1],
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        for end in ends:
            os.close(end)


def test_who_prints_does_not_wait_for_a_reader(pipe: tuple[int, int]):
    reads, writes = pipe
    stream = log.Stream("stderr", writes)
    stream.start()

    def put() -> None:
        for _ in range(LINES):
            stream.put(LINE)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    putting.join(PATIENCE_S)
    assert not putting.is_alive()
    assert not stream.drain(0.1)
    came = b""
    while len(came) < LINES * (len(LINE) + 1):
        came += os.read(reads, 1 << 16)
    assert came == LINES * f"{LINE}\n".encode()
    assert stream.drain(PATIENCE_S)


def test_lines_that_nobody_reads_are_bounded(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log, "MAX_WAITING", 10)
    stream = log.Stream("stderr", pipe[1])
    stream.start()
    for _ in range(2 * LINES):
        stream.put(LINE)
    assert stream._waiting.qsize() <= 10


def test_a_blocked_pipe_stops_no_other_thread_and_not_the_end_of_the_process():
    """What shows other hosts that this one lives says something, too."""
    done = run(
        f"""
import threading, time
from skippipe_jax import log
log.configure()
beats = []
def beat():
    while True:
        log.info("x" * 1000)
        beats.append(1)
        time.sleep(0.001)
threading.Thread(target=beat, daemon=True).start()
while len(beats) < {LINES}:
    log.warning("x" * 1000)
log.output("beats on")
log.STDOUT.drain(10)
""",
        reads=False,
    )
    assert (done.returncode, done.stdout) == (0, "beats on\n")


@pytest.mark.parametrize(
    ("configured", "ends"), [("log.configure()", "os._exit(3)"), ("", "sys.exit(3)")]
)
def test_the_last_words_of_a_process_are_printed(configured: str, ends: str):
    done = run(
        f"""
import os, sys
from skippipe_jax import log
{configured}
log.output("step 7")
log.info("host 2 was lost")
log.final_error("host 1 stops")
{ends}
"""
    )
    assert (done.returncode, done.stdout) == (3, "step 7\n")
    assert done.stderr == "host 2 was lost\nhost 1 stops\n"


@pytest.mark.parametrize(
    ("level", "printed"),
    [
        ("info", "it goes on\nwarning: it is slow\nit ends\n"),
        ("warning", "warning: it is slow\nit ends\n"),
        ("error", "it ends\n"),
    ],
)
def test_a_level_leaves_out_what_matters_less(
    level: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log, "_printed", log.LEVELS)
    log.set_level(level)
    log.output("a figure")
    log.info("it goes on")
    log.warning("it is slow")
    log.error("it ends")
    assert capsys.readouterr() == ("a figure\n", printed)


def test_an_ordinary_end_prints_what_waits():
    done = run(
        """
from skippipe_jax import log
log.configure()
log.info("the end")
"""
    )
    assert done.stderr == "the end\n"


def test_last_words_that_nobody_reads_hold_no_exit_up():
    done = run(
        """
import os
from skippipe_jax import log
log.configure()
for _ in range(200):
    log.info("x" * 1000)
log.final_error("in vain", 0.1)
os._exit(3)
""",
        reads=False,
    )
    assert done.returncode == 3


def test_a_notebook_shows_lines_at_once(monkeypatch: pytest.MonkeyPatch):
    """It replaces the streams of sys, and has no descriptors."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", shown)
    threads = threading.active_count()
    log.output("step 7")
    log.warning("a link is slow")
    log.on_leader(0, "host 2 was lost")
    log.on_leader(1, "not told")
    assert shown.getvalue() == "step 7\nwarning: a link is slow\nhost 2 was lost\n"
    assert threading.active_count() == threads


def test_a_forked_process_prints_at_once():
    done = run(
        """
import os, warnings
from skippipe_jax import log
warnings.simplefilter("ignore")  # Python 3.12 and later warn of forks.
log.configure()
if os.fork() == 0:
    log.info("child")
    os._exit(0)
os.wait()
"""
    )
    assert done.stderr == "child\n"


@pytest.mark.parametrize("configured", ["log.configure()", ""])
def test_no_text_fails_to_be_printed(configured: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run(
        f"""
from skippipe_jax import log
{configured}
log.output("path \\udc80 Größe")
"""
    )
    shown = "Größe" if configured else "Gr\\xf6\\xdfe"
    assert (done.returncode, done.stdout) == (0, f"path \\udc80 {shown}\n"), done.stderr


@pytest.mark.parametrize("print_line", [log.info, log.output, log.error])
def test_control_characters_are_shown_and_not_obeyed(
    print_line: Callable[[str], None], capfd: pytest.CaptureFixture[str]
):
    print_line("host 1 failed: \x1b[2J\r\x07\u202e\udc80 Größe\n\tat line 2")
    told = "".join(capfd.readouterr())
    assert told == "host 1 failed: \\x1b[2J\\r\\x07\\u202e\\udc80 Größe\n\tat line 2\n"


def test_a_line_clears_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    log.info("host 2 was lost")
    assert shown.getvalue() == "\r\x1b[Khost 2 was lost\n"


def test_a_full_disk_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    log.info("host 2 was lost")
