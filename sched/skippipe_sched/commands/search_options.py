"""Options and progress of the commands that search."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skippipe_sched.search.budget import DEFAULT_BUDGET_S, Search


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the seed and the budget."""
    about = "seed of the search; the same seed and budget give the same plan (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=about)
    about = "time limit of the search (default: %(default)gs)"
    parser.add_argument("--budget", default=DEFAULT_BUDGET_S, metavar="TIME", help=about)


@contextmanager
def progress(name: str) -> Iterator[Callable[[Search], None]]:
    """Show a bar on a terminal, with the best iteration so far and the bound; elsewhere nothing.

    Yields the `watch` callback of a `Search`.
    """
    from tqdm import tqdm

    format_ = "{desc} {percentage:3.0f}%|{bar}|{postfix}"
    with tqdm(total=1.0, desc=name, bar_format=format_, leave=False, disable=None) as bar:

        def watch(search: Search) -> None:
            bar.n = search.share
            bound = "" if search.bound_s is None else f", bound {search.bound_s:.2f} s"
            bar.set_postfix_str(f"best {search.best_s:.2f} s{bound}")

        yield watch
