"""The layout applied to the model: one file per dimension, and apply.py, the recipe in order."""
