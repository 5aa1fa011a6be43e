"""Who is here: addresses, the hub that connects hosts, and what hosts tell each other."""
