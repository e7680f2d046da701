"""A decoder-only transformer written for one device. Nothing here knows about parallelism."""
