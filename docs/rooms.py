"""The rooms of both packages, drawn and told from what the code really imports.

python -m docs.rooms

writes docs/rooms.svg and the table on docs/architecture.md. The floors are those of the contracts
in pyproject.toml; an arrow stands for imports, and is left out where others lead there as well.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

import grimp
from skippipe_sched.figures.svg import (
    MARGIN,
    WIDTH,
    add_rect,
    add_text,
    add_tip,
    add_title,
    rounded,
    start_picture,
    svg_text,
)

ROOT = Path(__file__).parents[1]
PICTURE, PAGE = ROOT / "docs" / "rooms.svg", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m docs.rooms -->\n", "<!-- end of rooms -->\n"

# Pixels, and the room that a character takes.
TOP = 54
LINE = 14
GAP = 30
BETWEEN = 16
WIDEST = 430
CHARACTER = 5.9

STYLE = """
.rooms .house{fill:#f4f6f9}
.rooms .house-name{font-weight:600;fill:#5d6675}
.rooms .box{fill:#fff;stroke:#a3abb8}
.rooms .name{font-size:12px;font-weight:600;fill:#171b22}
.rooms .import{fill:none;stroke:#5b8fc7;stroke-width:1.3;marker-end:url(#rooms-arrow)}
.rooms marker path{fill:#5b8fc7}
"""


@dataclass(frozen=True)
class Room:
    """Modules that belong together: a sub-package, or what stands on one floor beside none."""

    package: str
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        """As on the picture: without the package, which is drawn around it."""
        names = [module.partition(".")[2] for module in self.modules]
        return names[0] if len(names) == 1 else "commands"

    @property
    def told(self) -> str:
        """What the room's own docstring says: what it is for, then what others may use."""
        if len(self.modules) == 1:
            tree = ast.parse(file_of(self.modules[0]).read_text(encoding="utf-8"))
            return ast.get_docstring(tree) or ""
        names = ", ".join(module.partition(".")[2] for module in self.modules)
        return f"{names}: start the commands of cli."

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


def modules_and_imports(floors: Floors) -> tuple[dict[Room, list[str]], dict[Room, set[Room]]]:
    """Return the modules of every room, and the lower rooms that it imports from.

    That there are no other imports is what `lint-imports` says.
    """
    packages = dict.fromkeys(room.package for floor in floors for room in floor)
    graph = grimp.build_graph(*packages, cache_dir=None)
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    of_module = {m: room for m in sorted(graph.modules) for room in floor_of if room.holds(m)}
    modules: dict[Room, list[str]] = {room: [] for room in floor_of}
    imports: dict[Room, set[Room]] = {room: set() for room in floor_of}
    for module, room in of_module.items():
        modules[room].append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other in of_module and floor_of[of_module[other]] > floor_of[room]:
                imports[room].add(of_module[other])
    return modules, imports


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
    """Return the texts of the files that this program writes."""
    floors = floors_of_contracts()
    modules, imports = modules_and_imports(floors)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(_table(floors, modules))
    return {
        PICTURE: picture(floors, shown_imports(imports)),
        PAGE: f"{before}{BEGIN}\n{table}\n\n{END}{after}",
    }


def _table(floors: Floors, modules: Mapping[Room, Sequence[str]]) -> Iterator[str]:
    yield "| room | what it is for, and offers | modules |"
    yield "| --- | --- | --- |"
    for room in (room for floor in floors for room in floor):
        files = ", ".join(_link(module) for module in modules[room] if not _is_package(module))
        yield f"| `{room.package}`: {room.name} | {' '.join(room.told.split())} | {files} |"


def _link(module: str) -> str:
    """Return the short name of a module, as a link to its file."""
    path = file_of(module)
    return f"[`{path.stem}`](../{path.relative_to(ROOT).as_posix()})"


def picture(floors: Floors, imports: Sequence[tuple[Room, Room]]) -> str:
    """Return an SVG: floors below one another, rooms as boxes, imports as arrows."""
    floors = _in_order(floors, imports)
    places, bottom = _places(floors)
    svg = start_picture("rooms", (WIDTH, bottom + MARGIN), "Rooms and their imports", STYLE)
    add_title(svg, "Rooms", "a room imports from lower floors only")
    _add_arrow_head(svg)
    for package in dict.fromkeys(room.package for room in places):
        _draw_house(svg, package, [at for room, at in places.items() if room.package == package])
    _draw_imports(svg, places, imports)
    for room, place in places.items():
        _draw_room(svg, room, place)
    return svg_text(svg)


def _in_order(floors: Floors, imports: Sequence[tuple[Room, Room]]) -> list[tuple[Room, ...]]:
    """Order the rooms of every floor from left to right so that arrows are short.

    Floor by floor, as often as it takes until nothing gets better.
    """
    ordered = [tuple(floor) for floor in floors]

    def length(candidate: Sequence[Sequence[Room]]) -> float:
        across = {
            room: (index + 0.5) / len(floor)
            for floor in candidate
            for index, room in enumerate(floor)
        }
        return sum(abs(across[a] - across[b]) for a, b in imports)

    while True:
        candidates = [
            [*ordered[:index], tuple(order), *ordered[index + 1 :]]
            for index, floor in enumerate(ordered)
            for order in permutations(floor)
        ]
        best = min(candidates, key=length)
        if length(best) >= length(ordered):
            return ordered
        ordered = best


@dataclass(frozen=True)
class _Place:
    """Where a room is drawn [pixels], and its text."""

    left: float
    top: float
    width: float
    height: float
    lines: tuple[str, ...]

    def across(self, index: int, count: int) -> float:
        """Where the arrow of this index, of so many, meets the box."""
        return self.left + self.width * (index + 1) / (count + 1)


def _places(floors: Floors) -> tuple[dict[Room, _Place], float]:
    """Where every room is, and how far down the last one reaches."""
    places: dict[Room, _Place] = {}
    y, package = TOP, ""
    for floor in floors:
        if floor[0].package != package:
            package = floor[0].package
            y += LINE
        width = min(WIDEST, (WIDTH - 4 * MARGIN + BETWEEN) / len(floor) - BETWEEN)
        left = (WIDTH - len(floor) * (width + BETWEEN) + BETWEEN) / 2
        texts = [
            textwrap.wrap(
                room.told.partition("\n\n")[0].replace("`", ""), int((width - 16) / CHARACTER)
            )
            for room in floor
        ]
        height = LINE * (max(map(len, texts)) + 1) + 12
        for index, (room, text) in enumerate(zip(floor, texts, strict=True)):
            x = left + index * (width + BETWEEN)
            places[room] = _Place(x, y, width, height, tuple(text))
        y += height + GAP
    return places, y - GAP + 10


def _add_arrow_head(svg: Element) -> None:
    attributes = {"markerWidth": "7", "markerHeight": "6", "refX": "6", "refY": "3"}
    marker = SubElement(
        SubElement(svg, "defs"), "marker", {"id": "rooms-arrow", "orient": "auto"} | attributes
    )
    SubElement(marker, "path", {"d": "M0 0L7 3L0 6z"})


def _draw_house(svg: Element, package: str, places: Sequence[_Place]) -> None:
    top, bottom = places[0].top - 22, places[-1].top + places[-1].height + 10
    add_rect(svg, "house", (MARGIN, WIDTH - MARGIN), (top, bottom), radius=8)
    add_text(svg, "house-name", MARGIN + 10, top + 16, package)


def _draw_imports(
    svg: Element, places: Mapping[Room, _Place], imports: Sequence[tuple[Room, Room]]
) -> None:
    def middle(room: Room) -> float:
        return places[room].across(0, 1)

    for room, other in imports:
        sent = sorted((b for a, b in imports if a == room), key=middle)
        received = sorted((a for a, b in imports if b == other), key=middle)
        start = places[room].across(sent.index(other), len(sent))
        end = places[other].across(received.index(room), len(received))
        top, bottom = places[room].top + places[room].height, places[other].top - 1
        bend = min(40.0, (bottom - top) / 2)
        corners = ((start, top), (start, top + bend), (end, bottom - bend), (end, bottom))
        (m, *c) = (f"{rounded(x)} {rounded(y)}" for x, y in corners)
        arrow = SubElement(svg, "path", {"class": "import", "d": f"M{m}C{' '.join(c)}"})
        add_tip(arrow, f"{room.name} imports {other.name}")


def _draw_room(svg: Element, room: Room, place: _Place) -> None:
    right, bottom = place.left + place.width, place.top + place.height
    add_rect(svg, "box", (place.left, right), (place.top, bottom), radius=6)
    add_text(svg, "name", place.left + 8, place.top + 16, room.name)
    for number, line in enumerate(place.lines, start=1):
        add_text(svg, "", place.left + 8, place.top + 16 + LINE * number, line)


def main() -> None:
    """Write the picture and the page."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
