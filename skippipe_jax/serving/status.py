"""Status of a service's hosts, requested over HTTP and shown as a table."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config.api_keys import header_with

ANSWER_S = 10.0
COLUMNS = ("host", "stages", "groups", "block, ms", "round trip, ms", "MB/s", "name")


def ask(url: str, key_file: Path | None) -> dict[str, Any]:
    """Request the status of the service at a URL, with the key in the first line of a file.

    Raises:
        InputError: if it rejects the key, or is not a service of skippipe.
        TemporaryError: if nothing answers.
    """
    headers = header_with(key_file)
    path = f"{url.removesuffix('/').removesuffix('/v1')}/status"
    try:
        request = urllib.request.Request(path, headers=headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            status = json.load(answer)
        service_status_text(status)  # Raises if the answer is not from a service of skippipe.
        return status
    except urllib.error.HTTPError as error:
        problem = f"the service answered with status {error.code}"
        remedy = "Give a key of the service by --api-key-file" if error.code == 401 else None
        raise _no_service(url, problem, remedy) from error
    except (OSError, http.client.HTTPException) as error:
        remedy = "Start the service, or write the address that skippipe serve prints"
        raise TemporaryError(
            "ADDRESS", url, f"no service answers at this address ({error})", remedy
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _no_service(url, "is not a SkipPipe service", None) from error


def _no_service(url: str, problem: str, remedy: str | None) -> InputError:
    remedy = remedy or "Write the address that skippipe serve prints"
    return InputError("ADDRESS", url, problem, remedy)


def service_status_text(status: dict[str, Any]) -> str:
    """Return the status of a service as text."""
    held = {stage for host in status["hosts"] for stage in host["stages"]}
    lost = [str(stage) for stage in range(status["stages"]) if stage not in held]
    head = f"{status['model']}: {status['running']} of {status['slots']} slots in use, "
    head += f"{status['waiting']} sequences waiting"
    if lost:
        head += f"; no host holds stages {', '.join(lost)}"
    rows: list[tuple[str, ...]] = [COLUMNS]
    for host in status["hosts"]:
        loading = [f"({stage})" for stage in host.get("loading", ())]
        units = {"seconds_per_block": 1e3, "round_trip_s": 1e3, "bytes_per_s": 1e-6}
        measured = [(host.get(key), unit) for key, unit in units.items()]
        rows.append(
            (
                str(host["host"]),
                " ".join([*map(str, host["stages"]), *loading]),
                str(host.get("groups", "-")),
                *("-" if value is None else f"{unit * value:.1f}" for value, unit in measured),
                host["name"],
            )
        )
    return f"{head}\n{aligned(rows, (0, 1, 6))}"
