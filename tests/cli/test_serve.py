"""`subquad serve`: its arguments. That it serves is in test_server.py."""

import socket
import subprocess
import sys
import textwrap

import pytest

from subquad.cli.serve import KEY_VARIABLE, run
from subquad.data import load_tokenizer
from subquad.hf import SubquadConfig, SubquadForCausalLM


@pytest.mark.parametrize(("arguments", "match"), [
    (["nowhere"], "there is no folder nowhere; give the folder of a run"),
    (["nowhere", "--slots", "0"], "slots must be at least 1, got 0"),
    (["nowhere", "--slots", "many"], "slots"),
    (["nowhere", "--port", "70000"], "port must be between 0 and 65535, got 70000"),
    (["nowhere", "--api_key", ""], "the API key must be printable ASCII without blanks at its ends, and not empty"),
    (["nowhere", "--api_key", "clé"], "the API key must be printable ASCII"),
    (["nowhere", "--max_token", "5"], "unknown option 'max_token'; did you mean 'max_tokens'?"),
    ([], "run"),
])  # fmt: skip
def test_wrong_arguments_end_with_status_2(capsys, arguments, match):
    with pytest.raises(SystemExit) as exit_info:
        run(arguments)
    assert exit_info.value.code == 2
    assert match in capsys.readouterr().err


def test_a_key_of_the_environment_is_checked_too(capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " s3cret")
    with pytest.raises(SystemExit):
        run(["nowhere"])
    assert "the API key must be printable ASCII" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "subquad.serving.app", raising=False)
    with pytest.raises(
        ImportError, match=r'subquad serve needs uvicorn; install it with: pip install "subquad\[serve\]"'
    ):
        run(["nowhere"])


def test_help_names_the_limits_and_loads_no_model():
    code = """
        import sys
        from subquad.cli.serve import run
        try:
            run(["--help"])
        finally:
            print("loaded:", *[name for name in ("transformers", "fastapi") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    for flag in ("--max_prompt", "--max_requests", "--api_key", "--grace_seconds", "--cors"):
        assert flag in done.stdout


def test_a_port_that_is_taken_is_an_error(tmp_path):
    shape = {"vocab_size": 256, "dim": 8, "num_layers": 1, "num_heads": 1}
    SubquadForCausalLM(SubquadConfig(**shape, attention="window")).save_pretrained(tmp_path)
    load_tokenizer("bytes").save(str(tmp_path / "tokenizer.json"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="Address already in use"):
        run([str(tmp_path), "--port", str(taken.getsockname()[1])])
