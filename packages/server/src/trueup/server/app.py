"""The HTTP application: models, completions, health."""
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from trueup.core.sampling import SamplingParams
from trueup.models.completion import Completion
from trueup.models.llm import LLM
from trueup.server.protocol import ApiError, CompletionRequest, choice, invalid, usage
from trueup.server.worker import EngineFailed, Submission, Worker


def create_app(llm: LLM) -> FastAPI:
    """An application that serves ``llm``, whose engine belongs to the application's worker from then on.

    What is wrong with a request is answered in OpenAI's error shape: 400, or 404 for a model that is not here; an
    engine that fails is a 500, or an error event where a stream has begun.
    """
    worker = Worker(llm.engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(title="trueup", lifespan=lifespan)
    app.state.worker = worker
    created = int(time.time())

    @app.get("/health")
    def health() -> JSONResponse:
        """Whether the engine runs, and what it holds."""
        pages, config = llm.engine.pages, llm.engine.config
        return JSONResponse({
            "status": "ok" if worker.running else "stopped",
            "requests": worker.unfinished,
            "free_pages": pages.free,
            "pages": config.num_pages - 1,
            "rounds": worker.rounds,
            "largest_batch": worker.largest_batch,
        }, 200 if worker.running else 503)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        card = {"id": llm.name, "object": "model", "created": created, "owned_by": "trueup"}
        return {"object": "list", "data": [card]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        if body.model != llm.name:
            raise ApiError(404, f"the model {body.model!r} does not exist; this server has {llm.name!r}",
                           param="model", code="model_not_found")
        params = SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature, seed=body.seed,
                                ignore_eos=body.ignore_eos)
        try:
            started = [llm.start(prompt) for prompt in body.prompts]
            submission = await worker.submit([completion.prompt_ids for completion in started], params)
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                "model": llm.name}

        def release() -> None:
            worker.abort(submission)

        if body.stream:
            events = _events(head, started, submission, body.stream_options.include_usage)
            return _Stream(events, release)
        try:
            if not await _finish(started, submission, request):
                return Response(status_code=499)  # the client has gone; nobody reads this
        finally:
            release()
        choices = [choice(i, c.text, c.finish_reason) for i, c in enumerate(started)]
        return JSONResponse({**head, "choices": choices, "usage": _usage(started)})

    @app.exception_handler(ApiError)
    def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(EngineFailed)
    def engine_failed(request: Request, error: EngineFailed) -> Response:
        return ApiError(500, str(error)).response()

    @app.exception_handler(RequestValidationError)
    def invalid_body(request: Request, error: RequestValidationError) -> Response:
        return invalid(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    def other(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    return app


class _Stream(StreamingResponse):
    """Server-sent events that release what they read from however they end, begun or not."""

    def __init__(self, events: AsyncIterator[str], release: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _events(head: dict[str, Any], started: list[Completion], submission: Submission,
                  include_usage: bool) -> AsyncIterator[str]:
    def event(body: dict[str, Any] | str) -> str:
        return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n"

    # With include_usage every chunk has the key, null until the last.
    tail: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        async for gained in submission:
            text = started[gained.index].extend(gained.token_ids, gained.finish_reason)
            if text or gained.finish_reason:
                yield event({**head, "choices": [choice(gained.index, text, gained.finish_reason)], **tail})
    except EngineFailed as error:  # the status line has gone out already
        yield event(ApiError(500, str(error)).body)
        return
    if include_usage:
        yield event({**head, "choices": [], "usage": _usage(started)})
    yield event("[DONE]")


async def _finish(started: list[Completion], submission: Submission, request: Request) -> bool:
    """Collect everything; False if the client goes away first."""

    async def collect() -> None:
        async for gained in submission:
            started[gained.index].extend(gained.token_ids, gained.finish_reason)

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        work.cancel()
        gone.cancel()


def _usage(started: list[Completion]) -> dict[str, int]:
    return usage(sum(c.prompt_tokens for c in started), sum(len(c.token_ids) for c in started))
