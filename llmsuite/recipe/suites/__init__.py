"""Recipes from the files of other suites: one engine, and a table for each suite."""
