"""Models and data sets that have a name on a hub: found, fetched once, pinned, pushed."""
