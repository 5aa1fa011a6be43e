"""Asks the hosts of a run, from a machine that is none of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import PROTOCOL, refusal_in
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import SENT_NONSENSE, WANTS_SECRET, Link, open_link
from skippipe_jax.connections.waiting import why_unreachable

T = TypeVar("T")

GIVE_ANOTHER = "Give an address at which a host of the run listens: its membership.jsonl has them"

GIVE_SECRET = (
    "Name a file with the secret of the run by --set cluster.secret=FILE; or, if the run has none "
    "and nobody else is in this network, write --set cluster.insecure=true"
)


class NobodyListens(TemporaryError):
    """At none of the addresses anything listens, as the machines there say themselves."""


async def first_answer(
    addresses: Sequence[str], ask: Callable[[str], Awaitable[T]]
) -> tuple[str, T]:
    """Ask at one address after another; return the first at which a host answers, and its answer.

    Raises:
        InputError: if a host refuses this machine for good.
        NobodyListens: if the machines at all of these addresses refuse a connection.
        TemporaryError: if none answers.
    """
    errors: list[TemporaryError] = []
    for address in dict.fromkeys(addresses):
        try:
            return address, await ask(address)
        except TemporaryError as error:
            errors.append(error)
    raise next((error for error in errors if not isinstance(error, NobodyListens)), errors[0])


@asynccontextmanager
async def asking(
    field: str,
    address: str,
    keys: Keys,
    question: tuple[str, Mapping[str, str]],
    answer: tuple[str, Callable[[Any], T]],
    timeout_s: float,
) -> AsyncIterator[tuple[Link, T]]:
    """Connect to a host, and yield the connection with what the host answers.

    The `question` is the kind of this machine and its versions, the `answer` its kind and what
    reads its content. Errors have the field `field`.

    Raises:
        InputError: if the host refuses this machine for good.
        NobodyListens: if the machine there refuses the connection.
        TemporaryError: if no host answers within `timeout_s`, or what comes is not what was told.
    """

    def unanswered(why: str) -> TemporaryError:
        return TemporaryError(
            field, address, f"no host of a run answers there ({why})", GIVE_ANOTHER
        )

    try:
        link = await open_link(parse_address("ADDRESS", address), keys=keys)
    except ConnectionRefusedError as error:
        problem = "nobody listens there: the connection was refused"
        raise NobodyListens(field, address, problem, GIVE_ANOTHER) from error
    except OSError as error:
        raise unanswered(why_unreachable(error)) from error
    except InputError as error:
        raise _with_own_remedy(error, keys) from error
    (who, versions), (kind, read) = question, answer
    try:
        link.send(who, PROTOCOL, dict(versions))
        said = await heard(link, timeout_s)
        if (refusal := refusal_in(said)) is not None:
            raise refusal
        match said:
            case [found, content] if found == kind:
                yield link, read(content)
            case None if link.ending == WANTS_SECRET:
                error = keys.is_one_sided(parse_address("ADDRESS", address))
                raise _with_own_remedy(error, keys)
            case _:
                raise ValueError(link.ending if said is None else SENT_NONSENSE)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise unanswered(str(error)) from error
    finally:
        link.writer.close()


def _with_own_remedy(error: InputError, keys: Keys) -> InputError:
    """Return an error of a machine without a secret with what its user does about that."""
    if keys.has_secret:
        return error
    return InputError(error.field, error.value, error.problem, GIVE_SECRET)


async def heard(link: Link, timeout_s: float) -> Any:
    """Read the next message; None once the connection has ended, or if none comes in time."""
    try:
        return await asyncio.wait_for(link.receive(), timeout_s)
    except TimeoutError:
        link.ending = f"nothing came for {timeout_s:g} s"
        return None
