"""Job files for Slurm, Kubernetes and SkyPilot: one supervisor a node, each starting that node's ranks."""
