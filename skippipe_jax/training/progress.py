"""What a run shows while it trains: a progress bar, what it says above it, and how it compiles."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.monitoring
from tqdm import tqdm

from skippipe_jax.config import Config
from skippipe_jax.training.callback import Callback

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer

# Where there is no terminal to draw a bar on, a line is written this often.
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Compilations:
    """Programs that XLA has compiled, or loaded from its cache, and how long that took."""

    count: int = 0
    seconds: float = 0.0


class CompilationCounter:
    """Counts the programs that XLA compiles, or loads from its cache, in this process.

    Where that takes long, `say` is told now and then how far it is.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, say: Callable[[str], None] = print):
        """Start at zero; counting begins on entering."""
        self.compilations = Compilations()
        self.say = say
        self.said_s = time.perf_counter()

    def take(self) -> Compilations:
        """Those since the last call."""
        taken, self.compilations = self.compilations, Compilations()
        return taken

    def __enter__(self) -> CompilationCounter:
        """Begin to count."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == self.EVENT:
            before = self.compilations
            now = Compilations(before.count + 1, before.seconds + duration_secs)
            self.compilations = now
            if time.perf_counter() - self.said_s > SECONDS_BETWEEN_LINES:
                self.said_s = time.perf_counter()
                self.say(f"compiling: {now.count} programs so far, {now.seconds:.0f} s")


class ProgressBar(Callback):
    """Shows how far the run is, and says what is worth a line."""

    def __init__(self, config: Config, step: int, skipped_updates: int):
        """Begin after `step`, before which so many updates have been skipped."""
        self.config = config
        self.skipped_updates = skipped_updates
        self.last_line_s = -math.inf
        # None: no bar where stderr is no terminal.
        self.bar = tqdm(total=config.train.steps, initial=step, unit="iteration", disable=None)

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Move on by one iteration."""
        if metrics["skipped_updates"] > self.skipped_updates:
            self.skipped_updates = metrics["skipped_updates"]
            why = "none of its tokens is a target"
            if metrics["tokens"]:
                why = (
                    f"its gradient norm is not within optimizer.skip_above_norm = "
                    f"{self.config.optimizer.skip_above_norm:g} but "
                    f"{metrics['gradient_norm'] or 'no finite number'}"
                )
            self._say(
                f"step {metrics['step']}: update skipped, {why} "
                f"({self.skipped_updates} skipped so far)"
            )
        if metrics["validation_loss"] is not None:
            self._say(f"step {metrics['step']}: held-out loss {metrics['validation_loss']:.4f}")
        self._show(metrics, trainer.membership.count)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()

    def _say(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.write(text, file=sys.stderr)

    def _show(self, line: Mapping[str, Any], hosts: int) -> None:
        emulated = " on an emulated network" if line["network"] == "emulate" else ""
        speed = f"{line['tokens_per_second']:,.0f} tokens/s{emulated}"
        if (line["generation"] or 1) > 1:
            of = max(hosts, line["hosts"])
            speed += f", {line['hosts']} of {of} hosts, generation {line['generation']}"
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
        self.bar.set_postfix_str(f"loss {loss}, {speed}", refresh=False)
        self.bar.update()
        is_last = line["step"] == self.config.train.steps
        if self.bar.disable and (
            is_last or time.perf_counter() - self.last_line_s > SECONDS_BETWEEN_LINES
        ):
            self.last_line_s = time.perf_counter()
            left_s = (self.config.train.steps - line["step"]) * line["seconds_per_iteration"]
            # How long the others take is not known while programs are compiled.
            left = "programs compiled" if line["compilations"] else f"{left_s:.0f} s left"
            print(
                f"step {line['step']}/{self.config.train.steps}  loss {loss}  {speed}  {left}",
                file=sys.stderr,
                flush=True,
            )
