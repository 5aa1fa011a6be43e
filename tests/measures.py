"""Measure the source of both packages, by area, and compare it with another tree of the project.

    python -m tests.measures [--before TREE] [--calls]

An area is a sub-package, or the modules at the top of a package. Where a tree is given, a cell
reads `there>here`. A cycle includes imports for type checking, but not those inside functions,
which are put off on purpose.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("skippipe_jax", "sched/skippipe_sched")
MAX_LINES_OF_FUNCTION = 70
MAX_PARAMETERS = 8
# D401 of ruff takes a word for a verb if it does not know better. These open docstrings, too.
NO_VERBS = """
How Whether Of Those Where Which One As Every Each Its Over On Who Nothing By From For All Why When
After That Without While Another Seconds Bytes Up Under Once Between So Room Some
"""
NAMES_OF_ALL_COMMANDS = {"main", "run", "add_arguments"}
COLUMNS = (
    *("lines", "code", "docstrings", "comments", "imports", "blank", "modules", "long functions"),
    *("wide signatures", "in cycles", "not imperative", "shared names"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module of one of the packages."""

    name: str
    path: Path
    area: str
    text: str
    tree: ast.Module


def modules(root: Path = ROOT) -> list[Module]:
    """Parse the modules of both packages of a tree."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = [*path.relative_to((root / package).parent).with_suffix("").parts]
            area = ".".join(parts[:2]) if len(parts) > 2 else f"{parts[0]} (top)"
            if parts[-1] == "__init__":
                parts.pop()
            text = path.read_text(encoding="utf-8")
            found.append(Module(".".join(parts), path, area, text, ast.parse(text)))
    return found


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield all functions within a node, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


def lines_of(function: Function) -> int:
    """Count the lines of a function, without its decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: Function) -> int:
    """Count the parameters of a function, without `self` or `cls`."""
    given = function.args
    ordered = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    others = [*given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return len(ordered) + len(others) - (ordered[:1] in (["self"], ["cls"]))


def kinds_of_lines(module: Module) -> Counter[str]:
    """Count the lines of each kind; a line with code and a comment is code."""
    numbered = enumerate(module.text.splitlines(), start=1)
    kinds = {number: "code" if line.strip() else "blank" for number, line in numbered}
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            kinds[token.start[0]] = "comments"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            is_import = not isinstance(node, ast.Expr)
            if is_import or isinstance(getattr(node.value, "value", None), str):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                kinds |= dict.fromkeys(lines, "imports" if is_import else "docstrings")
    return Counter(kinds.values())


def imports_of(module: Module, names: set[str]) -> set[str]:
    """Find the modules among `names` that a module imports, but not inside functions."""
    found = set()
    of_functions = [ast.walk(own) for _, own in functions(module.tree)]
    inside = {id(node) for nodes in of_functions for node in nodes}
    for node in ast.walk(module.tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in names else node.module)
    return (found & names) - {module.name}


def in_cycles(imports: Mapping[str, set[str]]) -> set[str]:
    """Find the modules that import themselves through others."""
    reached = {name: set(direct) for name, direct in imports.items()}
    for between in imports:
        for own in reached.values():
            if between in own:
                own |= reached[between]
    return {name for name, own in reached.items() if name in own}


def names_defined(tree: ast.Module) -> set[str]:
    """Find the public names of classes, functions and constants at the top of a module."""
    found = {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # Of A, B = 1, 2 both.
            named = (own for target in targets for own in ast.walk(target))
            named = (own for own in named if isinstance(own, ast.Name))
            found |= {own.id for own in named if isinstance(own.ctx, ast.Store)}
    return {name for name in found if not name.startswith("_")} - NAMES_OF_ALL_COMMANDS


def not_imperative(parsed: list[Module]) -> Counter[Path]:
    """Count by file the functions (no properties) whose docstring does not open with a verb."""
    lines = set()
    for module in parsed:
        for _, function in functions(module.tree):
            word = (ast.get_docstring(function) or "Do").split()[0].strip("`,.:;")
            kinds = " ".join(map(ast.unparse, function.decorator_list))
            if word in NO_VERBS.split() and "property" not in kinds:
                lines.add((module.path, function.body[0].lineno))
    command = ["ruff", "check", "--isolated", "--select", "D401", "--output-format", "json"]
    command += [str(module.path) for module in parsed]
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, check=False)
    for found in json.loads(done.stdout):
        lines.add((Path(found["filename"]), found["location"]["row"]))
    return Counter(path for path, _ in lines)


def measure(root: Path) -> dict[str, Counter[str]]:
    """Measure a tree: the figures of each area, of each package, and of both."""
    parsed = modules(root)
    names = {module.name for module in parsed}
    cyclic = in_cycles({module.name: imports_of(module, names) for module in parsed})
    wordings = not_imperative(parsed)
    named = {module.name: names_defined(module.tree) for module in parsed}
    times = Counter(name for own in named.values() for name in own)
    figures: dict[str, Counter[str]] = defaultdict(Counter)
    for module in parsed:
        found = kinds_of_lines(module)
        own = [function for _, function in functions(module.tree)]
        found["lines"] = found.total()
        found["modules"] = 1
        found["long functions"] = sum(lines_of(one) > MAX_LINES_OF_FUNCTION for one in own)
        found["wide signatures"] = sum(parameters_of(one) > MAX_PARAMETERS for one in own)
        found["in cycles"] = module.name in cyclic
        found["not imperative"] = wordings[module.path]
        found["shared names"] = sum(times[name] > 1 for name in named[module.name])
        package = module.name.partition(".")[0]
        for area in (module.area, f"{package} (all)", "both"):
            figures[area] += found
    return figures


def table(here: Mapping[str, Counter[str]], before: Mapping[str, Counter[str]]) -> str:
    """Lay figures out in columns."""
    rows = [["area", *COLUMNS]]
    for area in sorted({*here, *before}, key=lambda name: (name == "both", name)):
        own, there = here.get(area, Counter()), before.get(area, Counter())
        cells = [f"{there[c]}>{own[c]}" if there[c] != own[c] else f"{own[c]}" for c in COLUMNS]
        rows.append([area, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def calls_to_forward(root: Path) -> dict[str, int]:
    """Train three steps in a tree, and count what lies between its loop and a jitted forward.

    Counted are the functions of the packages on the stack, and their files, at the last forward.
    """
    from tests.harness.training_runs import SMALL_CASE, write_config  # loads JAX

    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.gettempdir())
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"train": {"steps": 3}, "run_dir": f"{folder}/run"}
        plan = {"case": SMALL_CASE, "method": "balanced"}
        config = write_config(Path(folder), plan=plan, **given)
        paths = os.pathsep.join([str(root), str(root / "sched")])
        done = subprocess.run(
            [sys.executable, __file__, "--traced", str(root), str(config)],
            env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            cwd=folder,
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


LOOPS = {"run", "_advance"}
"""The functions of `training/trainer.py` that may hold the loop over steps."""


def trace(root: str, config: str) -> None:
    """Train by a configuration, and print the counts of `calls_to_forward`."""
    import jax

    found: dict[str, int] = {}
    jit = jax.jit

    class Forward:
        def __init__(self, function: Any):
            self.function = function

        def __getattr__(self, name: str) -> Any:
            return getattr(self.function, name)

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            frame, files = sys._getframe(1), list[str]()
            while frame and not (
                frame.f_code.co_name in LOOPS and frame.f_code.co_filename.endswith("/trainer.py")
            ):
                if frame.f_code.co_filename.startswith(root):
                    files.append(frame.f_code.co_filename)
                frame = frame.f_back
            found.update(calls=len(files), files=len({*files}))
            return self.function(*arguments, **named)

    def noting_jit(function: Any = None, **how: Any) -> Any:
        own = jit(**how) if function is None else jit(function, **how)
        return Forward(own) if getattr(function, "__name__", "") == "forward" else own

    jax.jit = noting_jit
    sys.argv = ["train", "--config", config]
    try:
        runpy.run_module("skippipe_jax.train", run_name="__main__")
    finally:  # It ends by SystemExit.
        print(f"\n{json.dumps(found)}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Measure the source.")
    parser.add_argument("--before", type=Path, metavar="TREE", default=ROOT, help="compare with it")
    parser.add_argument("--calls", action="store_true", help="trace a step of a tiny run")
    parser.add_argument("--traced", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traced:
        return trace(*arguments.traced)
    before = arguments.before.resolve()
    print(table(measure(ROOT), measure(before)))
    if arguments.calls:
        for root in dict.fromkeys((before, ROOT)):
            print(f"from the loop to a forward in {root}: {calls_to_forward(root)}")


if __name__ == "__main__":
    main()
