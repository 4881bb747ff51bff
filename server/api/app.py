"""The HTTP application: which path leads where."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from server.api import service, tokenize
from server.api.auth import Authentication
from server.api.body_budget import BodyBudget
from server.api.boundary import Boundary
from server.api.chat import create_chat_completion
from server.api.completions import create_completion
from server.api.context import AppContext
from server.api.errors import ApiError
from server.api.openapi import Responses, answer, errors, json_body, say_who_may_enter, schema_of, text_answer
from server.api.page import page_response
from server.api.responses import ChatBody, ChatChoice, ChatChunkChoice, CompletionBody
from server.api.schemas.chat import ChatFields
from server.api.schemas.completion import CompletionFields
from server.api.schemas.sampling import DeliveryFields, SamplingFields
from server.api.schemas.tokenize import DetokenizeFields, TokenizeFields
from server.api.service_bodies import DetokenizeBody, ModelBody, ModelListBody, StatusBody, TokenizeBody, VersionBody
from server.api.serving import Serving


def create_app(context: AppContext) -> FastAPI:
    """Build the app; it answers /health, /ready, /version and /metrics before anything is loaded."""
    serving = Serving(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        serving.close()

    app = FastAPI(
        title="Outrider",
        version=context.version,
        docs_url=None,  # FastAPI's page loads its scripts from the internet; ours is below
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_middleware(BodyBudget)
    app.add_middleware(
        Authentication,
        keys=context.api_keys,
        recorder=context.recorder,
        max_inflight=context.max_inflight_per_key,
    )
    if context.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-outrider-ignored-fields", "retry-after"),
        )
    # Added last: the outermost.
    app.add_middleware(Boundary, recorder=context.recorder, root_path=context.root_path)
    _add_error_answers(app, context)
    _add_generation(app, serving)
    _add_tokenising(app, serving)
    _add_models(app, serving)
    _add_service(app, serving)
    if context.playground:
        _add_playground(app)
    if context.api_keys:
        say_who_may_enter(app.openapi())
    return app


def _add_error_answers(app: FastAPI, context: AppContext) -> None:
    async def answer_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if error.rejection is not None:
            context.recorder.rejected(error.rejection)
        return error.response()

    async def answer_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return ApiError(404, f"There is no {request.url.path[:200]} here.", code="not_found").response()
        if error.status_code == 405:
            message = f"{request.method[:20]} is not possible on {request.url.path[:200]}."
            return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_exception)


def _add_generation(app: FastAPI, serving: Serving) -> None:
    refusals = errors(400, 401, 404, 408, 413, 415, 429, 500, 503)

    @app.post(
        "/v1/completions",
        summary="Continue a text",
        response_class=Response,
        responses=answer("The continuations.", CompletionBody, chunk=schema_of(CompletionBody)) | refusals,
        openapi_extra=json_body(
            CompletionFields,
            SamplingFields,
            DeliveryFields,
            example={"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        ),
    )
    async def completions(request: Request) -> Response:
        return await create_completion(request, serving)

    whole, chunk = (
        schema_of(ChatBody, choices={"type": "array", "items": schema_of(choice)})
        for choice in (ChatChoice, ChatChunkChoice)
    )

    @app.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        response_class=Response,
        responses=answer("The answers.", whole, chunk=chunk) | refusals,
        openapi_extra=json_body(
            ChatFields,
            SamplingFields,
            DeliveryFields,
            example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True},
        ),
    )
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(request, serving)


def _add_tokenising(app: FastAPI, serving: Serving) -> None:
    refusals = errors(400, 401, 404, 408, 413, 415, 429, 503)

    @app.post(
        "/tokenize",
        summary="Token ids of a text or a conversation",
        response_class=Response,
        responses=answer("The tokens.", TokenizeBody) | refusals,
        openapi_extra=json_body(TokenizeFields, example={"prompt": "Hello world"}),
    )
    async def tokenize_text(request: Request) -> Response:
        return await tokenize.tokenize(request, serving)

    @app.post(
        "/detokenize",
        summary="The text of token ids",
        response_class=Response,
        responses=answer("The text.", DetokenizeBody) | refusals,
        openapi_extra=json_body(DetokenizeFields, example={"tokens": [1, 2, 3]}),
    )
    async def detokenize_ids(request: Request) -> Response:
        return await tokenize.detokenize(request, serving)

    @app.get(
        "/tokenizer_info",
        summary="Special tokens and the chat template",
        response_class=Response,
        responses=answer("What is known of the tokenizer.", tokenize.INFO_SCHEMA) | errors(401, 503),
    )
    async def tokenizer_info() -> Response:
        return await tokenize.tokenizer_info(serving)


def _add_models(app: FastAPI, serving: Serving) -> None:
    @app.get(
        "/v1/models",
        summary="The served models",
        response_class=Response,
        responses=answer("The served names.", ModelListBody) | errors(401, 503),
    )
    async def models() -> Response:
        return await service.list_models(serving)

    @app.get(
        "/v1/models/{model_id:path}",
        summary="One served model",
        response_class=Response,
        responses=answer("The model.", ModelBody) | errors(401, 404, 503),
        openapi_extra={
            "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
        },
    )
    async def model(request: Request) -> Response:
        return await service.show_model(request.path_params["model_id"], serving)

    @app.get(
        "/v1/server_info",
        summary="What was built: every component, what was asked for and what the layers hold",
        response_class=Response,
        responses=answer("Read back from the layers.", service.server_info_schema()) | errors(401, 503),
    )
    async def server_info() -> Response:
        return await service.server_info(serving)


def _add_playground(app: FastAPI) -> None:
    async def playground() -> Response:
        return page_response("playground.html")

    page = text_answer("A page.", "text/html")
    app.get("/", summary="A page on which to try the model", response_class=Response, responses=page)(playground)
    app.head("/", include_in_schema=False)(playground)


def _add_service(app: FastAPI, serving: Serving) -> None:
    async def health() -> Response:
        return await service.health(serving)

    async def ready() -> Response:
        return await service.ready(serving)

    async def version() -> Response:
        return await service.version(serving)

    async def metrics(request: Request) -> Response:
        return await service.metrics(request, serving)

    async def docs() -> Response:
        return page_response("docs.html")

    routes: dict[str, tuple[Callable[..., Awaitable[Response]], str, Responses]] = {
        "/health": (
            health,
            "Whether the process lives and its engine answers",
            answer("It does.", StatusBody) | errors(503),
        ),
        "/ready": (ready, "Whether requests are welcome", answer("They are.", StatusBody) | errors(503)),
        "/version": (version, "The server's version", answer("The version.", VersionBody)),
        "/metrics": (
            metrics,
            "Metrics for Prometheus",
            text_answer(
                "All metrics, in the format that Accept asks for.", "text/plain", "application/openmetrics-text"
            ),
        ),
        "/docs": (docs, "This document, for people", text_answer("A page.", "text/html")),
    }
    for path, (endpoint, summary, responses) in routes.items():
        app.get(path, summary=summary, response_class=Response, responses=responses)(endpoint)
        app.head(path, include_in_schema=False)(endpoint)
