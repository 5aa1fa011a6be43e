"""A heap of events, the earliest first and of equal ones the lowest microbatch, compiled."""

from __future__ import annotations

from skippipe_sched.search.compiled import compiled


@compiled
def push(event_s, event_of, size, time_s, microbatch):
    """Add an event to a heap of `size` events."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if event_s[parent] < time_s or (
            event_s[parent] == time_s and event_of[parent] < microbatch
        ):
            break
        event_s[i] = event_s[parent]
        event_of[i] = event_of[parent]
        i = parent
    event_s[i] = time_s
    event_of[i] = microbatch


@compiled
def pop(event_s, event_of, size):
    """Take the first event away."""
    last = size - 1
    time_s, microbatch = event_s[last], event_of[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            event_s[right] < event_s[child]
            or (event_s[right] == event_s[child] and event_of[right] < event_of[child])
        ):
            child = right
        if time_s < event_s[child] or (time_s == event_s[child] and microbatch < event_of[child]):
            break
        event_s[i] = event_s[child]
        event_of[i] = event_of[child]
        i = child
    event_s[i] = time_s
    event_of[i] = microbatch
