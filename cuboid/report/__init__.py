"""Pages, traces and comparisons of plans and of runs, without torch."""
