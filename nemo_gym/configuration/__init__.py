"""How files, overrides and the environment become one checked configuration; `global_config` is the way in."""
