"""What a rank says of itself while it runs: its heartbeat, what it communicated, names in a profiler's trace."""
