"""Fused kernels in C++ for training and generation: one pass over memory where Paddle's CPU wheel has several."""
