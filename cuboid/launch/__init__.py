"""Starting rank processes: a pool for short jobs on this machine, PyTorch's elastic launcher for trainings."""
