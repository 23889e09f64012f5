"""`subquad serve`: answer requests in OpenAI's form from a trained model."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from subquad.cli.arguments import Parser
from subquad.cli.generate import ADAPTER_HELP, DEVICE_HELP
from subquad.serving.config import ServeConfig

if TYPE_CHECKING:
    from subquad.serving.engine import Engine
    from subquad.training.runs import LoadedRun

KEY_VARIABLE = "SUBQUAD_API_KEY"
KEY_HELP = f"What clients must send as Authorization: Bearer KEY; from {KEY_VARIABLE} other users don't see it in ps."
NAME_HELP = "The model's name for clients (null: the folder's)."


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "serve RUN",
        "Serve a trained model over HTTP: /v1/completions and /v1/chat/completions as OpenAI has them, a page at /, "
        "/health, /metrics for Prometheus, /openapi.json. It ends on Ctrl+C or SIGTERM when running answers have.",
    )
    parser.add_argument(
        "run", type=str, help="The folder of a run, or another that transformers' from_pretrained reads."
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="Address to listen at; 0.0.0.0 for all.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen at; 0 for a free one.")
    parser.add_argument("--api_key", type=str | None, default=None, help=KEY_HELP)
    parser.add_argument("--name", type=str | None, default=None, help=NAME_HELP)
    parser.add_argument("--adapter", type=str | None, default=None, help=ADAPTER_HELP)
    parser.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=DEVICE_HELP)
    parser.add_class_arguments(ServeConfig, None, as_group=False)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, serve until told to stop, return the exit status."""
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    folder, host, port, device, name = (values.pop(key) for key in ("run", "host", "port", "device", "name"))
    adapter = values.pop("adapter")
    api_key = values.pop("api_key")
    with parser.checking():
        config = ServeConfig(**values)
        api_key = _checked_key(os.environ.get(KEY_VARIABLE) if api_key is None else api_key)
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port must be between 0 and {(1 << 16) - 1}, got {port}")
    _require_server()
    from subquad.training.runs import load_run

    with parser.checking():
        loaded = load_run(folder, device, adapter)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        return _serve(loaded, config, listener, api_key, name or Path(folder).resolve().name)


def _checked_key(key: str | None) -> str | None:
    """The key; `ValueError` for one that no header can carry."""
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError("the API key must be printable ASCII without blanks at its ends, and not empty")
    return key


def _require_server() -> None:
    """Raise `ImportError` that says what to install."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(f'subquad serve needs {error.name}; install it with: pip install "subquad[serve]"') from error


def _serve(loaded: LoadedRun, config: ServeConfig, listener: socket.socket, api_key: str | None, name: str) -> int:
    import uvicorn

    from subquad.generation import BatchDecoder
    from subquad.serving.app import Served, make_app
    from subquad.serving.engine import Engine
    from subquad.serving.metrics import Metrics
    from subquad.serving.texts import Texts, read_template

    decoder = BatchDecoder(
        loaded.decoder, slots=config.slots, max_context=config.max_context, prefill_chunk=config.prefill_chunk
    )
    parameters = sum(parameter.numel() for parameter in loaded.decoder.parameters())
    attention = loaded.decoder.config.attention
    served = Served(name, attention if isinstance(attention, str) else ", ".join(dict.fromkeys(attention)), parameters)
    metrics = Metrics()
    engine = Engine(decoder, config, metrics)
    texts = Texts(loaded.tokenizer, read_template(loaded.folder))
    app = make_app(engine, texts, config, served, metrics, api_key=api_key)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        # Longer than running answers are given: the engine ends them properly, uvicorn would cut them.
        timeout_graceful_shutdown=int(config.grace_seconds) + 5,
    )
    address, port = listener.getsockname()[:2]
    at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    facts = f"{served.attention}, {parameters:,} parameters, {decoder.state_bytes:,} bytes of state"
    sys.stdout.write(f"http://{at} serves {name} ({facts}); Ctrl+C ends it\n")
    sys.stdout.flush()
    try:
        _run(_server(settings, engine), listener)
    finally:
        engine.join()  # a second Ctrl+C leaves the loop without its end
    return 0


def _server(settings: Any, engine: Engine) -> Any:
    """A uvicorn server that tells the engine when it is told to stop."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            engine.drain_soon()
            super().handle_exit(sig, frame)

    return Server(settings)


def _run(server: Any, listener: socket.socket) -> None:
    """Serve until a signal comes, which is no failure: uvicorn raises it once more when it has stopped."""

    def ended(_number: int, _frame: FrameType | None) -> None:
        return None

    before = {number: signal.signal(number, ended) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
