"""Writes the table of rooms on docs/architecture.md, from what the code really imports.

python -m docs.rooms

Rooms are in the order of the layers in pyproject.toml, the highest first, without layers of single
modules. An import is left out where others lead there as well.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m docs.rooms -->\n", "<!-- end of rooms -->\n"


@dataclass(frozen=True)
class Room:
    """A sub-package of one of the two packages."""

    package: str
    name: str

    @property
    def module(self) -> str:
        """Its full name."""
        return f"{self.package}.{self.name}"

    @property
    def told(self) -> str:
        """Purpose of the room: the first paragraph of its docstring."""
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        return (ast.get_docstring(tree) or "").partition("\n\n")[0]

    @property
    def file(self) -> Path:
        """Where its docstring is written; nothing is imported for it."""
        root = ROOT / ("sched" if self.package == "skippipe_sched" else "")
        return root / self.package / self.name / "__init__.py"

    def holds(self, module: str) -> bool:
        """Whether a module is one of the room's."""
        return module == self.module or module.startswith(f"{self.module}.")


Floors = Sequence[Sequence[Room]]


def floors_of_contracts() -> list[list[Room]]:
    """Return the rooms of each floor, the highest floor first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    floors = []
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        [package] = contract["containers"]
        if "." in package:  # The layers within a room.
            continue
        for layer in contract["layers"]:
            members = [Room(package, name.strip()) for name in layer.split("|")]
            floors.append([room for room in members if room.file.exists()])
    return floors


def imports_of(floors: Floors) -> dict[Room, set[Room]]:
    """Return the lower rooms that every room imports from.

    That there are no other imports is what `lint-imports` says.
    """
    packages = dict.fromkeys(room.package for floor in floors for room in floor)
    graph = grimp.build_graph(*packages, cache_dir=None)
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    of_module = {m: room for m in sorted(graph.modules) for room in floor_of if room.holds(m)}
    imports: dict[Room, set[Room]] = {room: set() for room in floor_of}
    for module, room in of_module.items():
        for other in graph.find_modules_directly_imported_by(module):
            if other in of_module and floor_of[of_module[other]] > floor_of[room]:
                imports[room].add(of_module[other])
    return imports


def shown_imports(imports: Mapping[Room, set[Room]]) -> list[tuple[Room, Room]]:
    """Return the imports without rooms that are reached through another room as well."""

    def below(room: Room) -> set[Room]:
        return imports[room].union(*map(below, imports[room]))

    return [
        (room, other)
        for room, others in imports.items()
        for other in sorted(others - set().union(*map(below, others)), key=lambda other: other.name)
    ]


def written() -> dict[Path, str]:
    """Return the page with the table of rooms as it is now."""
    floors = floors_of_contracts()
    table = "\n".join(_table(floors, imports_of(floors)))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return {PAGE: f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"}


def _table(floors: Floors, imports: Mapping[Room, set[Room]]) -> Iterator[str]:
    yield "| room | what it is for | imports from |"
    yield "| --- | --- | --- |"
    shown = shown_imports(imports)
    for room in chain.from_iterable(floors):
        below = ", ".join(
            other.name if other.package == room.package else f"`{other.module}`"
            for own, other in shown
            if own == room
        )
        yield f"| {_link(room)} | {' '.join(room.told.split())} | {below} |"


def _link(room: Room) -> str:
    """Return the name of a room, as a link to the file whose docstring introduces it."""
    return f"[`{room.module}`](../{room.file.relative_to(ROOT).as_posix()})"


def main() -> None:
    """Write the page."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
