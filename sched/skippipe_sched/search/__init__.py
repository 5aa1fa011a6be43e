"""What searches share: a budget, annealing, and the timing model compiled."""
