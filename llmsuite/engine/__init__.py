"""A run and its steps: the trainer, the step, sources of samples, saving and resume."""
