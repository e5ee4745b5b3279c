"""``trueup serve``: the OpenAI-compatible endpoint on a port."""
import argparse
import asyncio
import contextlib
import socket
import sys

import uvicorn

from trueup.models.generate import about, add_model_arguments, from_arguments
from trueup.server.app import create_app
from trueup.server.worker import Worker

HELP = "serve a model over HTTP, as OpenAI's completions endpoint"
GRACE_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    with _listen(args.host, args.port) as listener:  # first: loading takes long, and a port may be taken
        llm = from_arguments(args)
        app = create_app(llm)
        host, port = listener.getsockname()[:2]
        print(f"{about(llm)}\nhttp://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # how uvicorn reports Ctrl-C, after a clean shutdown
            Server(uvicorn.Config(app, log_level="warning"), app.state.worker).run(sockets=[listener])
    return 0


class Server(uvicorn.Server):
    """uvicorn, but answers that are unfinished ``grace`` seconds after a signal end with an error.

    Left to itself uvicorn would wait for them, or cut them off.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float = GRACE_SECONDS) -> None:
        super().__init__(config)
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, self._worker.stop)
        await super().shutdown(sockets)
        timer.cancel()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
