"""Strict YAML: no duplicate keys, no wrong tags, no aliases that expand to much more text."""

from __future__ import annotations

import math
from typing import Any

import yaml

MAX_EXPANSION, FREE_VALUES = 10, 1000
"""Limit on expanded values of a YAML text: a multiple of the written ones, plus a constant."""


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader with errors for duplicate keys in a mapping and for `!!int x`."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; raise for a duplicate key."""
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
        """Compose the text; raise if its aliases expand it too much."""
        node = super().get_single_node()
        if node is not None:
            sizes: dict[int, float] = {}
            size = _expanded_size(node, sizes)
            if size > MAX_EXPANSION * len(sizes) + FREE_VALUES:
                problem = f"its aliases expand {len(sizes)} values to {size:.3g}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of a node; raise a YAML error if its tag does not fit."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"not a valid {node.tag.split(':')[-1]}", problem_mark=node.start_mark
            ) from error


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Count the values in a node, with aliases expanded.

    `sizes` has the nodes that are already counted; a node that contains itself counts as infinite.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for item in inner for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[id(node)]
