"""What the fork server of tests imports once for the ranks of their pools: also the compiler, which recomputation and
torch's own optimizer bring in, two seconds in each of the eight ranks."""

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401

import cuboid.launch.preload  # noqa: E402, F401
