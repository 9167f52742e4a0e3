"""vLLM as a server that draws completions for a trainer: `rollout.openai.dialect: vllm`.

Written for vLLM 0.32, started with `--enable-scale-out`, and with VLLM_SERVER_DEV_MODE=1, without which it takes no
weights. Of the ways it has, this one goes through a directory, as with `llmsuite serve`: it is paused, reads the
weights, and goes on.

vLLM keeps a label of its weights, which whoever brings them sets, and `/inference/v1/generate` names for each
completion the labels it was drawn with. The label here is the number and the digest of the version, and it is taken
away before the weights are touched. So what half an update draws, or a server that was started anew, is recognised and
never learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llmsuite.rl.choices import choices_of, completion_of, field, items
from llmsuite.rl.drawing import Drawing, Drawn, Request
from llmsuite.rl.rollout_server import Failed, RolloutServer, Version, most_bytes, seed_of
from llmsuite.threads import run_all

_NOT_FOUND = 404
_AT_ONCE = 64
"""Prompts that are asked for at the same time: vLLM takes one in a request and makes batches itself."""


class VllmServer(RolloutServer):
    """One server."""

    def _ask(
        self, version: Version, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
    ) -> list[list[Drawn]] | None:
        found: list[list[Drawn] | None] = [None] * len(requests)

        def task(number: int) -> Callable[[], None]:
            def work() -> None:
                asked = requests[number]
                body, most = _body(asked, drawing, stop_ids), most_bytes([asked], drawing)
                answer = self._post("inference/v1/generate", body, most)
                found[number] = self._group(answer, _label(version), drawing, stop_ids)

            return work

        run_all((task(i) for i in range(len(requests))), min(len(requests), _AT_ONCE))
        groups = [group for group in found if group is not None]
        return groups if len(groups) == len(requests) else None

    def _bring(self, version: Version) -> None:
        self._post("pause?mode=wait", {})
        self._post("update_weight_version", {"new_version": f"taking {_label(version)}"})
        new = {"method": "reload_weights", "kwargs": {"weights_path": str(version.place)}}
        self._post("collective_rpc", new)
        self._post("update_weight_version", {"new_version": _label(version)})
        self._post("resume", {})
        self._has = version

    def _hint(self, code: int | None) -> str:
        return "; does it run with VLLM_SERVER_DEV_MODE=1, and is it 0.32 or newer?" if code == _NOT_FOUND else ""

    def _group(self, answer: Any, label: str, drawing: Drawing, stop_ids: Collection[int]) -> list[Drawn] | None:
        """The completions of a prompt, or None if other weights have drawn a token. Raises Failed, or UserError if they
        are not what was asked for."""
        try:
            rows = {f"choices[{i}]": row for i, row in enumerate(choices_of(answer, drawing.num_generations))}
            if any(field(row, "finish_reason", where) == "abort" for where, row in rows.items()):
                raise Failed("it was paused by somebody else")
            if any(not _is_of(row, label, where) for where, row in rows.items()):
                return None
            return [
                completion_of(row, _logprobs(row, where), drawing, stop_ids, self._vocab_size, where)
                for where, row in rows.items()
            ]
        except ValueError as error:
            raise self._wrong(error) from error


def _label(version: Version) -> str:
    return f"{version.number}-{version.digest}"


def _body(request: Request, drawing: Drawing, stop_ids: Collection[int]) -> dict[str, Any]:
    return {
        "token_ids": list(request.prompt_ids),
        "sampling_params": {
            "n": drawing.num_generations,
            "max_tokens": drawing.max_completion_length,
            "temperature": drawing.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": seed_of([list(request.key)]),
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # stop_token_ids says it all, whatever the files of the model say
            "logprobs": 0,
        },
    }


def _is_of(row: Any, label: str, where: str) -> bool:
    """Whether weights of this label alone have drawn a choice; one without labels is of none."""
    if field(row, "weight_versions", where) is None:
        return False
    spans = items(row, "weight_versions", where)
    labels = [field(span, "version", f"{where}.weight_versions[{i}]") for i, span in enumerate(spans)]
    return bool(labels) and all(found == label for found in labels)


def _logprobs(row: Any, where: str) -> list[Any]:
    """That of each token. Raises ValueError if they belong to others."""
    content = items(field(row, "logprobs", where), "content", f"{where}.logprobs")
    places = [(item, f"{where}.logprobs.content[{i}]") for i, item in enumerate(content)]
    if [field(item, "token_id", place) for item, place in places] != field(row, "token_ids", where):
        raise ValueError(f"{where} has log-probabilities of other tokens")
    return [field(item, "logprob", place) for item, place in places]
