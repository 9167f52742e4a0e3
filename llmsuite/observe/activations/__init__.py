"""Activations and gradients of two runs or models: recorded, merged over ranks, and compared module by module."""
