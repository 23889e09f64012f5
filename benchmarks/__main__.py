"""`python -m benchmarks`."""

import os

# torch's profiler, which measures memory, reads these when torch is loaded; it would announce itself at each use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.command import main

if __name__ == "__main__":
    raise SystemExit(main())
