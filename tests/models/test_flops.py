"""Model FLOPs, and the peaks that they are compared with."""

from __future__ import annotations

import psutil
import pytest

from skippipe_jax.config import ModelConfig
from skippipe_jax.models.flops import iteration_flops
from skippipe_jax.profiling.devices import peak_flops_per_second, peak_process_bytes
from tests.sched.examples import plan_of

BATCH, TIME = 3, 10


@pytest.mark.parametrize("tied_head", [False, True])
def test_of_each_microbatch_the_stages_that_it_visits(tied_head: bool):
    model = ModelConfig(
        vocabulary_size=11,
        width=8,
        layers=6,
        stage_layers=(1, 2, 3),
        heads=4,
        kv_heads=2,
        ffn_width=12,
        tied_head=tied_head,
    )
    # Query and output, key and value of half the heads, and the three of SwiGLU.
    block = 6 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12) + 12 * 8 * TIME
    head = 6 * 8 * 11
    # Every path begins in stage 0; then one visits both other stages, and one the last alone.
    plan = plan_of([[0], [1], [2, 3]], [[0, 1, 2], [0, 3]])
    expected = BATCH * TIME * (2 * (block + head) + 2 * block + 2 * 3 * block)
    assert iteration_flops(model, plan, BATCH, TIME) == expected


def test_peaks_of_all_devices_add_up_where_all_are_known():
    both = peak_flops_per_second(["NVIDIA H200", "TPU v4"])
    assert both == 989e12 + 275e12
    assert peak_flops_per_second(["NVIDIA H200", "cpu"]) is None
    # A laptop's is another.
    assert peak_flops_per_second(["NVIDIA GeForce RTX 4090 Laptop GPU"]) is None


def test_peak_of_a_process_is_in_bytes():
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_process_bytes() < 100 * now
