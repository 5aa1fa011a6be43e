"""How long a plan takes: the event simulation, averaging, jitter, and a bound that no plan
beats."""
