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

from triton.language import core
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

# The interpreter makes types, shapes and NumPy's types anew for each value, which takes a third of its time. It copies
# shapes to compare them, which takes a sixth.
np_dtype, begin_type, begin_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
equal = core.tuple.__eq__
np_dtypes, types, shapes = {}, {}, {}


def np_dtype_once(dtype):
    if dtype.name not in np_dtypes:
        np_dtypes[dtype.name] = np_dtype(dtype)
    return np_dtypes[dtype.name]


def begin_type_once(block_type, element_ty, shape):
    key = element_ty.name, *(size if type(size) is int else size.value for size in shape)
    if key not in types:
        begin_type(block_type, element_ty, shape)
        types[key] = dict(vars(block_type))
    vars(block_type).update(types[key])


def begin_tensor_once(tensor, handle, dtype):
    shape = dtype.shape if dtype.is_block() else ()
    if shape not in shapes:
        begin_tensor(tensor, handle, dtype)
        shapes[shape] = {"numel": tensor.numel, "shape": tensor.shape}
    vars(tensor).update(shapes[shape], handle=handle, type=dtype, dtype=dtype.scalar)


def equal_at_once(one, other):
    if one is other:
        return core.constexpr(True)
    if type(other) not in (core.tuple, list):
        return equal(one, other)
    return core.constexpr(one.values == (other if type(other) is list else other.values))


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter._get_np_dtype = np_dtype_once
    core.block_type.__init__, core.tensor.__init__ = begin_type_once, begin_tensor_once
    core.tuple.__eq__ = equal_at_once


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than a test should")
