"""Outer averaging equals its formulas, and keeps what it promises whatever is sent, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.config import AveragingConfig, ModelConfig
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.optim.outer import (
    Fragment,
    Outer,
    begin,
    dequantised,
    fragments_of,
    quantised,
)
from tests.harness import outer_oracle
from tests.harness.training_runs import assert_same_bits, by_name
from tests.runtime.test_oracle import TIME

DTYPES = ("float32", "bfloat16", "int8")
TINY = float(np.finfo(np.float32).tiny)
properties = settings(max_examples=25)

# More numbers than a group of int8 has, and groups that are not full.
MODEL = ModelConfig(
    vocabulary_size=11,
    width=12,
    layers=7,
    stage_layers=(2, 2, 3),
    heads=2,
    kv_heads=1,
    ffn_width=16,
    context=TIME,
)


class Compiled:
    """The averaging of one stage by `skippipe_jax.optim.outer`, as hosts would make it.

    Messages come to a replica in an order of their own. `messages` are all that were sent, by
    iteration and replica.
    """

    def __init__(self, averaging: AveragingConfig, layers: int, replicas: list[Any]):
        self.averaging = averaging
        self.fragments = fragments_of(averaging, layers)
        self.outers = [begin(own) for own in replicas]
        self.sent: dict[int, list[Any]] = {}
        self.messages: dict[tuple[int, int], np.ndarray] = {}

    def end(self, iteration: int, replicas: list[Any]) -> list[Any]:
        # They may be one another's, and are written over.
        parameters = [copied(own) for own in replicas]
        if (fragment := self.averaging.fragment_sent_after(iteration)) is not None:
            self.sent[fragment] = []
            for replica, own in enumerate(parameters):
                message, part, outer = self.fragments[fragment].send(own, self.outers[replica])
                self.outers[replica] = outer
                self.sent[fragment].append((message, part))
                self.messages[iteration, replica] = np.asarray(message)
        if (
            fragment := self.averaging.fragment_sent_after(iteration - self.averaging.delay)
        ) is not None:
            sent = self.sent.pop(fragment)
            for replica, own in enumerate(parameters):
                places = [*range(replica, len(sent)), *range(replica)]
                parameters[replica], self.outers[replica] = self.fragments[fragment].apply(
                    own, self.outers[replica], sent[replica][1], {p: sent[p][0] for p in places}
                )
        return parameters


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


@st.composite
def averagings(draw: st.DrawFn) -> tuple[AveragingConfig, int]:
    """And the blocks of a stage that has enough of them."""
    layers = draw(st.integers(1, 4))
    fragments = draw(st.integers(1, layers))
    every = draw(st.integers(fragments, 5))
    averaging = AveragingConfig(
        "outer",
        every,
        fragments,
        delay=draw(st.integers(0, every - 1)),
        dtype=draw(st.sampled_from(DTYPES)),
        rate=draw(st.sampled_from([0.3, 0.7, 1.0])),
        momentum=draw(st.sampled_from([0.0, 0.5, 0.9])),
        exact_steps=draw(st.integers(0, 2)),
    )
    return averaging, layers


@settings(properties, max_examples=8)
@given(averagings(), st.integers(2, 4), st.booleans(), st.integers(0, 99))
def test_it_equals_the_formulas(
    drawn: tuple[AveragingConfig, int], replicas: int, has_ends: bool, seed: int
):
    """Of any stage, whatever steps its replicas take between.

    Where changes are rounded, which makes much of a last bit, the formulas are given the messages.
    """
    averaging, layers = drawn
    random = np.random.default_rng(seed)
    shapes = {"blocks": {"norm": (layers, 6), "weights": (layers, 5, 30)}}
    if has_ends:
        shapes |= {"embedding": (11, 12), "head": (12, 11), "norm": (12,)}

    def normal(size: float) -> Any:
        return jax.tree.map(
            lambda shape: jnp.asarray(size * random.normal(size=shape), jnp.float32),
            shapes,
            is_leaf=lambda shape: isinstance(shape, tuple),
        )

    own: list[Any] = [normal(1.0)] * replicas
    compiled = Compiled(averaging, layers, own)
    recorded = None
    if averaging.dtype != "float32":
        recorded = lambda iteration, replica: compiled.messages[iteration, replica]  # noqa: E731
    formulas = outer_oracle.Formulas(averaging, layers, own, recorded)
    expected = own
    for iteration in range(averaging.exact_steps + 1, averaging.min_steps + averaging.every):
        steps = [normal(0.1) for _ in range(replicas)]
        own = compiled.end(iteration, moved(own, steps))
        expected = formulas.end(iteration, moved(expected, steps))
        for replica, outer in enumerate(compiled.outers):
            assert_near(own[replica], outer_oracle.named(expected[replica]))
            assert_near(outer.anchor, formulas.anchor)
            assert_near(outer.momentum, formulas.momentum)
            assert_near(outer.residual, formulas.residuals[replica])
            assert_same_bits(by_name(outer.anchor), by_name(compiled.outers[0].anchor))
            assert_same_bits(by_name(outer.momentum), by_name(compiled.outers[0].momentum))
        if averaging.delay == 0 and (sent := averaging.fragment_sent_after(iteration)) is not None:
            part, first = compiled.fragments[sent].part, compiled.outers[0].anchor
            for tree in own:
                assert_same_bits(by_name(part(tree)), by_name(part(first)))
    assert any(np.any(momentum) for momentum in formulas.momentum.values())


def moved(replicas: list[Any], steps: list[Any]) -> list[Any]:
    return [jax.tree.map(jnp.add, *own) for own in zip(replicas, steps, strict=True)]


def assert_near(found: Any, expected: outer_oracle.Arrays) -> None:
    """Up to some last bits of numbers of size 1."""
    named = outer_oracle.named(found)
    assert named.keys() == expected.keys()
    for name, own in named.items():
        np.testing.assert_allclose(own, expected[name], rtol=0, atol=1e-5, err_msg=name)


# What is sent.


@st.composite
def changes(draw: st.DrawFn) -> dict[str, jax.Array]:
    """Arrays of any shape, of numbers large and small, of which some are 0."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from([(1,), (127,), (128,), (129,), (3, 100), (2, 4, 33)]))
        size = 10.0 ** draw(st.integers(-42, 30))
        kept = random.random(shape) < draw(st.sampled_from([0.0, 0.02, 1.0]))
        made[f"{number}"] = jnp.asarray(kept * size * random.normal(size=shape), jnp.float32)
    return made


@properties
@given(changes(), st.sampled_from(DTYPES))
def test_what_travels_and_what_is_left_make_the_change(change: dict[str, jax.Array], dtype: str):
    message = quantised(change, dtype)
    arrived = dequantised(message, change, dtype)
    width = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 1.0 / 254}[dtype]
    for name, own in change.items():
        came, left = arrived[name], own - arrived[name]
        assert (came.shape, came.dtype) == (own.shape, jnp.float32)
        largest = float(jnp.max(jnp.abs(own)))
        # What is below the smallest normal number may become 0 wherever it is computed with.
        np.testing.assert_allclose(came + left, own, rtol=1e-6, atol=1e-6 * largest + TINY)
        # A scale that is so small leaves all of its group.
        assert float(jnp.max(jnp.abs(left))) <= 1.001 * width * largest + 127 * TINY
        assert not np.any(np.asarray(came)[np.asarray(own) == 0.0])
    if dtype == "int8":
        expected = {
            name: outer_oracle.rounded(np.asarray(own).ravel(), dtype)
            for name, own in change.items()
        }
        for name, own in expected.items():
            largest = np.max(np.abs(own), initial=0.0)
            # A last bit of a scale decides on which side of a half a number is.
            close = np.isclose(np.asarray(arrived[name]).ravel(), own, rtol=1e-5)
            assert np.mean(~close) <= 0.01 or largest < 1e-35
        assert message.dtype == jnp.int8


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_out_as_nothing_finite(wrong: float):
    change = {"a": jnp.ones(300).at[130].set(wrong)}
    arrived = np.asarray(dequantised(quantised(change, "int8"), change, "int8")["a"])
    assert not np.any(np.isfinite(arrived[128:256]))
    np.testing.assert_allclose(arrived[[*range(128), *range(256, 300)]], 1.0, rtol=1e-6)


@settings(properties, max_examples=5)
@given(st.integers(1, 7), st.data())
def test_fragments_hold_every_number_once(layers: int, data: st.DataObject):
    fragments = data.draw(st.integers(1, layers))
    averaging = AveragingConfig("outer", every=9, fragments=fragments, delay=0)
    for stage in stages_like(layers):
        count = jax.tree.map(jnp.zeros_like, stage)
        for number, fragment in enumerate(fragments_of(averaging, layers)):
            assert {block * fragments // layers for block in fragment.blocks} == {number}
            part = fragment.part(count)
            assert fragment.touched(count).keys() == part.keys()
            more = jax.tree.map(lambda leaf: leaf + 1.0, part)
            count = fragment.put(count, more, lambda jitted, *own: jitted.__wrapped__(*own))
            assert ("embedding" in part) == (number == 0 and "embedding" in stage)
            assert ("head" in part) == (number == fragments - 1 and "head" in stage)
        assert all(np.all(np.asarray(leaf) == 1.0) for leaf in jax.tree.leaves(count))


def stages_like(layers: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random parameters of a data stage and of an inner one, of so many blocks each."""
    random = np.random.default_rng(seed)
    model = dataclasses.replace(MODEL, layers=2 * layers, stage_layers=(layers, layers))
    return jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32),
        stage_shapes(model, 2),
    )


# What is applied.


def went_apart(
    averaging: AveragingConfig, replicas: int, seed: int
) -> tuple[Fragment, list[dict[str, Any]], list[Outer]]:
    """A fragment of a data stage, parameters of its replicas, and where they have begun."""
    stage, _ = stages_like(3, seed)
    random = np.random.default_rng(seed + 1)
    parameters = [
        jax.tree.map(
            lambda leaf: leaf + jnp.asarray(0.1 * random.normal(size=leaf.shape), jnp.float32),
            stage,
        )
        for _ in range(replicas)
    ]
    fragment = fragments_of(averaging, 3)[seed % averaging.fragments]
    return fragment, parameters, [begin(stage) for _ in range(replicas)]


# The seed says which fragment: the first one has the embedding, the last one has norm and head.
@pytest.mark.parametrize(("seed", "delay"), [(0, 0), (0, 1), (2, 1)])
def test_steps_after_the_sending_stay(seed: int, delay: int):
    averaging = AveragingConfig("outer", 3, 3, delay, "int8")
    fragment, parameters, outers = went_apart(averaging, 2, seed)
    given_to = [fragment.send(*own) for own in zip(parameters, outers, strict=True)]
    messages = {replica: message for replica, (message, _, _) in enumerate(given_to)}
    _, part, outer = given_to[0]
    before = by_name(copied(fragment.part(parameters[0])))
    # The next step writes over the parameters: what was sent is a copy.
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1.0, tree), donate_argnums=0)
    stepped = step(parameters[0])
    assert_same_bits(by_name(copied(part)), before)
    taken, outer = fragment.apply(stepped, outer, part, messages)
    # Written over once more, what was made of them stays whole.
    anchor = by_name(copied(outer.anchor))
    found = by_name(fragment.part(copied(taken)))
    step(taken)
    assert_same_bits(by_name(outer.anchor), anchor)
    for name, leaf in by_name(fragment.part(outer.anchor)).items():
        np.testing.assert_allclose(found[name], leaf + delay, rtol=0, atol=1e-5)
