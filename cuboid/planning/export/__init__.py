"""Plans for other engines: one file per target, each pinned to a version, each refusing what it cannot say."""
