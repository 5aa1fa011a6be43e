"""Why a generation ends, for readers."""

from __future__ import annotations

from collections.abc import Collection

from skippipe_jax.consensus.generations import Generation


def cause(
    last: Generation,
    following: Generation,
    new: Collection[int],
    cut_off: Collection[int],
    going: Collection[int],
    without_text: Collection[int] = (),
) -> str:
    """Describe why the last generation ends: who is lost or leaves, and who comes back.

    `cut_off` are members that do not hear others, `going` those that were told to leave, and those
    `without_text` would have had to read it.
    """

    def how(host: int) -> str:
        if host in going:
            return "was told to leave"
        return "was cut off from others" if host in cut_off else "was lost"

    gone = [host for host in last.members if host not in following.members]
    causes = [f"host {host} {how(host)}" for host in gone]
    causes += [
        f"host {host} {'joined' if host in following.apart else 'came back'}"
        for host in sorted(new)
    ]
    causes += [f"host {host} has not the text of the run" for host in sorted(without_text)]
    if causes:
        return ", ".join(causes)
    if going:
        leaving = ", ".join(f"host {host}" for host in sorted(going))
        return f"others take over what {leaving} alone holds, as it was told to leave"
    is_replanned = following.plan != last.plan and following.plan
    return "a quicker plan was found" if is_replanned else "a host was thought to be lost"
