"""Distributed inference: text from a model, and how likely it finds text, on any layout."""
