"""Writes the table of rooms on docs/architecture.md, from what the code really imports.

python -m docs.rooms

The floors are those of the contracts in pyproject.toml. An import is left out where others lead
there as well.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m docs.rooms -->\n", "<!-- end of rooms -->\n"


@dataclass(frozen=True)
class Room:
    """Modules that belong together: a sub-package, or what stands on one floor beside none."""

    package: str
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name within the package."""
        names = [module.partition(".")[2] for module in self.modules]
        return names[0] if len(names) == 1 else "commands"

    @property
    def told(self) -> str:
        """What the room is for: the first paragraph of its docstring."""
        if len(self.modules) > 1:
            return "Start the commands of cli."
        tree = ast.parse(file_of(self.modules[0]).read_text(encoding="utf-8"))
        return (ast.get_docstring(tree) or "").partition("\n\n")[0]

    def holds(self, module: str) -> bool:
        """Whether a module is one of the room's."""
        return any(module == own or module.startswith(f"{own}.") for own in self.modules)


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
            members = [f"{package}.{name.strip()}" for name in layer.split("|")]
            rooms = [Room(package, (name,)) for name in members if _is_package(name)]
            alone = tuple(name for name in members if not _is_package(name))
            floors.append(rooms + ([Room(package, alone)] if alone else []))
    return floors


def file_of(module: str) -> Path:
    """Where a module is written; nothing is imported for it."""
    path = ROOT.joinpath("sched" if module.startswith("skippipe_sched") else "", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_package(module: str) -> bool:
    return file_of(module).name == "__init__.py"


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
    yield "| layer | room | what it is for | imports from |"
    yield "| --- | --- | --- | --- |"
    shown = shown_imports(imports)
    for number, floor in zip(range(len(floors), 0, -1), floors, strict=True):
        for room in floor:
            below = ", ".join(
                other.name if other.package == room.package else f"`{other.package}.{other.name}`"
                for own, other in shown
                if own == room
            )
            told = " ".join(room.told.split())
            yield f"| {number} | {_link(room)} | {told} | {below} |"


def _link(room: Room) -> str:
    """Return the modules of a room, as a link to the file whose docstring introduces it."""
    names = ", ".join(f"`{module}`" for module in room.modules)
    return f"[{names}](../{file_of(room.modules[0]).relative_to(ROOT).as_posix()})"


def main() -> None:
    """Write the page."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
