"""The server of a model: what `llmsuite serve` runs."""

API_KEY = "LLMSUITE_API_KEY"
"""Variable with the key that clients have to name."""
