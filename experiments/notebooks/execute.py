"""Run the notebooks of this folder from top to bottom, and keep in them what their cells show.

python -m experiments.notebooks.execute [NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from skippipe_sched.errors import run_command
from skippipe_sched.fields import text

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
FORMAT = 4
# The tag of the cell whose values may be others, and the key of what `code_digest` says.
PARAMETERS = "parameters"
EXECUTED = "executed_code"
CELL_TIMEOUT_S, KERNEL_TIMEOUT_S = 1800, 180


def main() -> int:
    """Parse the command line and execute notebooks in place; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.notebooks.execute",
        description="Execute notebooks in a new folder, and save their outputs in their files.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)"
    )
    names = parser.parse_args().names
    return run_command(lambda: _execute_in_place(names or NAMES))


def _execute_in_place(names: list[str] | tuple[str, ...]) -> int:
    for name in [text(name, "NAME", NAMES) for name in names]:
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(load(name), Path(folder))
        path = notebook_path(name)
        nbformat.write(notebook, path)
        seconds, size = time.monotonic() - start_s, path.stat().st_size
        print(f"{name}: executed in {seconds:.0f} s, {size / 1e3:.0f} kB", flush=True)
    return 0


def notebook_path(name: str) -> Path:
    """The file of a notebook."""
    return FOLDER / f"{name}.ipynb"


def load(name: str) -> NotebookNode:
    """Read a notebook, with what its cells showed last."""
    return nbformat.read(notebook_path(name), FORMAT)


def execute(
    notebook: NotebookNode, folder: Path, parameters: Mapping[str, Any] | None = None
) -> NotebookNode:
    """A copy of a notebook in which every cell was run in order, by one new kernel in `folder`.

    `parameters` are values for names that the cell tagged "parameters" assigns; a cell after it
    assigns them too.

    Raises:
        CellExecutionError: when a cell fails.
        ValueError: for parameters that the notebook does not have.
    """
    executed = copy.deepcopy(notebook)
    if parameters:
        _assign(executed, parameters)
    client = NotebookClient(
        executed,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=KERNEL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    executed.metadata[EXECUTED] = code_digest(notebook)
    return executed


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that are run, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_digest(notebook: NotebookNode) -> str:
    """A digest of all code in a notebook, which tells whether its outputs are of that code."""
    sources = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(sources.encode()).hexdigest()


def _assign(notebook: NotebookNode, parameters: Mapping[str, Any]) -> None:
    [index] = [
        index
        for index, cell in enumerate(notebook.cells)
        if PARAMETERS in cell.metadata.get("tags", ())
    ]
    assigned = {
        target.id
        for statement in ast.parse(notebook.cells[index].source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    unknown = sorted(set(parameters) - assigned)
    if unknown:
        raise ValueError(f"the notebook has no parameter {unknown[0]}, only {sorted(assigned)}")
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(source, id="other-parameters"))


if __name__ == "__main__":
    sys.exit(main())
