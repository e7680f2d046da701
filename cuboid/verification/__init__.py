"""The proof that a layout changes nothing but speed: a run against one plain process."""
