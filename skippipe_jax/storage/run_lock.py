"""Lock on a folder for one training at a time, across all machines that share it."""

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
"""Seconds between renewals of a lease by its holder."""
EXPIRED_S = 30.0
"""Seconds without renewal after which a lease has expired."""
SETTLED_S = 1.0
"""Seconds after which the last writer of an expired lease holds it, if several take it at once."""


class RunLock:
    """Lock on a folder: exclusive at the start of a run, then shared by the hosts that lead it.

    It is a `flock` on the folder itself, which the system releases when the process ends. If that
    does not exclude other processes, as on many network file systems, a lease in the folder does.
    """

    def __init__(self, folder: Path, field: str = "run_dir"):
        """Store the arguments; `acquire` locks. `field` is the setting that names the folder."""
        self.folder = folder
        self.field = field
        self._descriptor: int | None = None
        self._lease: _Lease | None = None
        self._created: list[Path] = []

    def __enter__(self) -> RunLock:
        """Return the lock, not acquired yet; it is released at the end of the block."""
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
                with suppress(OSError):  # It is not empty, or was removed.
                    folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None

    def acquire(self, run_epoch: int | None = None) -> None:
        """Lock the folder, which is created if it does not exist.

        The lock is exclusive, or with `run_epoch`, the random number of a start, shared by the
        hosts of that run: a suspended leader keeps its lock, and must not block the next leader.

        Raises:
            TemporaryError: if another training has locked the folder.
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
                    # The former holder may have removed the folder before it was locked here.
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
        """Downgrade the lock, if held, so that other hosts of the run can lock the folder too."""
        if self._descriptor is not None:
            flock(self._descriptor, fcntl.LOCK_SH)
            self.acquire(run_epoch)

    def _excludes_others(self) -> bool:
        """Return whether a second attempt to lock the locked folder fails, as it should."""
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
                "another training run is writing to it",
                f"Wait until it ends, stop it, or set another folder: --set {self.field}=...",
            )


def flock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a descriptor for this process and those that inherit it; return whether it did.

    Returns True on file systems without locks.
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
    """Lease on a folder: a file that names the holder, renewed by a thread.

    Clocks of different machines are not compared: a process that finds another's lease watches for
    `EXPIRED_S` seconds whether it changes.
    """

    def __init__(self, folder: Path):
        self._path = folder / LEASE
        self._holder = secrets.token_hex(8)
        # Hosts with the same start number may take the lease from each other.
        self._start = secrets.randbits(48)
        self._renewed = 0
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def acquire(self, start: int | None) -> bool:
        """Try to take the lease; return False if another process renews it."""
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
        """Stop renewing, and remove the file if this process still holds the lease."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # Otherwise the lease expires.
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
                    lease = self._read()
                    if lease is not None and lease.get("holder") == self._holder:
                        self._write()
                        continue
            except OSError as error:
                log.warning(f"the lease {self._path} was not renewed: {error.strerror}")
                continue
            if lease is None or lease.get("start") != self._start:
                log.warning(
                    f"{self._path}: another training run took over the folder, or removed the lease"
                )
            return  # Another host of the same run may lead.

    def _content(self) -> dict[str, Any]:
        return {"start": self._start, "holder": self._holder, "renewed": self._renewed}

    def _write(self) -> None:
        self._renewed += 1
        # Several processes may write concurrently, so replace the file atomically.
        partial = self._path.with_name(f"{LEASE}.{self._holder}{PARTIAL}")
        partial.write_text(json.dumps(self._content()) + "\n", encoding="utf-8")
        os.replace(partial, self._path)

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the file; None if there is no file, {} if it is damaged."""
        try:
            content = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}
