"""The layout applied to the model: process groups, ZeRO, tensor, context, expert and pipeline parallelism."""
