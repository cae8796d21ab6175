"""What a section reports, for tests."""

import io
import json

from tests.gpu.harness import Report


class Heard:
    """What a section reports."""

    def __init__(self, **options):
        self._out = io.StringIO()
        self.report = Report(self._out, options)

    def lines(self, key):
        lines = map(json.loads, self._out.getvalue().splitlines())
        return [line[key] for line in lines if key in line]

    @property
    def faults(self):
        return self.lines("fault")

    @property
    def figures(self):
        return {name: value for line in self.lines("figures") for name, value in line.items()}
