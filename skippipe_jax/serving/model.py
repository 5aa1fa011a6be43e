"""A model made ready to be served: its caches, its programs, and what requests may ask of it."""

from __future__ import annotations

import datetime

import jax
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig
from skippipe_jax.data.chat import end_of_turn, learns_answers
from skippipe_jax.inference.decoding import PREFILL_TOKENS, Generator
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.serving.service import Served


def open_engine(
    name: str, model: StagedModel, data: DataConfig, slots: int, length: int | None
) -> tuple[Served, Generator]:
    """Make room for so many sequences of `length` tokens, and compile all that they may need.

    By default a sequence may be as long as the model's context.

    Raises:
        InputError: if it may not be so long, or there is too little memory.
    """
    context = model.context
    if length is not None and fields.integer(length, "--max-model-len", 2) > context:
        problem = f"the model's context is {context} tokens"
        raise InputError("--max-model-len", length, problem, "Write that or less")
    length = context if length is None else length
    _require_memory(model, slots, length)
    tokenizer, today = model.tokenizer, data.today or datetime.date.today().isoformat()
    turn_end = end_of_turn(tokenizer, today)
    served = Served(
        name,
        tokenizer,
        length,
        model.stages,
        model.config.vocabulary_size,
        None if turn_end is None else turn_end[1],
        learns_answers(data) or tokenizer.chat_template is not None,
        today,
    )
    decoder = model.decoder(slots, length)
    decoder.warm_up()
    engine = Generator(decoder, PREFILL_TOKENS)
    engine.warm_up()
    return served, engine


def _require_memory(model: StagedModel, slots: int, length: int) -> None:
    """Refuse caches that do not fit beside the weights, which are there already."""
    config = model.config
    of_token = 2 * config.layers * config.kv_heads * config.head_width
    needed = of_token * jax.numpy.dtype(config.compute_dtype).itemsize * slots * length
    available = available_bytes(jax.local_devices()[0], 1, 1)
    if needed > available:
        problem = f"the caches of {slots} sequences of {length} tokens take {needed / 1e9:,.1f} "
        problem += f"GB, and {available / 1e9:,.1f} GB are free"
        raise InputError("--max-num-seqs", slots, problem, "Lower it, or --max-model-len")
