"""Elastic training, which continues when hosts are lost or join.

The loss of a host, step by step:

    connections/mesh          detects it; cluster/membership passes it to consensus/control
    consensus/decisions       the members decide on the next generation (Paxos)
    cluster/inbox             enters it: every wait of the old generation raises GenerationEnded
    training/trainer          `_advance` catches that, and calls `runner.next_session`
    coordinator               decides what this host does, and with which state it continues
    runner                    closes the session, exchanges reports, opens one for the new group
    membership_change         plans and programs for the present hosts; `extra_hosts` has more nodes
    lost_stages               how stages that no host holds are rebuilt

Generation: the decision. Group: its communicator. RunSetup: the agreement of its hosts. Session:
its training.
"""
