"""The vocabulary of Cuboid: models, clusters, layouts and runs as frozen dataclasses. Nothing here imports torch."""
