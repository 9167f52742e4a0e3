"""Conversations with calls of tools."""

from __future__ import annotations

from typing import Any

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "abc123XYZ", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ASK = {"role": "user", "content": "Hi?"}
HELLO = {"role": "assistant", "content": "Hello."}
HUMAN = {"from": "human", "value": "Hi?"}
GPT = {"from": "gpt", "value": "Hello."}
ROWS: dict[str, dict[str, Any]] = {
    "openai": {"messages": [ASK, HELLO]},
    "sharegpt": {"conversations": [HUMAN, GPT]},
    "alpaca": {"instruction": "Hi?", "output": "Hello."},
    "query_response": {"query": "Hi?", "response": "Hello."},
    "trl_completion": {"prompt": "Hi?", "completion": "Hello."},
    "paddlenlp": {"src": "Hi?", "tgt": "Hello."},
    "text": {"text": "Hi?"},
    "paddlenlp_preference": {"src": ["Hi?"], "response": ["Hello.", "Bye."], "sort": [1, 0]},
    "sharegpt_preference": {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "Bye."}},
    "hh_rlhf": {"chosen": "Human: Hi?\n\nAssistant: Hello.", "rejected": "Human: Hi?\n\nAssistant: Bye."},
    "alpaca_preference": {"instruction": "Hi?", "chosen": "Hello.", "rejected": "Bye."},
    "trl_preference": {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Bye."},
    "messages_preference": {"messages": [ASK, HELLO], "rejected_response": "Bye."},
    "query_response_preference": {"query": "Hi?", "response": "Hello.", "rejected_response": "Bye."},
    "ranked": {"prompt": "Hi?", "responses": ["Hello.", "Bye."], "scores": [2, 1]},
    "trl_unpaired": {"prompt": "Hi?", "completion": "Hello.", "label": True},
    "paddlenlp_unpaired": {"src": ["Hi?"], "response": ["Hello."], "sort": [1]},
    "sharegpt_unpaired": {"conversations": [HUMAN, GPT], "kto_tag": True},
    "openai_unpaired": {"messages": [ASK, HELLO], "label": True},
    "alpaca_unpaired": {"instruction": "Hi?", "output": "Hello.", "kto_tag": True},
    "query_response_unpaired": {"query": "Hi?", "response": "Hello.", "label": True},
    "prompt": {"prompt": "Hi?"},
    "openai_prompt": {"messages": [ASK]},
    "sharegpt_prompt": {"conversations": [HUMAN]},
    "alpaca_prompt": {"instruction": "Hi?"},
    "paddlenlp_prompt": {"src": "Hi?"},
}
