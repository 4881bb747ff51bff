"""The fields of /v1/chat/completions alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator

from server.api.schemas.fields import STRICT, Positive, TopLogprobs, refuse
from server.api.schemas.tools import MAX_TOOLS, CalledTool, ToolChoice, ToolFields

_RESERVED_ARGUMENTS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "raise_exception",
        "strftime_now",
    }
)
_MAX_ARGUMENT_VALUES = 1024
_MAX_ARGUMENT_CHARACTERS = 16384


def _content(value: object) -> str:
    """Text, or parts of type text, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("must be a string or a list of content parts")
    texts = []
    for part in value:
        if not isinstance(part, dict):
            raise refuse("a content part must be an object")
        if part.get("type") != "text":
            kind = str(part.get("type"))[:40]
            raise refuse(f"content parts of type {kind!r} are not supported, only 'text'")
        text = part.get("text")
        if not isinstance(text, str):
            raise refuse("a text part needs a string as its text")
        texts.append(text)
    return "".join(texts)


def _template_arguments(value: object) -> dict[str, Any]:
    """Plain JSON of a bounded size, under names that are free."""
    if not isinstance(value, dict) or len(value) > 32:
        raise refuse("must be an object of at most 32 values")
    for name in value:
        if not name.isidentifier() or name in _RESERVED_ARGUMENTS or name.endswith("_token"):
            raise refuse(f"{name[:40]!r} is not a name that a request may set")
    values = characters = 0
    pending: list[Any] = list(value.values())
    while pending:
        item = pending.pop()
        values += 1
        if isinstance(item, dict):
            characters += sum(map(len, item))
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str):
            characters += len(item)
        elif isinstance(item, int | float) and not abs(item) <= 2**53:
            raise refuse("holds a number that is too large")
        if values + len(pending) > _MAX_ARGUMENT_VALUES or characters > _MAX_ARGUMENT_CHARACTERS:
            raise refuse(
                f"may hold at most {_MAX_ARGUMENT_VALUES} values and {_MAX_ARGUMENT_CHARACTERS} characters of text"
            )
    return value


Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
TemplateArguments = Annotated[
    dict[str, Any],
    PlainValidator(_template_arguments),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "maxProperties": 32,
        }
    ),
]


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, Field(description="May be missing from an assistant's message.")] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Annotated[str, Field(description="What the assistant thought.")] | None = None
    reasoning: Annotated[str, Field(description="The same, as other servers call it.")] | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: (
        Annotated[str, Field(max_length=256, description="The call that a tool's message answers.")] | None
    ) = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.role != "assistant":
            if self.content is None:
                raise refuse(f"a message of role {self.role!r} needs a content")
            if self.tool_calls:
                raise refuse(f"only an assistant's message has tool_calls, not one of role {self.role!r}")
        elif self.content is None and not self.tool_calls and self.reasoning_content is None and self.reasoning is None:
            raise refuse("an assistant's message needs a content, or tool_calls")
        return self


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatFields(BaseModel):
    """The conversation and how much of the answer comes back."""

    model_config = STRICT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    """Unset: true, unless the final message is continued."""
    continue_final_message: Annotated[
        bool, Field(description="The answer goes on where the last message, the assistant's, ends.")
    ] = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateArguments = {}
    tools: Tools = []
    tool_choice: Annotated[
        ToolChoice, Field(description="'auto' where there are tools. 'required' and a named function are enforced.")
    ] = "auto"
    parallel_tool_calls: Annotated[bool, Field(description="false: one call at most.")] = True
    include_reasoning: Annotated[bool, Field(description="false: what the model thinks is left out of the answer.")] = (
        True
    )
