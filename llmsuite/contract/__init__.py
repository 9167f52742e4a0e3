"""Contract between the suite, its recipes and its plugins: sections, specs, hooks, the registry. Imports no Paddle."""
