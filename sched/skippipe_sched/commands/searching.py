"""What a command shows while it searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress(name: str, bound_s: float | None) -> Iterator[Callable[[float, float], None]]:
    """A bar on a terminal, with the best iteration so far and the bound; elsewhere nothing.

    Gives what `Search` calls with the share of the budget that is used and the best iteration_s.
    """
    format_ = "{desc} {percentage:3.0f}%|{bar}|{postfix}"
    with tqdm(total=1.0, desc=name, bar_format=format_, leave=False, disable=None) as bar:
        bound = "" if bound_s is None else f", bound {bound_s:.2f} s"

        def watch(share: float, best_s: float) -> None:
            bar.n = share
            bar.set_postfix_str(f"best {best_s:.2f} s{bound}")

        yield watch
