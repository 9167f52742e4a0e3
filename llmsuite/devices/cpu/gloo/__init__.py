"""What Paddle's CPU wheel lacks for several processes over Gloo."""

GLOO_TIMEOUT = "LLMSUITE_GLOO_TIMEOUT_S"
"""Variable: seconds that a rank waits for the others in a call. `front.cc` reads it too."""
