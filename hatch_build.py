"""Build hook: records the commit of the checkout in the package, for `llmsuite --version`."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds the file `llmsuite/_bundled/commit` to what is built. An sdist has the file, and passes it on to the wheels
    that are built from it; without git there is none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit into a temporary file, and add the file; an editable installation asks git itself."""
        self.temporary = tempfile.TemporaryDirectory()
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        try:
            asked = subprocess.run(
                ["git", "rev-parse", "--short=8", "HEAD"], cwd=self.root, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return
        path = Path(self.temporary.name) / "commit"
        path.write_text(asked.stdout, encoding="utf-8")
        build_data["force_include"][str(path)] = "llmsuite/_bundled/commit"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary file."""
        self.temporary.cleanup()
