"""What benchmarks share: their command line and report, processes of hosts, turns and panels."""
