"""From the checked fields of a request to the conversation that a template renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.chat_template import Conversation
from server.api.errors import invalid
from server.api.schemas.chat import ChatMessage
from server.api.schemas.tools import ToolFields


def conversation_of(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolFields],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    arguments: Mapping[str, Any],
) -> Conversation:
    """Put the fields together. Raises `ApiError` 400 when they contradict each other."""
    if continue_final_message:
        if add_generation_prompt:
            raise invalid(
                "continue_final_message: the answer cannot both go on with the last message and begin a new one; "
                "leave add_generation_prompt out.",
                param="continue_final_message",
            )
        last = messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            raise invalid(
                "continue_final_message: the last message must be the assistant's, with a content and no tool_calls.",
                param="continue_final_message",
            )
    return Conversation(
        messages=[message.model_dump(exclude_none=True) for message in messages],
        tools=[_shown(tool) for tool in tools],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        arguments=arguments,
    )


def _shown(tool: ToolFields) -> dict[str, Any]:
    """A tool as templates expect it; `strict` is no business of the model."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}
