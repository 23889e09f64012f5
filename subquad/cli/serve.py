"""`subquad serve`: serve a trained model over HTTP with an OpenAI-compatible API."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from subquad import training
from subquad.bars import READING, waiting
from subquad.cli.arguments import RUN_HELP, Parser
from subquad.cli.decoding_options import DRAFT_HELP, add_precision, draft_of
from subquad.cli.generate import ADAPTER_HELP
from subquad.cli.threads import keep_to_idle_cores
from subquad.extras import needed
from subquad.serving.config import ServeConfig

KEY_VARIABLE = "SUBQUAD_API_KEY"
KEY_HELP = (
    "Key that clients must send as `Authorization: Bearer KEY`. Other users can see it in `ps`; set the environment "
    f"variable {KEY_VARIABLE} instead. null: {KEY_VARIABLE}, or no key."
)
NAME_HELP = "Name of the model for clients. null: the folder's name."


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "serve RUN",
        "Serve a trained model over HTTP: OpenAI-compatible /v1/completions and /v1/chat/completions, a web page at /, "
        "/health, /metrics for Prometheus, /openapi.json. Ctrl+C or SIGTERM stops it once running answers are done.",
    )
    parser.add_argument("run", type=str, help=RUN_HELP)
    parser.add_argument("--host", type=str, default="127.0.0.1", help="Address to listen on; 0.0.0.0: all interfaces.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on; 0: any free port.")
    parser.add_optional("--api_key", KEY_HELP)
    parser.add_optional("--name", NAME_HELP)
    parser.add_optional("--adapter", ADAPTER_HELP)
    parser.add_optional("--draft", DRAFT_HELP)
    parser.add_device()
    add_precision(parser)
    parser.add_class_arguments(ServeConfig, None, as_group=False)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse and serve until stopped; return the exit status."""
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    folder, host, port, device, name = (values.pop(key) for key in ("run", "host", "port", "device", "name"))
    adapter, asked_draft = values.pop("adapter"), values.pop("draft")
    dtype, quantize = values.pop("dtype"), values.pop("quantize")
    keep_to_idle_cores(device)
    api_key = values.pop("api_key")
    with parser.checking():
        config = ServeConfig(**values)
        api_key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
        ):
            raise ValueError("the API key must be printable ASCII, not empty and without spaces at its ends")
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port must be between 0 and {(1 << 16) - 1}, got {port}")
    with needed("subquad serve", "serve"):
        from subquad.serving.app import serve
    with parser.checking():
        with waiting(READING):
            loaded = training.runs.load_run(folder, device, adapter, dtype=dtype, quantize=quantize)
        draft = draft_of(asked_draft, loaded, device)
    with _listener(host, port) as listener:
        serve(loaded, config, listener, api_key=api_key, name=name or Path(folder).resolve().name, draft=draft)
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of `host`; raise `OSError` if another program does already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(f"another program uses port {port} of {host}; choose another --port, or 0 for any") from None
