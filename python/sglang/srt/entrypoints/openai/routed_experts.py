"""Routed experts on the OpenAI endpoints: `sglext` of a response, of a choice, and of a last chunk.

One choice: `sglext` at the response, as the base has it. Several (`n` > 1, or a batch of prompts):
every choice has its own, and the response keeps the first one's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    DeltaMessage,
)

from sglang.srt.layers.moe.routed_experts.response import json_parts, json_response, send

_FIELDS = (
    "routed_experts",
    "routed_experts_start_len",
    "routed_experts_info",
    "routed_experts_error",
)


def rows_of(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """What `meta_info` holds of routed experts; empty where they were not asked for, or not yet."""
    return {name: meta_info[name] for name in _FIELDS if name in meta_info}


def with_rows(response: Any, results: Sequence[Mapping[str, Any]]) -> Any:
    """`response` with the rows of `results`, one a choice; `response` itself if nobody asked.

    Args:
        response: a completion or chat completion, or an error response, which stays as it is.
        results: items of the manager's answer, in the order of the choices.
    """
    rows = [rows_of(result["meta_info"]) for result in results]
    if not any(rows) or not isinstance(response, BaseModel):
        return response
    content = response.model_dump(by_alias=True)
    content["sglext"] = {**content.get("sglext", {}), **rows[0]}
    if len(rows) > 1:
        for choice in content["choices"]:
            choice["sglext"] = rows[choice["index"]]
    return json_response(content)


async def stream_rows(
    chunk: ChatCompletionStreamResponse | CompletionStreamResponse,
    rows: Mapping[int, Mapping[str, Any]],
) -> AsyncIterator[bytes]:
    """The last chunks of a stream: rows of choice i, if it has any, and its fields beside them.

    Args:
        chunk: without choices; id, model and the rest are those of every chunk.
        rows: choice -> what `rows_of` gave for its last chunk.
    """
    asked = {index: fields for index, fields in sorted(rows.items()) if fields}
    for index, fields in asked.items():
        content = chunk.model_dump()
        if len(rows) > 1:
            content["choices"] = [{**_empty_choice(chunk, index), "sglext": fields}]
        if index == min(asked):
            content["sglext"] = fields
        async for piece in send(json_parts(content, b"data: ", b"\n\n")):
            yield piece


def _empty_choice(chunk: BaseModel, index: int) -> dict[str, Any]:
    if isinstance(chunk, ChatCompletionStreamResponse):
        return ChatCompletionResponseStreamChoice(index=index, delta=DeltaMessage()).model_dump()
    return CompletionResponseStreamChoice(index=index, text="").model_dump()


__all__ = ["rows_of", "stream_rows", "with_rows"]
