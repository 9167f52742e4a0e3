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

from llmsuite.rl.drawing import Drawing, Drawn, Request
from llmsuite.rl.rollout_server import Failed, RolloutServer, Version, checked, seed_of
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
                answer = self._post("inference/v1/generate", _body(requests[number], drawing, stop_ids))
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

    def _hint(self, code: int) -> str:
        return "; does it run with VLLM_SERVER_DEV_MODE=1, and is it 0.32 or newer?" if code == _NOT_FOUND else ""

    def _group(self, answer: Any, label: str, drawing: Drawing, stop_ids: Collection[int]) -> list[Drawn] | None:
        """The completions of a prompt, or None if other weights have drawn a token. Raises Failed, or UserError if they
        are not what was asked for."""
        try:
            rows = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [row["index"] for row in rows] != list(range(drawing.num_generations)):
                raise ValueError(f"{len(rows)} choices in place of {drawing.num_generations}")
            if any(row["finish_reason"] == "abort" for row in rows):
                raise Failed("it was paused by somebody else")
            if any({span["version"] for span in row["weight_versions"] or ()} != {label} for row in rows):
                return None
            return [checked(row, _logprobs(row), drawing, stop_ids) for row in rows]
        except (TypeError, KeyError, ValueError) as error:
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


def _logprobs(row: Any) -> list[float]:
    """That of each token. Raises ValueError, TypeError or KeyError if they belong to others."""
    content = row["logprobs"]["content"]
    if [item["token_id"] for item in content] != row["token_ids"]:
        raise ValueError(f"choice {row['index']} has log-probabilities of other tokens")
    return [item["logprob"] for item in content]
