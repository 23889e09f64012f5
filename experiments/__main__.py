"""Entry point of `python -m experiments`."""

import os

# Silences torch's profiler, which counts the calls of a decoded token. It reads these variables when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from experiments.harness.command import main

if __name__ == "__main__":
    raise SystemExit(main())
