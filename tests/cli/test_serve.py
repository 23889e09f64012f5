"""The arguments of `subquad serve`; tests/serving tests the server."""

import socket
import sys

import pytest

from subquad.cli.serve import KEY_VARIABLE, run
from tests.cli.folders import save_model

BAD_KEY = "the API key must be printable ASCII, not empty and without spaces at its ends"


@pytest.mark.parametrize(("arguments", "match"), [
    (["nowhere", "--port", "70000"], "port must be between 0 and 65535, got 70000"),
    (["nowhere", "--api_key", ""], BAD_KEY),
    (["nowhere", "--api_key", "clé"], BAD_KEY),
    (["nowhere", "--dtype", "float8"], "dtype must be float32, bfloat16, float16 or null, got 'float8'"),
    (["nowhere", "--quantize", "int4"], "quantize must be int8 or null, got 'int4'"),
    ([], "run"),
])  # fmt: skip
def test_wrong_arguments_end_with_status_2(refused, arguments, match):
    assert match in refused("serve", *arguments)


def test_a_key_of_the_environment_is_checked_too(refused, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " s3cret")
    assert BAD_KEY in refused("serve", "nowhere")


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "subquad.serving.app", raising=False)
    message = r"subquad serve needs uvicorn, which is not installed: .* -m pip install 'subquad\[serve\]'"
    with pytest.raises(ImportError, match=message):
        run(["nowhere"])


def test_more_memory_for_prompts_than_there_is_is_an_error(tmp_path):
    folder = save_model(tmp_path, attention="window", tokenizer="bytes")
    with pytest.raises(ValueError, match=f"prefix_bytes must be at most the host's memory, .* got {1 << 62}"):
        run([str(folder), "--port", "0", "--prefix_bytes", str(1 << 62)])


def test_a_port_that_is_taken_is_an_error(tmp_path):
    folder = save_model(tmp_path, attention="window", tokenizer="bytes")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^another program uses port {port} of 127.0.0.1; choose another --port"):
            run([str(folder), "--port", str(port)])
