"""How parameters are updated."""
