"""Writes the table of sub-packages on docs/architecture.md, from what the code really imports.

python -m docs.subpackages

They are in the order of the layers in pyproject.toml, the highest first, without layers of single
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
BEGIN, END = "<!-- subpackages: python -m docs.subpackages -->\n", "<!-- end of subpackages -->\n"


@dataclass(frozen=True)
class Subpackage:
    """A sub-package of one of the two packages."""

    package: str
    name: str

    @property
    def module(self) -> str:
        """Its full name."""
        return f"{self.package}.{self.name}"

    @property
    def told(self) -> str:
        """Purpose of the sub-package: the first paragraph of its docstring."""
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        return (ast.get_docstring(tree) or "").partition("\n\n")[0]

    @property
    def file(self) -> Path:
        """Where its docstring is written; nothing is imported for it."""
        root = ROOT / ("sched" if self.package == "skippipe_sched" else "")
        return root / self.package / self.name / "__init__.py"

    def holds(self, module: str) -> bool:
        """Return True if a module belongs to the sub-package."""
        return module == self.module or module.startswith(f"{self.module}.")


Layers = Sequence[Sequence[Subpackage]]


def layers_of_contracts() -> list[list[Subpackage]]:
    """Return the sub-packages of each layer, the highest layer first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = []
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        [package] = contract["containers"]
        if "." in package:  # The layers within a sub-package.
            continue
        for layer in contract["layers"]:
            members = [Subpackage(package, name.strip()) for name in layer.split("|")]
            layers.append([subpackage for subpackage in members if subpackage.file.exists()])
    return layers


def imports_of(layers: Layers) -> dict[Subpackage, set[Subpackage]]:
    """Return the lower sub-packages that every sub-package imports from.

    That there are no other imports is what `lint-imports` says.
    """
    packages = dict.fromkeys(subpackage.package for layer in layers for subpackage in layer)
    graph = grimp.build_graph(*packages, cache_dir=None)
    layer_of = {subpackage: number for number, layer in enumerate(layers) for subpackage in layer}
    of_module = {m: own for m in sorted(graph.modules) for own in layer_of if own.holds(m)}
    imports: dict[Subpackage, set[Subpackage]] = {subpackage: set() for subpackage in layer_of}
    for module, subpackage in of_module.items():
        for other in graph.find_modules_directly_imported_by(module):
            if other in of_module and layer_of[of_module[other]] > layer_of[subpackage]:
                imports[subpackage].add(of_module[other])
    return imports


def shown_imports(
    imports: Mapping[Subpackage, set[Subpackage]],
) -> list[tuple[Subpackage, Subpackage]]:
    """Return the imports without sub-packages that are reached through another one as well."""

    def below(subpackage: Subpackage) -> set[Subpackage]:
        return imports[subpackage].union(*map(below, imports[subpackage]))

    return [
        (subpackage, other)
        for subpackage, others in imports.items()
        for other in sorted(others - set().union(*map(below, others)), key=lambda other: other.name)
    ]


def written() -> dict[Path, str]:
    """Return the page with the table of sub-packages as it is now."""
    layers = layers_of_contracts()
    table = "\n".join(_table(layers, imports_of(layers)))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return {PAGE: f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"}


def _table(layers: Layers, imports: Mapping[Subpackage, set[Subpackage]]) -> Iterator[str]:
    yield "| sub-package | what it is for | imports from |"
    yield "| --- | --- | --- |"
    shown = shown_imports(imports)
    for subpackage in chain.from_iterable(layers):
        below = ", ".join(
            other.name if other.package == subpackage.package else f"`{other.module}`"
            for own, other in shown
            if own == subpackage
        )
        yield f"| {_link(subpackage)} | {' '.join(subpackage.told.split())} | {below} |"


def _link(subpackage: Subpackage) -> str:
    """Return the name of a sub-package, as a link to the file whose docstring introduces it."""
    return f"[`{subpackage.module}`](../{subpackage.file.relative_to(ROOT).as_posix()})"


def main() -> None:
    """Write the page."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
