"""Locks a folder for one training at a time, on all machines that share it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from skippipe_sched.errors import TemporaryError

from skippipe_jax import log
from skippipe_jax.storage.files import PARTIAL, os_errors_as

LEASE = "lease.json"
RENEWED_S = 5.0
"""Interval at which the holder of a lease renews it."""
EXPIRED_S = 30.0
"""A lease that has not been renewed for so long has no holder."""
SETTLED_S = 1.0
"""Of several that take an expired lease at once, the last to write holds it after so long."""


class RunLock:
    """A lock on a folder: exclusive while a run begins, then shared by the hosts that lead it.

    It is a lock on the folder itself, which the system releases when the process ends. Where such
    a lock excludes nobody, as on many network file systems, a lease in the folder takes its place.
    """

    def __init__(self, folder: Path, field: str = "run_dir"):
        """Lock nothing yet; `acquire` does. `field` is what names the folder."""
        self.folder = folder
        self.field = field
        self._descriptor: int | None = None
        self._lease: _Lease | None = None
        self._created: list[Path] = []

    def __enter__(self) -> RunLock:
        """Lock nothing yet; release on leaving what is acquired until then."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder."""
        self.release()

    def release(self) -> None:
        """Release the folder, and remove it if it was created for the lock and is still empty."""
        if self._lease is not None:
            self._lease.release()
        if self._descriptor is not None:
            for folder in self._created:
                with suppress(OSError):  # It holds something, or somebody has removed it.
                    folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None

    def acquire(self, run_epoch: int | None = None) -> None:
        """Lock the folder, which is created if it does not exist.

        Exclusively; or shared with the other hosts of a run, which all give the number that its
        start drew. A leader that was stopped keeps its lock, and must not bar the next one.

        Raises:
            TemporaryError: if another training has locked it.
        """
        operation = fcntl.LOCK_EX if run_epoch is None else fcntl.LOCK_SH
        with os_errors_as(self.field, self.folder):
            while self._descriptor is None:
                missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
                self._created = missing
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY)
                try:
                    self._require(flock(descriptor, operation))
                    # Another that had locked it may have removed it before it was locked here.
                    with suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(descriptor), self.folder.stat()):
                            self._descriptor = descriptor
                finally:
                    if self._descriptor is None:
                        os.close(descriptor)
            if self._lease is None and not self._excludes_others():
                self._lease = _Lease(self.folder)
            if self._lease is not None:
                self._require(self._lease.acquire(run_epoch))

    def share(self, run_epoch: int) -> None:
        """Let the other hosts of the run lock the folder too, if it is locked here."""
        if self._descriptor is not None:
            flock(self._descriptor, fcntl.LOCK_SH)
            self.acquire(run_epoch)

    def _excludes_others(self) -> bool:
        """Return whether a second attempt to lock the folder, locked here, fails."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            return not flock(descriptor)
        finally:
            os.close(descriptor)

    def _require(self, is_free: bool) -> None:
        if not is_free:
            raise TemporaryError(
                self.field,
                str(self.folder),
                "another training is writing it",
                f"Wait for its end or stop it, or give another folder: --set {self.field}=...",
            )


def flock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Return whether this process, and those that it gives the descriptor to, now have the lock.

    File systems without locks let everyone have it.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


class _Lease:
    """A file that names the holder of a folder as long as a thread renews it.

    Clocks of different machines are not compared: whoever finds the lease of another watches for
    some time whether it changes.
    """

    def __init__(self, folder: Path):
        self._path = folder / LEASE
        self._holder = secrets.token_hex(8)
        # The hosts of a run take the lease from each other by the number of its start.
        self._start = secrets.randbits(48)
        self._renewed = 0
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def acquire(self, start: int | None) -> bool:
        """Return whether the lease is held now; while another renews it, it is not."""
        if start is not None:
            self._start = start
        before = self._read()
        is_theirs = before is not None and (
            before.get("start") != self._start and before.get("holder") != self._holder
        )
        if is_theirs and self._changes(before, EXPIRED_S):
            return False
        with self._lock:
            self._write()
        if is_theirs and self._changes(self._content(), SETTLED_S):
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
            self._thread.start()
        return True

    def release(self) -> None:
        """End the lease, if it is still this one."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # It expires.
            if (self._read() or {}).get("holder") == self._holder:
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
                    if found is not None and found.get("holder") == self._holder:
                        self._write()
                        continue
            except OSError as error:
                log.warning(f"{self._path} is not renewed: {error.strerror}")
                continue
            if found is None or found.get("start") != self._start:
                log.warning(
                    f"{self._path}: another training has taken the folder, or its lease is gone"
                )
            return  # Or another host of the same run leads.

    def _content(self) -> dict[str, Any]:
        return {"start": self._start, "holder": self._holder, "renewed": self._renewed}

    def _write(self) -> None:
        self._renewed += 1
        # Several processes may write at a time, each a complete file.
        partial = self._path.with_name(f"{LEASE}.{self._holder}{PARTIAL}")
        partial.write_text(json.dumps(self._content()) + "\n", encoding="utf-8")
        os.replace(partial, self._path)

    def _read(self) -> dict[str, Any] | None:
        """Return what the file holds; None if there is no file, {} if it is damaged."""
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
