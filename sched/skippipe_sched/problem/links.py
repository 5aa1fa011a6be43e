"""Links between locations: latency and bandwidth of every ordered pair, from a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from skippipe_sched import fields
from skippipe_sched.errors import InputError

Matrix = Float[np.ndarray, "nodes nodes"]
GIBIBYTE = 2**30
# In GiB per second, a thousandth of a byte: with less, times would not stay finite.
LEAST_BANDWIDTH = 1e-12
COLUMNS = ("location_a", "location_b", "latency_ms", "bandwidth_GiB_per_s")
# Alternatives for the last two columns, and their factors to milliseconds and GiB per second.
LATENCIES = {"latency_ms": 1.0, "latency_us": 1e-3, "latency_s": 1e3}
BANDWIDTHS = {
    "bandwidth_GiB_per_s": 1.0,
    "bandwidth_MiB_per_s": 2**20 / GIBIBYTE,
    "bandwidth_GB_per_s": 1e9 / GIBIBYTE,
    "bandwidth_MB_per_s": 1e6 / GIBIBYTE,
    "bandwidth_Gbit_per_s": 1e9 / 8 / GIBIBYTE,
    "bandwidth_Mbit_per_s": 1e6 / 8 / GIBIBYTE,
}

# gcp12: measured between 12 cloud regions (SkipPipe, arXiv 2502.19913, March 2025). NL-London is
# published about 1000 times slower than its neighbors and kept as published.
# world12: 12 cities (the paper's first release, February 2025); Amsterdam-Ireland and
# Sofia-Ireland are missing there and have the figure of a nearby pair: 10 ms, 0.80 GiB/s.
BUILT_IN = ("gcp12", "world12")
DEFAULT_SAME_LOCATION = {"latency_ms": 1.0, "bandwidth_GiB_per_s": 2.0}


@dataclass(frozen=True)
class Link:
    """One direction between two locations: latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class LinkTable:
    """Links by ordered pair of locations.

    A pair given in one order only is used for both directions; a pair given in both orders has two
    different directions.
    """

    links: dict[tuple[str, str], Link]
    same_location: Link

    def link(self, source: str, target: str) -> Link:
        """Return the link from `source` to `target`; raise `InputError` if it is missing."""
        found = self.links.get((source, target)) or self.links.get((target, source))
        if found is None and source == target:
            found = self.same_location
        if found is None:
            raise self.missing((source, target))
        return found

    def suggestion(self, pair: tuple[str, str]) -> str:
        """Return the start of a remedy with names like those of `pair` that are unknown."""
        known = {name for named in self.links for name in named}
        return "".join(fields.suggestion(name, known) for name in sorted({*pair} - known))

    def missing(self, pair: tuple[str, str], count: int | None = None) -> InputError:
        """Return the error of a pair without a link, one of `count` pairs if known."""
        return InputError(
            "case.links",
            " to ".join(pair),
            "no link between these locations"
            + ("" if count is None else f" ({count} missing in total)"),
            f"{self.suggestion(pair)}Add a row: {row_for(pair)}",
        )

    def matrices(self, locations: Sequence[str]) -> tuple[Matrix, Matrix]:
        """Return latency [s] and bandwidth [bytes/s] between nodes at `locations`, source first."""
        names = sorted(set(locations))
        index = np.array([names.index(name) for name in locations])
        latency = np.array([[self.link(a, b).latency_s for b in names] for a in names])
        bandwidth = np.array([[self.link(a, b).bandwidth for b in names] for a in names])
        return latency[np.ix_(index, index)], bandwidth[np.ix_(index, index)]


def row_for(pair: tuple[str, str]) -> str:
    """Return the row of a table that the user has to complete for a pair of locations."""
    return f"{','.join(pair)},<latency>,<bandwidth>, in the units of the table"


def rows_of(value: Any, folder: Path) -> str | list[list[Any]]:
    """Return the form of `case.links` that a plan stores: a built-in name, or the rows.

    `value` is a built-in name, the path of a CSV file (relative to `folder`) or a list of rows.
    """
    if isinstance(value, str) and fields.text(value, "case.links") not in BUILT_IN:
        if not value.endswith(".csv"):
            problem = "unknown table"
            remedy = f"Use one of {', '.join(BUILT_IN)}, or the path of a .csv file beside the case"
            raise InputError("case.links", value, problem, remedy)
        return _read_csv(fields.read_text(folder / value, "case.links"), value)
    return value


def table(value: Any, same_location: Link) -> LinkTable:
    """Read the table of a built-in name or of rows [a, b, latency_ms, bandwidth_GiB_per_s]."""
    if isinstance(value, str):
        name = fields.text(value, "case.links", BUILT_IN)
        source = resources.files("skippipe_sched.problem") / "tables" / f"{name}.csv"
        value = _read_csv(source.read_text(encoding="utf-8"), f"{name}.csv")
    links = {}
    for number, row in enumerate(fields.sequence(value, "case.links", minimum_length=0)):
        field = f"case.links[{number}]"
        if len(fields.sequence(row, field)) != len(COLUMNS):
            raise InputError(field, row, "must have four entries", f"Write {', '.join(COLUMNS)}")
        source, target = (fields.text(entry, field) for entry in row[:2])
        if (source, target) in links:
            raise InputError(field, row, "this pair is given twice", "Delete one of the two rows")
        links[source, target] = link(row[2], row[3], field)
    return LinkTable(links, same_location)


def same_location_of(raw: Mapping[str, Any]) -> Link:
    """Read the link between nodes at one location, from `same_location` of a case."""
    field, keys = "case.same_location", DEFAULT_SAME_LOCATION
    same = fields.checked_mapping(raw.get("same_location", keys), field, keys, keys)
    return link(same["latency_ms"], same["bandwidth_GiB_per_s"], field)


def link(latency_ms: Any, bandwidth_gib: Any, field: str) -> Link:
    """Make a link from the units of tables: milliseconds and GiB per second."""
    latency = fields.number(latency_ms, f"{field}.latency_ms", 0.0)
    bandwidth = fields.number(bandwidth_gib, f"{field}.bandwidth_GiB_per_s", LEAST_BANDWIDTH)
    return Link(latency / 1e3, bandwidth * GIBIBYTE)


def _read_csv(content: str, origin: str) -> list[list[Any]]:
    reader = csv.reader(io.StringIO(content), strict=True)
    try:
        stripped = ((reader.line_num, [cell.strip() for cell in cells]) for cells in reader)
        lines = [(line, cells) for line, cells in stripped if any(cells)]
    except csv.Error as error:
        problem = f"is not valid CSV at line {reader.line_num}: {error}"
        remedy = "Correct the quotes in this line"
        raise InputError("case.links", origin, problem, remedy) from error
    header = lines[0][1] if lines else []
    latency, bandwidth = header[2:] if len(header) == len(COLUMNS) else ("", "")
    ms_factor, gib_factor = LATENCIES.get(latency), BANDWIDTHS.get(bandwidth)
    if (*header[:2],) != COLUMNS[:2] or ms_factor is None or gib_factor is None:
        units = ", ".join(name.split("_", 1)[1] for name in [*LATENCIES, *BANDWIDTHS])
        problem = "is not the header of a link table"
        remedy = f"The first line must be {','.join(COLUMNS)}, with one of the units {units}"
        raise InputError(f"case.links ({origin}, line 1)", ",".join(header), problem, remedy)
    rows: list[list[Any]] = []
    for line, cells in lines[1:]:
        field = f"case.links ({origin}, line {line})"
        if len(cells) != len(COLUMNS):
            problem = "must have four cells"
            raise InputError(field, ",".join(cells), problem, f"Write {','.join(header)}")
        latency_ms = ms_factor * fields.number(cells[2], f"{field}.{latency}", 0.0)
        bandwidth_gib = gib_factor * fields.number(cells[3], f"{field}.{bandwidth}")
        rows.append([*cells[:2], latency_ms, bandwidth_gib])
    return rows
