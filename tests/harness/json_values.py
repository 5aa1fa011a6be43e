"""JSON of all kinds, and valid JSON in which one value is another, or missing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1 << 62])
    | st.floats()
    | st.text(max_size=5)
)
TEXTS = st.text(max_size=3)


def json_values(
    others: st.SearchStrategy[Any], keys: st.SearchStrategy[str] = TEXTS
) -> st.SearchStrategy[Any]:
    """Values that may contain these others, in lists and in mappings with these keys."""
    return st.recursive(
        SCALARS | others,
        lambda parts: st.lists(parts, max_size=5) | st.dictionaries(keys, parts, max_size=6),
        max_leaves=10,
    )


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> Any:
    """JSON in which a value, or one inside it, is one of `values`, or is missing."""
    given = json.loads(json.dumps(draw(whole)))
    spot = given
    while places := [*spot] if isinstance(spot, dict) else [*range(len(spot))]:
        place = draw(st.sampled_from(places))
        if isinstance(spot[place], dict | list) and draw(st.booleans()):
            spot = spot[place]
            continue
        if draw(st.integers(0, 3)):
            spot[place] = draw(values)
        else:
            del spot[place]
        break
    return given
