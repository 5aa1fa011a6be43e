"""YAML that says one thing: no key twice, no wrong tag, no aliases that make much of little."""

from __future__ import annotations

import math
from typing import Any

import yaml

MOST_REPEATED, FEW_VALUES = 10, 1000
"""A YAML text may stand for so many times the values that are written in it, and for a few more."""


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice in one mapping is an error, and so is `!!int x`."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, but not with a key given twice."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Compose the text, but not what its aliases make much larger than it is."""
        node = super().get_single_node()
        if node is not None:
            sizes: dict[int, float] = {}
            size = _unfolded(node, sizes)
            if size > MOST_REPEATED * len(sizes) + FEW_VALUES:
                problem = f"its aliases make {size:.3g} values of {len(sizes)}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of a node; one that its tag does not fit is an error of YAML."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"not a valid {node.tag.split(':')[-1]}", problem_mark=node.start_mark
            ) from error


def _unfolded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Count the values in a node, each alias as what it stands for.

    `sizes` has the nodes that are known already; one that lies in itself has no end.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for own in inner for part in (own if isinstance(own, tuple) else (own,)))
        sizes[id(node)] = 1 + sum(_unfolded(part, sizes) for part in parts)
    return sizes[id(node)]
