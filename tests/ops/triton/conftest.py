"""The kernels' tests run on a GPU if there is one, else in Triton's interpreter.

No package is needed but torch, triton, numpy and pytest with
`python -m pytest -c /dev/null --rootdir . -m "not slow" --confcutdir tests/ops/triton tests/ops/triton`.
"""

import os

import torch

# Before triton is imported: kernels are made for the interpreter, or not, when they are decorated.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than a test should")
