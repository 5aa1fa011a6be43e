"""Training that goes on when hosts are lost or join.

A lost host, from beginning to end:

    connections/mesh      notices it, and cluster/attendance passes it to consensus/control
    consensus/decisions   the members decide on the next generation (Paxos)
    cluster/succession    enters it: every wait of the old generation raises GenerationEnded
    training/trainer      `_advance` catches that, and calls `runner.next_session`
    coordinator           decides what this host does, and with which state it goes on
    runner                closes the session, exchanges reports, opens one for the new team
    regroup, places       plans and programs for the hosts that are present
    lost_stages           how stages that no host holds are made anew

Generation: the decision. Team: its communicator. RunSetup: what its hosts agreed on. Session: its
training.
"""
