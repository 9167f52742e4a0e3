"""Collectives over Gloo that Paddle's CPU wheel lacks."""

GLOO_TIMEOUT = "LLMSUITE_GLOO_TIMEOUT_S"
"""Environment variable: seconds that a rank waits for the others in a collective call. `front.cc` reads it too."""
