"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from server.api.answer import AnswerHead, deliver
from server.api.body import read_request
from server.api.chat_format import ChatFormat
from server.api.chat_tools import ToolUse, tool_use
from server.api.conversation import conversation_of
from server.api.errors import ApiError, invalid
from server.api.generation import SequenceState
from server.api.message_reader import ReadingRules
from server.api.reasoning import OPENING, is_open
from server.api.sampling_params import TokenLimit
from server.api.schemas.chat import ChatFields
from server.api.schemas.load import GenerateRequest, generate_loader
from server.api.sequences import Outline, build_sequences
from server.api.serving import Serving
from server.api.structured import AskedGrammar, grammar_of
from server.api.tokenising import EncodedPrompt
from server.api.tool_grammar import after_reasoning
from server.messages import Grammar

_load = generate_loader(ChatFields)

_SEARCHED = 65536
"""Characters of a grammar in which the tool at fault is looked for: each is compiled once more, alone."""


async def create_chat_completion(request: Request, serving: Serving) -> Response:
    """Answer a conversation. Raises `ApiError`."""
    arrived = time.monotonic()
    serving.check_ready()
    asked = await read_request(request, _load)
    model = serving.check_model_name(asked.delivery.model)
    serving.admit(asked.sampling.n)
    codec = serving.codec
    top_logprobs = _top_logprobs(asked.own)
    use = tool_use(asked.own, serving.model.formats.calls)
    prompt, asked_grammar = await serving.work(
        request, lambda: (_prompt(serving, asked, use), _asked_grammar(asked, use, codec.special_tokens))
    )
    rules = _reading_rules(serving, asked.own, use, prompt)
    grammar = await _checked(serving, asked_grammar, use, rules)
    sequences = await serving.work(
        request, lambda: _sequences(serving, asked, prompt, rules, top_logprobs, grammar, arrived)
    )
    generation = serving.begin(sequences, arrived)
    style = ChatFormat(
        AnswerHead("chatcmpl", model),
        codec.token_bytes,
        top_logprobs,
        asked.delivery.prompt_logprobs,
        asked.delivery.return_token_ids,
        asked.delivery.return_draft_positions,
        rules,
    )
    return await deliver(request, serving, generation, style, asked)


def _top_logprobs(own: ChatFields) -> int | None:
    if own.top_logprobs and not own.logprobs:
        raise invalid("top_logprobs: set logprobs to true to get them.", param="top_logprobs")
    return (own.top_logprobs or 0) if own.logprobs else None


def _asked_grammar(
    asked: GenerateRequest[ChatFields], use: ToolUse | None, special_tokens: list[str]
) -> AskedGrammar | None:
    content = grammar_of(asked.sampling)
    return content if use is None else use.grammar(content, special_tokens)


def _prompt(serving: Serving, asked: GenerateRequest[ChatFields], use: ToolUse | None) -> EncodedPrompt:
    own = asked.own
    conversation = conversation_of(
        own.messages,
        use.tools if use is not None else (),
        add_generation_prompt=own.add_generation_prompt,
        continue_final_message=own.continue_final_message,
        arguments=own.chat_template_kwargs,
    )
    return serving.codec.encode_chat(
        conversation,
        add_special_tokens=own.add_special_tokens,
        keep_last=asked.delivery.truncate_prompt_tokens,
        max_tokens=serving.max_model_len,
    )


def _reading_rules(serving: Serving, own: ChatFields, use: ToolUse | None, prompt: EncodedPrompt) -> ReadingRules:
    thinks = serving.model.formats.reasoning
    continued = own.messages[-1].content if own.continue_final_message else None
    return ReadingRules(
        call_format=None if use is None else use.form,
        function_names=frozenset() if use is None else use.names,
        parallel_calls=own.parallel_tool_calls,
        split_reasoning=thinks and (continued is None or is_open(continued)),
        reasoning_opened=thinks and (_ends_with_opening(prompt) if continued is None else is_open(continued)),
        include_reasoning=own.include_reasoning,
    )


def _ends_with_opening(prompt: EncodedPrompt) -> bool:
    """Whether the template itself begins the reasoning."""
    return prompt.text is not None and prompt.text.rstrip().endswith(OPENING)


async def _checked(
    serving: Serving, asked: AskedGrammar | None, use: ToolUse | None, rules: ReadingRules
) -> Grammar | None:
    """What the answer is bound to, behind its reasoning. Raises `ApiError` 400 that names the field at fault."""
    if asked is not None and rules.split_reasoning:
        asked = AskedGrammar(after_reasoning(asked.grammar, opened=rules.reasoning_opened), asked.param)
    try:
        return await serving.check_grammar(asked)
    except ApiError:
        if use is not None and asked is not None and len(asked.grammar.text) <= _SEARCHED:
            for single in use.single_grammars():
                await serving.check_grammar(single)
        raise


def _sequences(
    serving: Serving,
    asked: GenerateRequest[ChatFields],
    prompt: EncodedPrompt,
    rules: ReadingRules,
    top_logprobs: int | None,
    grammar: Grammar | None,
    arrived: float,
) -> list[SequenceState]:
    own, delivery = asked.own, asked.delivery
    longer = own.max_completion_tokens
    outline = Outline(
        sampling=asked.sampling,
        delivery=delivery,
        limit=TokenLimit(
            own.max_tokens if longer is None else longer,
            "max_tokens" if longer is None else "max_completion_tokens",
            serving.model.defaults.max_new_tokens,
        ),
        prompt_param="messages",
        arrived=arrived,
        logprobs=top_logprobs,
        prompt_logprobs=delivery.prompt_logprobs,
        grammar=grammar,
        shown_ids=serving.codec.ids_of(rules.marks),
    )
    return build_sequences(serving, outline, [prompt])
