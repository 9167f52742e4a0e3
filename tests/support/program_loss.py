"""The loss of weighted tokens as programs call it, for tests of programs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.engine.batch import ProgramBatch
from llmsuite.stages.language_model import weighted_loss


def program_loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Sums over a micro-batch by name, for the inputs "input_ids", "targets", "weights", and "document_starts" if
    any."""
    terms = weighted_loss(model, ProgramBatch(inputs))
    return {"loss": terms.total, **{name: value for name, (value, _) in terms.sums.items()}}
