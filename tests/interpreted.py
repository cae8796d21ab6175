"""Import first to have Triton's kernels run on the CPU, or to skip a module without Triton.

How kernels run is settled when Triton is first imported, for the whole process.
"""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")
