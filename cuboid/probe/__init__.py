"""What this machine, or these hosts, really do, as a hardware profile that the planner takes for a cluster."""
