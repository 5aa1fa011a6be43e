"""Lets a fault happen to a run, and all hosts come back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.churn import records
from experiments.benchmarks.churn.faults import (
    ASK,
    BEFORE,
    FETCH,
    RESET,
    SEVER,
    SIGNALS,
    STORAGE,
    STORAGE_S,
    Fault,
    aim_of,
    links_between,
)
from experiments.benchmarks.churn.hosts import ASKED_TO_STOP, JOIN, Hosts

STOP_S = 5.0
# A link that nobody has missed by then is joined again.
CUT_TIMEOUTS, CUT_MORE_S = 2.0, 30.0


class Strike:
    """A fault as it happens.

    Attributes:
        struck: the host that it is aimed at; in a network those that are cut off with it, or the
            far end of its link.
        second: the host that is killed besides, if any.
        came_by: how hosts that were lost came back, in order: `resume` or `join`.
    """

    def __init__(self, hosts: Hosts, fault: Fault, heartbeat_timeout_s: float):
        """Nothing has happened yet."""
        self._hosts, self._fault = hosts, fault
        self._heartbeat_timeout_s = heartbeat_timeout_s
        before = hosts.generation()
        self._leader, self._generation = before["leader"], before["generation"]
        self.struck = fault.struck(self._leader, range(hosts.count), hosts.can_spare)
        self.second: int | None = None
        self.came_by: list[str] = []

    def happen(self) -> dict[str, Any]:
        """Strike, and wait until all are back; how it went."""
        hosts, fault, first = self._hosts, self._fault, self.struck[0]
        act = fault.kind if fault.kind in (RESET, SEVER, STORAGE) else SIGNALS.get(fault.kind)
        self._aim(first, fault.phase, fault.edge, act)
        lost = [first] if fault.kind in ("kill", "leave", "newcomer", "giver") else []
        note = self._struck(first, fault.phase, lost)
        at_s, step = note["at"], note["step"]
        self._let_happen(at_s, note["ports"])
        aim_of(hosts.folder, first).with_suffix(".struck").unlink(missing_ok=True)
        healed_s = time.time()
        hosts.wait("all hosts are back and make steps", lambda: hosts.are_all_in(healed_s))
        result = {
            "number": fault.number,
            "kind": fault.kind,
            "phase": fault.phase,
            "edge": fault.edge,
            "struck": list(self.struck),
            "second": self.second,
            "came_by": self.came_by,
            "hit_leader": self._leader in self.struck,
            "step": step,
            "generation": self._generation,
        }
        result |= records.recovery(hosts.notes, at_s, self._generation)
        return result | {"all_back_s": round(time.time() - at_s, 3)}

    def _let_happen(self, at_s: float, ports: dict[str, list[int]]) -> None:
        """From when a host is struck until who was lost is started again.

        `ports` are those of the connections that it had then, at both ends, by the other host.
        """
        hosts, fault, first = self._hosts, self._fault, self.struck[0]
        lost = [first]
        match fault.kind:
            case "kill" | "leave" | "newcomer" | "giver":
                code = hosts.wait_for_end(first)
                if fault.kind == "leave" and code != ASKED_TO_STOP:
                    hosts.failures.append(f"host {first} got SIGTERM and exited with code {code}")
                self._go_on(at_s, lost)
                self._come_back(first)
                if fault.kind == "newcomer":
                    self._strike_newcomer("SIGKILL", lost)
                    hosts.wait_for_end(first)
                    self._come_back(first)
                elif fault.kind == "giver":
                    self._kill_giver(lost)
            case "hang":
                self._go_on(at_s, lost)
                hosts.signal(first, signal.SIGKILL)
                hosts.wait_for_end(first)
                self._come_back(first)
            case "stop":
                hosts.rest(at_s + STOP_S)
                hosts.signal(first, signal.SIGCONT)
            case "reset" | "sever":
                pass
            case "storage":
                hosts.rest(at_s + STORAGE_S)
            case "silent":
                self._silence(ports)
                hosts.rest(at_s + CUT_TIMEOUTS * self._heartbeat_timeout_s)
            case _:
                self._cut(at_s, lost)

    def _kill_giver(self, lost: list[int]) -> None:
        """Kill a second host while another joins in the place of the first."""
        hosts, fault, first = self._hosts, self._fault, self.struck[0]
        self._strike_newcomer(None, lost)
        last = hosts.generation()
        holders = hosts.serves_with(first) if fault.hits_holder else []
        choices = [*holders, last["leader"], *fault.order]
        can_be = [host for host in choices if host in fault.order and host != first]
        self.second = next((host for host in can_be if hosts.can_spare((first, host))), None)
        if self.second is None:
            return
        at_s = time.time()
        hosts.signal(self.second, signal.SIGKILL)
        aim_of(hosts.folder, first).with_suffix(".struck").unlink()
        hosts.wait_for_end(self.second)
        lost = [self.second]
        what = "the others continue without a second host"
        hosts.wait(what, lambda: hosts.has_counted(at_s, last["generation"]), lost)
        # It does not join: the place of the first may be free still.
        self.came_by.append(hosts.start_again(self.second))

    def _strike_newcomer(self, signal_name: str | None, lost: Sequence[int]) -> None:
        """Aim at who has just been started in the place of the first host, and wait for it."""
        phase, edge = self._fault.joining
        if phase == FETCH and self.came_by[-1] != JOIN:
            phase, edge = ASK, BEFORE  # There is nothing to fetch.
        self._aim(self.struck[0], phase, edge, signal_name)
        self._struck(self.struck[0], phase, lost)

    def _cut(self, at_s: float, lost: list[int]) -> None:
        hosts, first, kind = self._hosts, self.struck[0], self._fault.kind
        assert hosts.network is not None, "links can be cut"
        links = links_between(self.struck, kind, hosts.count)
        hosts.network.set_paths(links, up=False)
        aim_of(hosts.folder, first).with_suffix(".struck").unlink()
        until_s = time.time() + CUT_TIMEOUTS * self._heartbeat_timeout_s + CUT_MORE_S

        def is_over() -> bool:
            return time.time() > until_s or hosts.has_counted(at_s, self._generation)

        hosts.wait("a cut is detected", is_over, lost)
        if not hosts.has_counted(at_s, self._generation):
            hosts.failures.append(f"no step was committed during {kind} {[*self.struck]}")
        hosts.network.set_paths(links, up=True)

    def _silence(self, ports: dict[str, list[int]]) -> None:
        """Have both directions of the connection between two hosts lose all."""
        hosts, (first, other) = self._hosts, self.struck
        assert hosts.network is not None, "links can be shaped"
        if str(other) in ports:  # Else there is no connection yet.
            own, there = ports[str(other)]
            hosts.network.silence(first, other, (own, there))
            hosts.network.silence(other, first, (there, own))
        aim_of(hosts.folder, first).with_suffix(".struck").unlink()

    def _go_on(self, at_s: float, lost: Sequence[int]) -> None:
        what = "the others continue without a host"
        self._hosts.wait(what, lambda: self._hosts.has_counted(at_s, self._generation), lost)

    def _come_back(self, host: int) -> None:
        self.came_by.append(self._hosts.start_again(host, self._fault.comes_by_join))

    def _aim(self, host: int, phase: str, edge: str, act: str | None) -> None:
        """Have a host strike itself by a signal or a fault of its own as it comes to a phase.

        Without an act it waits for what happens to it or to others.
        """
        aim = aim_of(self._hosts.folder, host)
        draft = aim.with_suffix(".draft")
        draft.write_text(json.dumps({"phase": phase, "edge": edge, "act": act}))
        draft.rename(aim)
        self._aimed_s = time.time()

    def _struck(self, host: int, phase: str, lost: Sequence[int]) -> dict[str, Any]:
        """What a host has noted as it was struck, once it was."""
        hosts, found = self._hosts, list[dict[str, Any]]()

        def is_struck() -> bool:
            found[:] = [n for n in hosts.noted("struck", self._aimed_s) if n["by"] == host]
            return bool(found)

        hosts.wait(f"host {host} reaches the phase {phase}", is_struck, lost)
        return found[-1]
