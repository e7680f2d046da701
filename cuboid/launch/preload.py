"""What the fork server imports once for all rank processes."""

import cuboid.train.trainer
import cuboid.verify.compare  # noqa: F401
