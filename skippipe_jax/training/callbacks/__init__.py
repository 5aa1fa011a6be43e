"""What follows a run while it trains: metrics, trackers, progress, pictures, and users' own."""
