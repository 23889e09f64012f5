"""Entry point of `python -m benchmarks`."""

import os

# Silences torch's profiler, which measures memory. It reads these variables when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.command import main

if __name__ == "__main__":
    raise SystemExit(main())
