"""The table of how long tests take, from which their tiers were chosen.

`python -m pytest -n 2 -m "" --junitxml report.xml && python -m tests.durations report.xml`
writes `durations.tsv`: for each test function its file, its number of cases, and the seconds of
one worker that they took with setup and teardown.
"""

from __future__ import annotations

import csv
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).with_suffix(".tsv")
COLUMNS = ("file", "test", "cases", "seconds")


def seconds_of_files() -> dict[str, float]:
    """Return the seconds of each file, by its path in the repository."""
    seconds = defaultdict[str, float](float)
    with TABLE.open(newline="") as table:
        for row in csv.DictReader(table, delimiter="\t"):
            seconds[row["file"]] += float(row["seconds"])
    return seconds


def write(reports: list[Path]) -> None:
    """Write the table anew from pytest's reports in JUnit's format; a later report wins."""
    found: dict[tuple[str, str], float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                file = case.attrib["classname"].replace(".", "/") + ".py"
                found[file, case.attrib["name"]] = float(case.attrib["time"])
    cases = defaultdict[tuple[str, str], int](int)
    seconds = defaultdict[tuple[str, str], float](float)
    for (file, name), time in found.items():
        function = file, name.partition("[")[0]
        cases[function] += 1
        seconds[function] += time
    with TABLE.open("w", newline="") as table:
        rows = csv.writer(table, delimiter="\t", lineterminator="\n")
        rows.writerow(COLUMNS)
        for function in sorted(cases):
            rows.writerow([*function, cases[function], f"{seconds[function]:.2f}"])


if __name__ == "__main__":
    write([Path(argument) for argument in sys.argv[1:]])
