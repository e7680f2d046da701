"""Checks of a running training, sampled every few steps: the words of `cuboid verify`, at a small part of its cost."""
