"""How a chat request may call tools: its fields, checked against each other and against what the model can write."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from server.api.errors import ApiError, invalid
from server.api.json_schema import schema_text
from server.api.schemas.chat import ChatFields
from server.api.schemas.tools import NamedTool, ToolFields
from server.api.structured import AskedGrammar
from server.api.tool_call_parser import LLAMA3_JSON, CallFormat
from server.api.tool_grammar import CallableFunction, calls_grammar, guarded_grammar
from server.messages import Grammar


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that the model may call; `tool_choice` is not "none"."""

    form: CallFormat
    """How the model writes its calls."""
    tools: tuple[ToolFields, ...]
    """All that the model is told of."""
    callable: tuple[int, ...]
    """Those that it may call, as places in `tools`."""
    enforced: bool
    """Whether it has to call."""
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        return frozenset(self.tools[i].function.name for i in self.callable)

    def grammar(self, answer: AskedGrammar | None, special_tokens: Collection[str]) -> AskedGrammar | None:
        """What the answer is bound to; `answer` is what its content is bound to. Raises `ApiError` 400."""
        strict = any(self.tools[i].function.strict for i in self.callable)
        if not self.enforced and answer is None and not strict:
            return None
        functions = [self._function(i) for i in self.callable]
        if not self.enforced and answer is None:
            return AskedGrammar(guarded_grammar(self.form, functions, special_tokens=special_tokens), "tools")
        instead = None if self.enforced or answer is None else answer.grammar
        parallel = self.parallel and len(self.callable) == len(self.tools)
        return AskedGrammar(
            calls_grammar(self.form, functions, parallel=parallel, special_tokens=special_tokens, answer=instead),
            "tools",
        )

    def single_grammars(self) -> Iterator[AskedGrammar]:
        """The arguments of each function alone, to find the one that makes the whole impossible."""
        for i in self.callable:
            yield AskedGrammar(Grammar("json_schema", self._function(i).schema), _schema_param(i))

    def _function(self, i: int) -> CallableFunction:
        function = self.tools[i].function
        schema = {"type": "object", **(function.parameters or {"properties": {}})}
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        try:
            return CallableFunction(function.name, schema_text(schema))
        except ValueError as error:
            raise invalid(f"{_schema_param(i)}: {error}.", param=_schema_param(i)) from None


def tool_use(fields: ChatFields, form: CallFormat | None) -> ToolUse | None:
    """What the request says of tools; None when none may be called. Raises `ApiError` 400.

    Args:
        fields: of the request.
        form: how the model writes calls, if that is known. A call that is enforced needs no format of the model's own.
    """
    tools = tuple(fields.tools)
    places: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if places.setdefault(tool.function.name, i) != i:
            param = f"tools[{i}].function.name"
            raise invalid(f"{param}: there are two functions of the name {tool.function.name!r}.", param=param)
    choice = fields.tool_choice
    if isinstance(choice, NamedTool):
        if choice.name not in places:
            raise invalid(f"tool_choice: the function {choice.name!r} is not among the tools.", param="tool_choice")
        callable_places: tuple[int, ...] = (places[choice.name],)
    else:
        if choice == "required" and not tools:
            raise invalid("tool_choice: 'required' needs tools to choose from.", param="tool_choice")
        callable_places = tuple(range(len(tools)))
    if not tools or choice == "none":
        return None
    enforced = choice != "auto"
    if form is None and not enforced:
        raise _no_format()
    return ToolUse(
        form or LLAMA3_JSON, tools, callable_places, enforced, fields.parallel_tool_calls and isinstance(choice, str)
    )


def _schema_param(i: int) -> str:
    return f"tools[{i}].function.parameters"


def _no_format() -> ApiError:
    return invalid(
        "tools: this model's chat template has no tool calls in a format that this server reads, so it cannot choose "
        "whether to call one. Set tool_choice to 'required' or to a function, or start the server with "
        "--tool-call-parser and a --chat-template that takes tools.",
        param="tools",
        code="unsupported_parameter",
    )
