"""Records of a run in append-only files of JSON objects, one on each line.

A crash or a full disk can leave an incomplete line. The next record starts on a new line, and
readers skip lines that they cannot read with a warning. Lines with steps are ordered by step, so
that a step is found without reading all lines.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from skippipe_sched.errors import InputError

from skippipe_jax import log
from skippipe_jax.consensus.generations import RebuiltStage
from skippipe_jax.storage.files import os_errors_as

T = TypeVar("T")
Record: TypeAlias = msgspec.Struct | Mapping[str, Any]

BLOCK_BYTES = 1 << 16
DAMAGE = (ValueError, RecursionError)
"""Errors of decoding a line that is not a record; those of msgspec are ValueErrors."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class StepMetrics(msgspec.Struct, kw_only=True, frozen=True):
    """Metrics of an optimizer step; docs/metrics.md describes them.

    All earlier versions wrote the fields that have no default. The validation loss used to be among
    these metrics and now has records of its own; `RunDir.metrics` merges both.
    """

    FILE: ClassVar = "metrics.jsonl"
    step: Count
    loss: float | None
    z_loss: float | None = None
    validation_loss: float | msgspec.UnsetType | None = msgspec.UNSET
    tokens: Count = 0
    tokens_per_second: NonNegative
    flops_utilisation: float | None = None
    seconds_per_iteration: Positive
    plan: str | None = None
    predicted_seconds: NonNegative | None = None
    network: str | None = None
    generation: Count | None = None
    hosts: Count | None = None
    bytes_sent: Count | None = None
    idle_share: list[NonNegative] | None = None
    gradient_norm: float | None = None
    skipped_updates: Count = 0
    learning_rate: float | None = None
    compilations: Count
    compile_seconds: float | None = None
    peak_in_flight: dict[str, Count] | None = None
    peak_memory_bytes: dict[str, Count | None] | None = None
    peak_process_bytes: Count | None = None


class ValidationMetrics(msgspec.Struct, kw_only=True, frozen=True):
    """Validation loss after a step; of several records of a step the last is valid."""

    FILE: ClassVar = "validation.jsonl"
    step: Count
    validation_loss: float | None = None


class MemberRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Host of a generation: its process, its address, and its nodes."""

    host: Count
    pid: int | None = None
    address: Text
    nodes: list[Count] = []


class GenerationRecord(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Generation: hosts that train together from a step on, and their plan."""

    FILE: ClassVar = "membership.jsonl"
    generation: Count
    at: Text
    step: Count
    cause: str | None
    leader: Count
    rewound: bool
    plan: str = ""
    predicted_seconds: NonNegative | None = None
    members: Annotated[list[MemberRecord], msgspec.Meta(min_length=1)]
    left_out: list[Count] = []
    lost: list[Count] = []
    remade: list[RebuiltStage] = []


class RecoveryRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Recovery of a run from the loss of a stage."""

    FILE: ClassVar = "recoveries.jsonl"
    generation: Count
    at: str = ""
    cause: Text
    stages: Annotated[list[Count], msgspec.Meta(min_length=1)]
    asked: Text
    by: Text
    step_before: Count = 0
    step: Count
    steps_old: Count
    loss_before: float | None
    loss_after: float | None


class _Step(msgspec.Struct):
    step: int


def add_line(descriptor: int, record: Record) -> None:
    """Append a record as a complete line to an open file.

    It may be called again after an error: the incomplete line is terminated and readers skip it.
    """
    size = os.fstat(descriptor).st_size
    is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    text = json.dumps(msgspec.to_builtins(record, str_keys=True))
    remaining = memoryview(b"\n" * is_torn + text.encode() + b"\n")
    while remaining:  # A full disk accepts a part before it fails.
        remaining = remaining[os.write(descriptor, remaining) :]


def append_record(path: Path, record: Record) -> None:
    """Append a record to a file, which is created if it does not exist."""
    with path.open("a+b", buffering=0) as file:
        add_line(file.fileno(), record)


class RecordWriter:
    """Appender of records to a file of a run, for as long as this host leads.

    A new leader replaces the file. A former leader that was suspended still has the old file open,
    where its records have no effect.
    """

    def __init__(self, path: Path):
        """Open or create the file."""
        self._path = path
        with os_errors_as("run_dir", path.parent):
            self._file = self._open()
            self._status = os.fstat(self._file.fileno())

    def append(self, record: Record) -> None:
        """Append a record; a crash loses at most this one. May be repeated after an error."""
        with os_errors_as("run_dir", self._path.parent):
            try:
                add_line(self._file.fileno(), record)
            except OSError as error:
                # ESTALE: the file was removed or replaced on the server.
                if error.errno != errno.ESTALE:
                    raise
                again = self._open()
                if os.path.samestat(os.fstat(again.fileno()), self._status):
                    self._file.close()
                    self._file = again
                    add_line(self._file.fileno(), record)
                else:  # Replaced by another host, which leads.
                    again.close()

    def _open(self) -> io.FileIO:
        return self._path.open("a+b", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path, kind: type[T]) -> list[T]:
    """Read all records of a file; skip invalid lines with a warning.

    An unterminated last line is skipped without a warning, as it may be in progress.

    Raises:
        InputError: if the file cannot be read.
    """
    with os_errors_as(path.name, path, "cannot be read", "Check the path"):
        lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_decode(line, kind))
        except DAMAGE as error:
            text = line.decode(errors="replace")
            field = f"{path}, line {number}"
            log.warning(str(InputError(field, text, str(error), "This line is skipped")))
    return records


def last_record(path: Path, kind: type[T]) -> T | None:
    """Return the last readable record of a file; None if there is none.

    Raises:
        OSError: if the file cannot be read.
    """
    return next((record for _, line in lines_from_end(path) if (record := _try(line, kind))), None)


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of its end and the content of each line, from the last to the first.

    An unterminated line is skipped.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        buffer, end = b"", None
        while True:
            newline = buffer.rfind(b"\n")
            if newline < 0 and start > 0:
                size = min(BLOCK_BYTES, start)
                start -= size
                buffer = os.pread(file.fileno(), size, start) + buffer
                continue
            if end is not None:
                yield end, buffer[newline + 1 :]
            if newline < 0:
                return
            end, buffer = start + newline + 1, buffer[:newline]


def end_of_step(path: Path, step: int) -> tuple[int, int]:
    """Return the end offset of the lines up to `step`, and the last step of them; 0, 0 without any.

    Raises:
        OSError: if the file cannot be read.
    """
    for end, line in lines_from_end(path):
        record = _try(line, _Step)
        if record is not None and record.step <= step:
            return end, record.step
    return 0, 0


def _decode(line: bytes, kind: type[T]) -> T:
    """Decode a line; raise one of `DAMAGE` if it is not a record."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # Python writes NaN, which is not valid JSON.
        return msgspec.convert(json.loads(line, parse_constant=lambda _: None), kind)


def _try(line: bytes, kind: type[T]) -> T | None:
    try:
        return _decode(line, kind)
    except DAMAGE:
        return None


def finite(value: float | None) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
