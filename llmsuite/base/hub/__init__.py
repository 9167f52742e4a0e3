"""Models and data sets on a hub: resolving their names, fetching them once, pinning commits, pushing."""
