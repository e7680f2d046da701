"""Pipeline schedules as plain data: who runs which forward or backward of which micro-batch, and in what order."""
