"""Models and accelerators by name; the numbers stand in the TOML files beside this one."""
