"""Where tokens come from, and in which order: decided by step and position alone, never by the layout."""
