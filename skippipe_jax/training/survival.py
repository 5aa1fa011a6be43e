"""A run goes on with the hosts that are left of it, and with those that come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import DeadlinePassed
from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.peer_errors import may_stem_from_a_peer
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.runtime.compiled_ahead import compile_ahead
from skippipe_jax.runtime.remaking import NO_REMAINS, Remains
from skippipe_jax.runtime.state import Kept
from skippipe_jax.runtime.topology import spreads_of_host
from skippipe_jax.runtime.transport import IN_A_TEAM_S, Transfers, open_servers
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.layout import Checkpoint, is_committed, open_checkpoint, step_folder
from skippipe_jax.storage.reader import read_data_state
from skippipe_jax.storage.writer import NotCommitted
from skippipe_jax.training.callbacks import KeptLines
from skippipe_jax.training.departure import HasLeft
from skippipe_jax.training.inviting import Inviting
from skippipe_jax.training.left_out import copies_read, steps_saved
from skippipe_jax.training.lost_stages import how_remade
from skippipe_jax.training.measured import Measured, new_nodes
from skippipe_jax.training.messages import say, say_meanwhile
from skippipe_jax.training.places import host_of_places, stages_for
from skippipe_jax.training.recoveries import RecoveriesFile
from skippipe_jax.training.regroup import regrouped, rules_of
from skippipe_jax.training.replanning import FoundPlans, Replanning
from skippipe_jax.training.report import SessionPlan, exchange_reports
from skippipe_jax.training.search_process import Preparing, Standby
from skippipe_jax.training.setup import Settled, go_on, own_report, with_text
from skippipe_jax.training.stretch import Stretch

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer

# So often a host looks whether another is lost.
LOOK_S = 0.1


@dataclass(frozen=True)
class Holding:
    """What a host goes on with, whoever goes on with it.

    Attributes:
        read: the microbatches that have been read.
        kept: the states that it holds, or takes from others; None where a run begins.
        checkpoint: the one that states come from where none are kept.
        remains: what it has besides, to make a stage from that is lost.
    """

    read: int
    kept: Kept | None = None
    checkpoint: Checkpoint | None = None
    remains: Remains = NO_REMAINS


NOTHING = Holding(read=0, kept={})
"""Of a host without which others have gone on."""


class Survival:
    """Opens a stretch of a run after another, each with the hosts that are left then.

    Attributes:
        lines: the last ones of metrics, kept through all stretches.
        recoveries: writes down how the run has come over the loss of a stage.
        plans: those that were searched for.
    """

    def __init__(self, trainer: Trainer, settled: Settled):
        """`settled` is what all hosts of the run have settled."""
        self._trainer = trainer
        self._settled = settled
        self._host_of = host_of_places(trainer.config, settled.host_of)
        self._rules = rules_of(trainer.config, settled)
        self._inviting = Inviting(trainer.folder)
        self.lines = KeptLines(trainer.config.averaging.iterations_apart)
        self.recoveries = RecoveriesFile(trainer.folder)
        self.plans = FoundPlans()
        self._store = partial(run_folder.first_to_write, trainer.folder)
        self._standby = Standby(trainer.config.replan.method)

    def close(self) -> None:
        """Search no more."""
        self._standby.close()

    def come_back(self) -> Stretch:
        """Take part again in a run that lives, of which this host was lost.

        Raises:
            DeadlinePassed: if the others do not take this host in.
        """
        config, membership = self._trainer.config, self._trainer.membership
        _get_ready(config, self._settled, membership.index)
        patience_s, since_s = config.cluster.rejoin_s, time.monotonic()
        team = membership.ask_in(self._rules, self._store, patience_s)
        if team is None:
            raise DeadlinePassed(
                "this host has waited to be taken in by those that go on with the run, in vain; "
                f"cluster.rejoin_s is {patience_s:g}"
            )
        is_in = "is in" if membership.index in team.generation.apart else "is back in"
        say(f"host {membership.index} {is_in} the run, at step {team.generation.step}")
        return self._opened(team, NOTHING, since_s)

    def begin(self, membership: Membership, checkpoint: Checkpoint | None, read: int) -> Stretch:
        """The first stretch, which all hosts of the run open together."""
        step, stages = self._trainer.steps_done, self._settled.plan.stages
        team = membership.outlive(self._rules, self._store, stages, step, saved=step)
        try:
            with _closed_by_an_error(self._settled.transfers):
                serves_data = self._settled.data is not None
                agreed = self._agreed(team, self._settled, Holding(read), serves_data=serves_data)
                settled = replace(self._settled, agreed=agreed)
                self._write(team, settled)
                read = agreed.microbatches_read
                stretch = Stretch(self._trainer, team, settled, read, checkpoint)
                return self._replanned(stretch, team, settled)
        except Exception as error:  # As in `_opened`.
            if not (isinstance(error, TeamEnded) or self._is_of_a_loss(error, team)):
                raise
        holding = Holding(read, checkpoint=checkpoint)
        return self._opened(self._next(team), holding, time.monotonic())

    def going_on(self, act: Callable[[], None], stretch: Stretch) -> Stretch:
        """Act; the stretch that follows where hosts are lost meanwhile, or come back."""
        team = stretch.host
        try:
            act()
        except TeamEnded:
            pass
        except Exception as error:
            if not (isinstance(team, Team) and self._is_of_a_loss(error, team)):
                raise
        else:
            return stretch
        return self._after(stretch)  # What the error holds of the iteration is let go of.

    def _is_of_a_loss(self, error: Exception, team: Team) -> bool:
        """Whether an error came when a host of the team was lost, which may show later."""
        patience_s = 0.0
        if not isinstance(error, DeadlinePassed):
            # Those who went on may have removed a checkpoint that was being written without them.
            if not (isinstance(error, NotCommitted) or may_stem_from_a_peer(error)):
                return False
            # A death shows at once; only a host that hangs takes the whole timeout.
            patience_s = 2 * self._trainer.config.cluster.heartbeat_timeout_s
        until_s = time.monotonic() + patience_s
        while not (team.has_ended or self._trainer.membership.misses(team.hosts)):
            if time.monotonic() > until_s:
                return False
            time.sleep(LOOK_S)
        return True

    def _after(self, stretch: Stretch) -> Stretch:
        """Close a stretch whose hosts are no longer the same, and open the next."""
        since_s, team = time.monotonic(), stretch.host
        assert isinstance(team, Team), "only a team ends"
        try:
            following = self._next(team)
        except HasLeft:
            stretch.leave()
            raise
        # What a host knows that was left out does not count, and may be told by others otherwise.
        self.lines.awaiting = None
        if following.index not in following.fresh:
            stretch.runtime.close()
            with suppress(TeamEnded):  # Of steps that never counted there is nothing to report.
                stretch.report()
            self.lines.awaiting = stretch.awaiting
        holding = Holding(stretch.read, stretch.kept, remains=stretch.remains)
        stretch.leave()
        return self._opened(following, holding, since_s)

    def _opened(self, team: Team, holding: Holding, since_s: float) -> Stretch:
        while True:
            # A team may end before all is open; what it had to go on with the next one has, too.
            holding = self._held(team, holding)
            try:
                return self._open(team, holding, since_s)
            except TeamEnded:
                pass
            except Exception as error:  # What is fetched from a host that dies raises at once.
                if not self._is_of_a_loss(error, team):
                    raise
            team = self._next(team)

    def _next(self, team: Team) -> Team:
        self._trainer.departure.require_stays()
        patience_s = self._trainer.config.cluster.rejoin_s
        following = self._trainer.membership.next_team(team.generation, patience_s)
        if following is None:
            # A checkpoint that the others would have to take part in is waited for no longer.
            self._trainer.membership.give_up()
            raise DeadlinePassed(
                "this host has waited for as many others as it takes to go on, in vain; "
                f"cluster.rejoin_s is {patience_s:g}"
            )
        return following

    def _held(self, team: Team, holding: Holding) -> Holding:
        """What this host has to go on with in a team, with what it held before.

        Raises:
            DeadlinePassed: if the run ends with this team.
        """
        trainer, generation = self._trainer, team.generation
        if generation.is_last:
            raise DeadlinePassed(why_last(generation, trainer.config.recovery.lost_stage))
        is_fresh = team.index in team.fresh
        if not (is_fresh or generation.is_rewound):
            is_apart = trainer.config.averaging.is_outer
            require_same_step(trainer.steps_done, generation.step, is_apart=is_apart)
        if generation.is_rewound and not is_fresh:
            if generation.step == 0 and not is_committed(step_folder(trainer.folder, 0)):
                return Holding(read=0)  # Nothing has been saved yet.
            checkpoint = open_checkpoint(trainer.folder, generation.step)
            read = int(read_data_state(checkpoint)["microbatches"])
            return Holding(read, kept={}, checkpoint=checkpoint)
        return NOTHING if is_fresh else holding

    def _open(self, team: Team, holding: Holding, since_s: float) -> Stretch:
        """The stretch of a team, after the step that it begins with."""
        trainer, generation = self._trainer, team.generation
        if team.index in team.fresh:
            self.recoveries.forget()
        elif generation.lost:
            policy, before = trainer.config.recovery.lost_stage, trainer.steps_done
            saved = steps_saved(trainer.config, generation)
            self.recoveries.begin_one(generation, policy, before, self.lines.last_loss, saved)
        trainer.steps_done = generation.step
        self.lines.forget(after=generation.step)
        team.require_goes_on()  # Nothing is opened for one that has ended.
        serves_data = 0 in self._rules.serves(generation.placement, trainer.membership.index)
        if serves_data:
            self._settled = with_text(trainer.config, self._settled)
        transfers = open_servers(team)
        with _closed_by_an_error(transfers):
            settled = replace(self._settled, transfers=transfers)
            agreed = self._agreed(team, settled, holding, serves_data=serves_data)
            self._require_text(team, agreed)
            transfers.connect(agreed.endpoints)
            found = self.plans.of_team(team, agreed, IN_A_TEAM_S)
            told = {team.hosts[at]: Measured.parse(own) for at, own in agreed.measured.items()}
            new = new_nodes(told, self._host_of, len(self._settled.host_of))
            settled = regrouped(trainer.config, self._settled, team, found, new)
            settled = replace(settled, transfers=transfers, agreed=agreed)
            is_outer, is_fresh = trainer.config.averaging.is_outer, team.index in team.fresh
            if agreed.restores_checkpoint and is_outer and not is_fresh:
                holding = gone_back(holding, trainer.folder, generation.step)
            self._write(team, settled)
            if generation.lost or team.fresh:
                self.recoveries.hear(agreed.recoveries)
            if 0 in team.fresh:  # Whoever leads has no lines of its own.
                self.lines.hear(agreed.metrics_tails)
            if team.index == 0:
                # Not before all have told something: a leader that was stopped wakes when others
                # lead.
                go_on(trainer.config, generation.step)
                self.lines.write_the_missing(trainer.folder)
            copies = copies_read(trainer.config, team)
            remains = Remains(
                (*holding.remains.copies, *copies), agreed.squared_norms, agreed.optimizer_updates
            )
            given = agreed.microbatches_read, holding.checkpoint, holding.kept, remains
            stretch = Stretch(trainer, team, settled, *given)
        stretch.awaiting = self.lines.awaiting
        if team.index == 0:
            of = max(team.count, trainer.membership.count)
            say_meanwhile(
                f"{generation.cause}{how_remade(generation)}: {team.count} of "
                f"{of} hosts go on from step {generation.step}, after "
                f"{time.monotonic() - since_s:.1f} s"
            )
        return self._replanned(stretch, team, settled)

    def _replanned(self, stretch: Stretch, team: Team, settled: Settled) -> Stretch:
        """The stretch, while which the leader looks for a better plan, if it is asked to.

        Other hosts may have to do so later.
        """
        config = self._trainer.config
        # Of several plans each would want another placement.
        is_only = len(settled.schedule.plans) == 1
        # A search knows no stages that are left out.
        moves = not team.generation.left_out
        if config.replan.budget_s and moves and is_only:
            standing, own, host_of = settled.plan, self._settled.plan, self._host_of
            stretch.follow(Preparing(self._standby, standing, team.index))
            if team.index == 0:
                given = standing, own, host_of, self._trainer, self._standby
                stretch.follow(Replanning(config, team, self.plans, *given))
        return stretch

    def _require_text(self, team: Team, agreed: SessionPlan) -> None:
        """Return if all hosts that serve a data node have the text that the run reads.

        Raises:
            TeamEnded: once the hosts go on with others that read it.
            InputError: if this host has not the text, and there is no other stage.
            DeadlinePassed: if the hosts go on with nobody for ``cluster.rejoin_s``.
        """
        if not agreed.without_text:
            return
        if team.index in agreed.without_text:
            config = self._trainer.config
            problem = "this is not the text that the run reads"
            if len(team.generation.placement) == 1:
                remedy = "Give this host the same files as the others have"
                raise InputError("data.source", config.data.source, problem, remedy)
            say(
                f"warning: data.source is {config.data.source}: {problem}. This host serves other "
                "stages, like one without text"
            )
            self._settled = replace(self._settled, data=None, held_out=())
            self._trainer.membership.control.lacks_text()
        self._next(team)
        raise TeamEnded

    def _agreed(
        self, team: Team, settled: Settled, holding: Holding, *, serves_data: bool
    ) -> SessionPlan:
        """What the hosts go on by, from what each of them reports.

        Newcomers are told of the team from now on.
        """
        # By the numbers of the run's own plan, which every generation knows.
        here = self._trainer.membership.index
        nodes = [node for node, host in enumerate(self._host_of) if host == here]
        assert settled.transfers is not None, "the hosts have met"
        report = replace(
            own_report(settled),
            member=team.here() | {"nodes": nodes},
            serves_data=serves_data,
            run_fingerprint=self._inviting.text,
            endpoint=settled.transfers.endpoint,
            microbatches_read=holding.read,
            restores_checkpoint=holding.checkpoint is not None,
            squared_norms=holding.remains.squared_norms,
            optimizer_updates=holding.remains.updates,
            measured=Measured.kept(self._trainer.folder),
            known_plans=self.plans.names,
            recovery=self.recoveries.told(),
            metrics_tail=self.lines.told() if 0 in team.fresh else [],
        )
        agreed = exchange_reports(team, team.generation, report, IN_A_TEAM_S)
        serves = partial(stages_for, self._rules, team.generation)
        self._inviting.entered(team.generation, serves, agreed.data_fingerprint)
        self._trainer.membership.reception.inviting = self._inviting
        return agreed

    def _write(self, team: Team, settled: Settled) -> None:
        """Leave a line in membership.jsonl."""
        if team.index == 0:
            assert settled.agreed is not None, "all hosts have reported"
            run_folder.append_generation(
                self._trainer.folder, team.generation, settled.plan, settled.agreed.members
            )


def gone_back(holding: Holding, folder: Path, step: int) -> Holding:
    """What a host has in its place that goes back to the checkpoint of a step, as others do.

    What it holds is of the same step, but what is on its way is only in one of the two.
    """
    return replace(holding, kept={}, checkpoint=open_checkpoint(folder, step))


def why_last(generation: Generation, lost_stage: str) -> str:
    """Why the run ends with a generation, by what `recovery.lost_stage` asks for."""
    if set(generation.apart) == set(generation.members):
        return (
            f"{generation.cause}, and all hosts that are left have joined the run without its "
            "folder: what they would train nobody could save"
        )
    return (
        f"{generation.cause}, and no replica of a stage is left that could be moved or "
        f"rewound; recovery.lost_stage is {lost_stage}"
    )


def require_same_step(done: int, step: int, *, is_apart: bool = False) -> None:
    """Refuse to go on from a step with what another has left.

    A host whose replicas are apart may have made more steps of its own, and keeps them.

    Raises:
        DeadlinePassed: if so many are `done` here, and the others go on from another `step`.
    """
    if (min(done, step) if is_apart else done) != step:
        raise DeadlinePassed(
            f"this host has the state after step {done}, and the others go on from step {step}: "
            "it has to take theirs"
        )


def _get_ready(config: Config, settled: Settled, here: int) -> None:
    """Compile what this host will run, unless it is given another stage: others would wait."""
    if is_joined(Path(config.run_dir)):  # It was made ready before it came.
        return
    nodes = [node for node, host in enumerate(settled.host_of) if host == here]
    stages = {settled.plan.stage_of[node] for node in nodes}
    own = spreads_of_host(config, settled.plan.case, settled.host_of, here)
    compile_ahead(config, stages, len(settled.plan.stages), own, settled.plan.case)


@contextmanager
def _closed_by_an_error(transfers: Transfers | None) -> Iterator[None]:
    """The transfer servers of a team that ends before it has begun give their ports back."""
    try:
        yield
    except BaseException:
        if transfers is not None:
            transfers.close()
        raise
