"""Choosing a layout: which layers each pipeline stage holds, and which layout is best. No torch."""
