"""Keeps a folder for one training at a time, on whatever machines that share it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from skippipe_sched.errors import TemporaryError

from skippipe_jax.storage.accessible import accessible
from skippipe_jax.storage.lease import Lease


class Hold:
    """A hold on a folder: alone while a run begins, then shared by the hosts that lead it.

    It is a lock on the folder itself, which the system lets go when the process ends. Where such a
    lock excludes nobody, as on many network file systems, a lease in the folder takes its place.
    """

    def __init__(self, folder: Path, field: str = "run_dir"):
        """Hold nothing yet; `take` does. `field` is what names the folder."""
        self.folder = folder
        self.field = field
        self._descriptor: int | None = None
        self._lease: Lease | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Hold:
        """Hold nothing yet; release on leaving what is taken until then."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder."""
        self.release()

    def release(self) -> None:
        """Let the folder go; one that was made for the hold vanishes if it is still empty."""
        if self._lease is not None:
            self._lease.release()
        if self._descriptor is not None:
            for folder in self._made:
                with suppress(OSError):  # It holds something, or somebody has removed it.
                    folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, shared_by: int | None = None) -> None:
        """Hold the folder, which is made if there is none.

        Alone; or with other hosts of a run, which all name the same number of its start. A leader
        that was stopped keeps its hold, and must not bar the next one.

        Raises:
            TemporaryError: if another training holds it.
        """
        how = fcntl.LOCK_EX if shared_by is None else fcntl.LOCK_SH
        while self._descriptor is None:
            with accessible(self.folder, self.field):
                way = (self.folder, *self.folder.parents)
                self._made = [folder for folder in way if not folder.exists()]
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                self._require(locked(descriptor, how))
                # Another that held it may have let it vanish before it was locked here.
                if _is_at(self.folder, descriptor):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        with accessible(self.folder, self.field):
            if self._lease is None and not _excludes(self.folder):
                self._lease = Lease(self.folder, secrets.randbits(48))
            if self._lease is not None:
                self._lease.start = self._lease.start if shared_by is None else shared_by
                self._require(self._lease.take())

    def share(self, start: int) -> None:
        """Let other hosts of the run of this start hold the folder too, if it is held."""
        if self._descriptor is not None:
            locked(self._descriptor, fcntl.LOCK_SH)
            self.take(shared_by=start)

    def _require(self, is_free: bool) -> None:
        if not is_free:
            raise TemporaryError(
                self.field,
                str(self.folder),
                "another training is writing it",
                f"Wait for its end or stop it, or give another folder: --set {self.field}=...",
            )


def locked(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    """Whether this process, and those that it gives the descriptor to, now have the lock.

    File systems that know no locks let everyone have it.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _excludes(folder: Path) -> bool:
    """Whether others that try to hold a folder, which is held here, do not get the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not locked(descriptor)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether what is open is what the name means."""
    return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
