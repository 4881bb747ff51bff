"""What the routes need to know, handed over once by the launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.api.answer_formats import AnswerFormats, answer_formats
from server.api.engine_client import EngineClient
from server.api.generation_defaults import GenerationDefaults
from server.api.recorder import Recorder
from server.api.template_renderer import TemplateRenderer

if TYPE_CHECKING:
    from server.checkpoint.tokenizer import TokenizerFiles


@dataclass(frozen=True)
class ServedModel:
    """What is known of the model once its tokenizer is loaded; the engine may still be loading weights."""

    tokenizer: TokenizerFiles
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Sampling defaults as in generation_config.json; empty with `--generation-config none`."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    defaults: GenerationDefaults = field(init=False)
    formats: AnswerFormats = field(init=False)
    """How it writes tool calls and reasoning."""

    def __post_init__(self) -> None:
        """Raise `UserError` when the generation config makes no sense."""
        object.__setattr__(self, "defaults", GenerationDefaults.from_config(self.generation_config))
        formats = answer_formats(self.tokenizer.chat_templates, self.tool_call_parser, self.reasoning_parser)
        object.__setattr__(self, "formats", formats)


@dataclass
class ServingState:
    """The only parts of the context that change while the server runs; the launcher sets them."""

    model: ServedModel | None = None
    draining: bool = False


@dataclass(frozen=True)
class AppContext:
    """Everything `create_app` is given. Made before anything is loaded."""

    engine: EngineClient
    recorder: Recorder
    render_metrics: Callable[[str], tuple[bytes, str]]
    """(Accept header) to (body, content type) of `/metrics`."""
    state: ServingState
    served_names: tuple[str, ...]
    """The first is the model's name in answers; all are accepted in requests."""
    version: str
    api_keys: tuple[str, ...] = ()
    max_num_seqs: int = 256
    """Sequences that the engine runs at once."""
    max_queued_requests: int | None = None
    """Sequences that may wait beyond `max_num_seqs` before requests get 429; None is no cap."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait for their first token before requests get 429; None is no cap."""
    max_inflight_per_key: int | None = None
    """Requests of one API key that may be open before further ones get 429; None is no cap."""
    priority_scheduling: bool = False
    engine_timeout: float = 60.0
    """Seconds of silence after which the engine counts as stuck."""
    sse_keep_alive: float = 15.0
    """Seconds of silence after which a stream sends a comment; 0 is never."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server; "*" is all."""
    playground: bool = True
    """Whether there is a page at / on which to try the model."""
    root_path: str = ""
    renderer: TemplateRenderer = field(default_factory=TemplateRenderer)
    """Renders chat templates, in processes of its own."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start, shown by `/v1/models`."""
