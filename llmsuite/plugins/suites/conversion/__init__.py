"""Shared parts of conversions to recipes: arguments, families of models, reports and refusals."""
