"""An emulated network takes as long as the simulator says."""

from hypothesis import given, settings

from skippipe_jax.config import NetworkConfig
from skippipe_jax.runtime.emulation import Emulation
from tests.sched.examples import planned, routed_cases


@given(routed_cases())
@settings(max_examples=40)
def test_hops_and_rings_end_when_the_simulator_says(example):
    """Activations and gradients, which may differ in bytes, as they become ready."""
    plan, timeline = planned(*example)
    emulation = Emulation(plan, NetworkConfig(mode="emulate"), seed=0)
    for transfer in sorted(timeline.transfers, key=lambda transfer: transfer.ready_s):
        end_s = emulation.hop_end_s(transfer.source, transfer.operation, transfer.ready_s)
        assert end_s == transfer.end_s
    ends = {run.operation: run.end_s for run in timeline.runs}
    for averaging in timeline.averagings:
        nodes = plan.stages[averaging.stage]
        end_s = max((end_s for own, end_s in ends.items() if own.node in nodes), default=0.0)
        assert emulation.averaging_end_s(averaging.stage, end_s) == averaging.end_s
