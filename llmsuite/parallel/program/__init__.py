"""Whole training steps as programs of Paddle's auto-parallel: `engine.program: step`."""
