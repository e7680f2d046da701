"""Keeps a training going: restarts, the log of failures, and a stop that can be resumed from."""
