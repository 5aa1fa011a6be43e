"""Preparation of a model for serving: caches, compiled programs and limits of requests."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import jax
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax import log
from skippipe_jax.config import DataConfig
from skippipe_jax.data.chat import end_of_turn, trains_on_answers
from skippipe_jax.inference.decoding import PREFILL_TOKENS, Generator, StageExecutor
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.branch_scales import ScaleTable
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.serving.hosts import StageHosts
from skippipe_jax.serving.local_stages import Slots
from skippipe_jax.serving.routed import RoutedExecutor
from skippipe_jax.serving.service import Served


def open_engine(
    name: str,
    model: StagedModel,
    data: DataConfig,
    slots: int,
    length: int | None,
    scales: ScaleTable | None = None,
) -> tuple[Served, Generator]:
    """Allocate caches for `slots` sequences of `length` tokens and compile all programs.

    By default a sequence may be as long as the model's context.

    Raises:
        InputError: if `length` exceeds the context, or there is too little memory.
    """
    length = length_of(model.context, length)
    _require_memory(Slots(1, slots, length).cache_bytes(model.config, model.config.layers), slots)
    return _served(name, model, data, length), _engines([model.decoder(slots, length, scales)])[0]


def open_groups(
    name: str, source: ModelSource, hosts: StageHosts
) -> tuple[Served, list[Generator]]:
    """Create a generator for each group; other hosts run the stages that the front lacks."""
    model, slots = source.model(hosts.own_stages), hosts.slots
    decoders = [RoutedExecutor(model, hosts, group) for group in range(slots.groups)]
    return _served(name, model, source.config.data, slots.length), _engines(decoders)


def length_of(context: int, requested: int | None) -> int:
    """Return the largest number of tokens of a sequence.

    Raises:
        InputError: if `requested` exceeds the context of the model.
    """
    if requested is not None and fields.integer(requested, "--max-model-len", 2) > context:
        problem = f"exceeds the model's context of {context} tokens"
        raise InputError("--max-model-len", requested, problem, "Lower it")
    return context if requested is None else requested


def _engines(decoders: Sequence[StageExecutor]) -> list[Generator]:
    log.info("compiling the programs of the service, which takes up to minutes the first time")
    engines = [Generator(decoder, PREFILL_TOKENS) for decoder in decoders]
    for decoder, engine in zip(decoders, engines, strict=True):
        decoder.warm_up()
        engine.warm_up()
    return engines


def _served(name: str, model: StagedModel, data: DataConfig, length: int) -> Served:
    tokenizer, today = model.tokenizer, data.today or datetime.date.today().isoformat()
    turn_end = end_of_turn(tokenizer, today)
    return Served(
        name,
        tokenizer,
        length,
        model.stages,
        model.config.vocabulary_size,
        None if turn_end is None else turn_end[1],
        trains_on_answers(data) or tokenizer.chat_template is not None,
        today,
    )


def _require_memory(needed: int, sequences: int) -> None:
    """Refuse caches that do not fit; the weights already take their memory."""
    available = available_bytes(jax.local_devices()[0], 1, 1)
    if needed > available:
        problem = f"the caches of {sequences} sequences take {needed / 1e9:,.1f} GB, and "
        problem += f"{available / 1e9:,.1f} GB are free"
        raise InputError("--max-num-seqs", sequences, problem, "Lower it, or --max-model-len")
