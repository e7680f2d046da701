"""Property tests here are quick but may share their cores with real training runs: no deadline for one example."""

from hypothesis import settings

settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")
