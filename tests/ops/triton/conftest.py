"""The kernels' tests run on a GPU if there is one, else in Triton's interpreter.

No package is needed but torch, triton, numpy and pytest with
`python -m pytest -c /dev/null --rootdir . -m "not slow" --confcutdir tests/ops/triton tests/ops/triton`.
"""

import os
from types import SimpleNamespace

import torch

# Before triton is imported: kernels are made for the interpreter, or not, when they are decorated.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
patched = set()


def patch_once(fn):
    """Patch Triton's language for the functions of a module once per launch.

    The interpreter does so at each call of a device function too, which takes half of its time.
    """
    module = fn.__globals__["__name__"]
    if module in patched:
        return SimpleNamespace(restore=lambda: None)
    patched.add(module)
    return patch(fn)


def launch_afresh(executor, *arguments, **options):
    patched.clear()  # a launch ends by taking its patches back
    return launch(executor, *arguments, **options)


interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than a test should")
