"""Requests to the three endpoints, and what comes back: text, token ids, rows.

Rows are decoded here from the wire format alone, with nothing of the engine's.
"""

import base64
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import requests
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ENDPOINTS = ("/generate", "/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Ask:
    """One request. `options` and `sampling` are added to its body and its sampling parameters."""

    text: str
    endpoint: str = "/generate"
    rows: bool = True
    new_tokens: int = 16
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One choice of a response.

    Attributes:
        prompt, completion: token ids; of a completion that came as text, with the byte-level
        tokenizer only. counted: prompt_tokens + completion_tokens, as the server reports them.
        meta: where the fields about rows were found: `meta_info` of /generate, else `sglext`. rows:
        int32 [rows, layers, top_k], or None where the response has none.
    """

    text: str
    prompt: list[int]
    completion: list[int]
    counted: int
    meta: dict[str, Any]
    rows: np.ndarray | None

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion; as many as the server counted, or it is not its text."""
        tokens = self.prompt + self.completion
        if len(tokens) != self.counted:
            raise AssertionError(
                f"the server counted {self.counted} tokens, the text has {len(tokens)}"
            )
        return tokens


class Client:
    """Asks a server for completions of text, greedily unless told otherwise."""

    def __init__(self, url: str, model: Path, timeout: float = 600) -> None:
        self.url = url
        self.model = model
        self._timeout = timeout
        config = json.loads((model / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.top_k: int = config["num_experts_per_tok"]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.model)

    def ask(self, ask: Ask) -> Answer:
        """Send one request and wait for its answer.

        Raises:
            requests.HTTPError: the server refused it.
        """
        response = self.post(ask)
        if response.status_code != 200:
            raise requests.HTTPError(
                f"{ask.endpoint} answered {response.status_code}: {response.text[:500]}",
                response=response,
            )
        return self._answer(ask, response.json())

    def ask_all(self, asks: Sequence[Ask], at_once: int = 64) -> list[Answer]:
        """Answers in the order of `asks`; up to `at_once` requests are on their way at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.ask, asks))

    def ask_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answers to one /generate request of many prompts: however slow this client is, they arrive together.

        What is not of one prompt or its sampling is as the first of `asks` has it.
        """
        bodies = [self.body(ask) for ask in asks]
        together = {name: [body[name] for body in bodies] for name in ("text", "sampling_params")}
        response = requests.post(
            f"{self.url}/generate", json=bodies[0] | together, timeout=self._timeout
        )
        response.raise_for_status()
        return [self._answer(*pair) for pair in zip(asks, response.json(), strict=True)]

    def post(self, ask: Ask, stream: bool = False) -> requests.Response:
        """The raw response."""
        return requests.post(
            self.url + ask.endpoint,
            json=self.body(ask) | ({"stream": True} if stream else {}),
            timeout=self._timeout,
            stream=stream,
        )

    def load(self, model: Path) -> None:
        """Serve the weights of another model of the same shape.

        Behind everybody's answers: they leave before the scheduler has let go of their requests,
        and the base's scheduler dies of an update that is to flush the cache under one.
        """
        waited = requests.post(f"{self.url}/flush_cache?timeout=60", timeout=self._timeout)
        waited.raise_for_status()
        body = {"model_path": str(model)}
        loaded = requests.post(
            f"{self.url}/update_weights_from_disk", json=body, timeout=self._timeout
        )
        loaded.raise_for_status()

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body of a request."""
        rows = {"return_routed_experts": True} if ask.rows else {}
        if ask.endpoint == "/generate":
            sampling = {"max_new_tokens": ask.new_tokens, "temperature": 0} | ask.sampling
            return {"text": ask.text, "sampling_params": sampling} | rows | ask.options
        body = {"model": "default", "max_tokens": ask.new_tokens, "temperature": 0} | ask.sampling
        if ask.endpoint == "/v1/completions":
            body["prompt"] = ask.text
        else:
            body["messages"] = [{"role": "user", "content": ask.text}]
        return body | rows | ask.options

    def stream(self, ask: Ask) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        with self.post(ask, stream=True) as response:
            response.raise_for_status()
            lines = [x.removeprefix(b"data: ") for x in response.iter_lines() if x]
        assert lines.pop() == b"[DONE]"
        return [json.loads(line) for line in lines]

    def rows(self, text: str | None, dtype: str = "int32") -> np.ndarray | None:
        """Decode rows: base64 of little-endian ids, row-major [rows, layers, top_k]."""
        if text is None:
            return None
        ids = np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<"))
        return ids.astype(np.int32).reshape(-1, self.layers, self.top_k)

    def _answer(self, ask: Ask, body: dict[str, Any]) -> Answer:
        if ask.endpoint == "/generate":
            text, meta = body["text"], body["meta_info"]
            prompt, completion = self._encode(ask.text), body["output_ids"]
            usage = meta
        else:
            choice = body["choices"][0]
            meta, usage = body.get("sglext") or {}, body["usage"]
            if ask.endpoint == "/v1/completions":
                text, prompt = choice["text"], self._encode(ask.text)
            else:
                text, prompt = (
                    choice["message"]["content"],
                    self._encode(self.chat_prompt(ask.text)),
                )
            completion = self._encode(text)  # one token a byte: text and tokens say the same
        counted = usage["prompt_tokens"] + usage["completion_tokens"]
        info = meta.get("routed_experts_info") or {}
        rows = self.rows(meta.get("routed_experts"), info.get("dtype", "int32"))
        return Answer(text, prompt, completion, counted, meta, rows)

    def chat_prompt(self, text: str) -> str:
        """What the chat endpoint makes of one user message."""
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]
