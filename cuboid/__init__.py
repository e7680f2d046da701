"""Cuboid plans and trains language models with data × tensor × pipeline parallelism."""

__version__ = "0.1.0"
