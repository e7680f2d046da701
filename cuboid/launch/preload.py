"""What the fork server imports once for all rank processes."""

import torch

import cuboid.train.trainer
import cuboid.verify.compare  # noqa: F401

# The first optimizer of a process imports another thousand modules; and no thread is started by making one.
torch.optim.AdamW([torch.zeros(1)])
