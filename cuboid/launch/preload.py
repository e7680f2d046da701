"""What the fork server imports once for all rank processes."""

import atexit
import gc
import os
import signal

# A collection would look again and again at what stays; it took a sixth of the import's time.
gc.disable()
# Ctrl-C reaches the fork server too, which ends with the command; without this it would tell where its imports stood.
signal.signal(signal.SIGINT, signal.SIG_IGN)

import cuboid.launch.rank  # noqa: E402
import cuboid.verification.compare  # noqa: E402, F401

# The server has nothing to put in order when its command ends, and taking torch apart costs most of a second.
atexit.register(os._exit, 0)
# What is here now stays: a collection in a rank need not look at it, nor copy its pages by doing so.
gc.freeze()
gc.enable()
