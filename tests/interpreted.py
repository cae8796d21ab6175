"""Import to skip a module without Triton, whose kernels run on the CPU in tests (conftest)."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
