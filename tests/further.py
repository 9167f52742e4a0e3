"""Files that `make test` leaves to `make test-further`, so that it ends in 20 minutes: each takes long, and goes
further into something that others try too. `make test` tells the slowest of what it runs."""

from __future__ import annotations

FURTHER = {
    "multi": (
        "align all_to_all annotated annotated_programs annotated_styles answers bad_places bf16_lora bf16_programs "
        "buckets family_contract fp8 hang interrupted large_files lora lora_further machines matrix mtp mutations "
        "overlap own_disks "
        "paddle_scripts pipelines plugin_examples program_expert_pipelines program_guard program_options "
        "program_pipelines programs qat rank_programs restarts saving standin standin_further standin_programs "
        "studio_page traffic vocabulary"
    ),
    "unit/convert": "merge_families",
    "unit/inference": "export stored stored_programs",
}
"""Directory within `tests`: names, without `test_` and `.py`."""

FURTHER_FILES = frozenset(f"tests/{place}/test_{name}.py" for place, names in FURTHER.items() for name in names.split())
