"""Types of options of commands that `jsonargparse.typing` does not have."""

from __future__ import annotations

from typing import Any

from jsonargparse.typing import restricted_number_type

Port: Any = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])
"""Number of a port."""
