"""A file that says who holds a folder, as long as it is renewed.

It is for file systems on which locks exclude nobody. Clocks of different machines are not compared:
who finds the file of another looks for some time whether it changes.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from skippipe_jax.storage.warning import warn
from skippipe_jax.storage.whole_file import PARTIAL

LEASE = "lease.json"

RENEWED_S = 5.0
"""So often it is renewed."""
EXPIRED_S = 30.0
"""Who has not renewed it for so long has lost it."""
SETTLED_S = 1.0
"""Of several that find at once that it has expired, the last one has it after so long."""


class Lease:
    """A lease on a folder, which a thread renews.

    Attributes:
        start: the number of the start of a run, whose hosts take it from each other.
    """

    def __init__(self, folder: Path, start: int):
        """Hold nothing yet; `take` does."""
        self.start = start
        self._path = folder / LEASE
        self._holder = secrets.token_hex(8)
        self._renewed = 0
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Whether the lease is taken; while another renews it, it is not.

        Raises:
            OSError: if the file cannot be read or written.
        """
        before = self._read()
        is_theirs = not (
            before is None or before.get("start") == self.start or self._is_own(before)
        )
        if is_theirs and self._changes(before, EXPIRED_S):
            return False
        with self._lock:
            self._write()
        if is_theirs and self._changes(self._told(), SETTLED_S):
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
            self._thread.start()
        return True

    def release(self) -> None:
        """Let it go, if it is still this one."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # It expires.
            if self._is_own(self._read()):
                self._path.unlink()

    def _changes(self, before: Any, within_s: float) -> bool:
        for _ in range(10):
            self._ends.wait(within_s / 10)
            if self._read() != before:
                return True
        return False

    def _renew(self) -> None:
        while not self._ends.wait(RENEWED_S):
            try:
                with self._lock:
                    found = self._read()
                    if self._is_own(found):
                        self._write()
                        continue
            except OSError as error:
                warn(f"{self._path} is not renewed: {error.strerror}")
                continue
            if found is None or found.get("start") != self.start:
                warn(f"{self._path}: another training has taken the folder, or its lease is gone")
            return  # Or another host of the same run leads.

    def _is_own(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("holder") == self._holder

    def _told(self) -> dict[str, Any]:
        return {"start": self.start, "holder": self._holder, "renewed": self._renewed}

    def _write(self) -> None:
        self._renewed += 1
        # Several may write at a time, each all of it.
        partial = self._path.with_name(f"{LEASE}.{self._holder}{PARTIAL}")
        partial.write_text(json.dumps(self._told()) + "\n", encoding="utf-8")
        os.replace(partial, self._path)

    def _read(self) -> dict[str, Any] | None:
        """What the file says; None if there is none, nothing where it says nothing."""
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
