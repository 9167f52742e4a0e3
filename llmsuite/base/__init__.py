"""Errors, files, locks, progress, threads, caches, web assets and hubs: no knowledge of training."""
