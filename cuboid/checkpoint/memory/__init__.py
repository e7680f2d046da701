"""States kept in the memory of nodes: a lost process or node costs steps, not minutes."""
