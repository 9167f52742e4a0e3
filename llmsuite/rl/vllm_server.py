"""The client of a vLLM server that samples completions for a trainer: `rollout.openai.dialect: vllm`.

Written for vLLM 0.32, started with `--enable-scale-out` and with VLLM_SERVER_DEV_MODE=1, without which it accepts no
weights. Weights are updated through a directory, as with `llmsuite serve`: the server is paused, reads the weights, and
resumes.

vLLM keeps a version label of its weights, which the client sets, and `/inference/v1/generate` returns for each
completion the labels of the weights that sampled it. Here the label is the number and the digest of the version, and it
is replaced before the weights are changed. So completions of a partial update or of a restarted server are recognised,
and never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llmsuite.base.threads import run_all
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams
from llmsuite.rl.response_parsing import choices_of, completion_of, field, items
from llmsuite.rl.rollout_server import RetryableError, RolloutServer, Version, max_response_bytes, seed_of

_NOT_FOUND = 404
_CONCURRENCY = 64
"""Concurrent requests. vLLM takes one prompt in a request, and batches them itself."""


class VllmServer(RolloutServer):
    """One vLLM server."""

    def _request(
        self,
        version: Version,
        requests: Sequence[SampleRequest],
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ) -> list[list[SampledCompletion]] | None:
        found: list[list[SampledCompletion] | None] = [None] * len(requests)

        def task(number: int) -> Callable[[], None]:
            def work() -> None:
                request = requests[number]
                body = _body(request, sampling_params, stop_ids)
                max_bytes = max_response_bytes([request], sampling_params)
                answer = self._post("inference/v1/generate", body, max_bytes)
                found[number] = self._group(answer, _label(version), sampling_params, stop_ids)

            return work

        run_all((task(i) for i in range(len(requests))), min(len(requests), _CONCURRENCY))
        groups = [group for group in found if group is not None]
        if len(groups) == len(requests):
            return groups
        return None

    def _load(self, version: Version) -> None:
        self._post("pause?mode=wait", {})
        # the label changes before the weights do: see the docstring of the module
        self._post("update_weight_version", {"new_version": f"taking {_label(version)}"})
        new = {"method": "reload_weights", "kwargs": {"weights_path": str(version.place)}}
        self._post("collective_rpc", new)
        self._post("update_weight_version", {"new_version": _label(version)})
        self._post("resume", {})
        self._loaded = version

    def _hint(self, code: int | None) -> str:
        if code != _NOT_FOUND:
            return ""
        return "; does it run with VLLM_SERVER_DEV_MODE=1, and is it 0.32 or newer?"

    def _group(
        self, answer: Any, label: str, sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> list[SampledCompletion] | None:
        """The completions of a prompt; None if other weights sampled a token. Raises RetryableError, or UserError if
        they are not those of the request."""
        try:
            rows = {f"choices[{i}]": row for i, row in enumerate(choices_of(answer, sampling_params.num_generations))}
            if any(field(row, "finish_reason", where) == "abort" for where, row in rows.items()):
                raise RetryableError("another client has paused it")
            if any(not _is_of(row, label, where) for where, row in rows.items()):
                return None
            return [
                completion_of(row, _logprobs(row, where), sampling_params, stop_ids, self._vocab_size, where)
                for where, row in rows.items()
            ]
        except ValueError as error:
            raise self._wrong(error) from error


def _label(version: Version) -> str:
    return f"{version.number}-{version.digest}"


def _body(request: SampleRequest, sampling_params: SamplingParams, stop_ids: Collection[int]) -> dict[str, Any]:
    return {
        "token_ids": list(request.prompt_ids),
        "sampling_params": {
            "n": sampling_params.num_generations,
            "max_tokens": sampling_params.max_completion_length,
            "temperature": sampling_params.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": seed_of([list(request.key)]),
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # stop_token_ids alone decides, not the config of the model
            "logprobs": 0,
        },
    }


def _is_of(row: Any, label: str, where: str) -> bool:
    """Return True if only weights with this label sampled a choice; False for a choice without labels."""
    if field(row, "weight_versions", where) is None:
        return False
    spans = items(row, "weight_versions", where)
    labels = [field(span, "version", f"{where}.weight_versions[{i}]") for i, span in enumerate(spans)]
    return bool(labels) and all(found == label for found in labels)


def _logprobs(row: Any, where: str) -> list[Any]:
    """The log-probability of each token of a choice. Raises ValueError when they are those of other tokens."""
    content = items(field(row, "logprobs", where), "content", f"{where}.logprobs")
    located = [(item, f"{where}.logprobs.content[{i}]") for i, item in enumerate(content)]
    if [field(item, "token_id", place) for item, place in located] != field(row, "token_ids", where):
        raise ValueError(f"{where} has log-probabilities of other tokens")
    return [field(item, "logprob", place) for item, place in located]
