"""The first layers of a model as one of its own: small enough to be carried, real in all else.

python -m tests.gpu.cut model.gguf 8 cut.gguf
"""

import re
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def cut(source: Path, n_layers: int, target: Path) -> Path:
    """Write `n_layers` layers of `source`, and all that is of no layer. Returns `target`."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = n_layers if name == f"{architecture}.block_count" else field.contents()
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer is None or int(layer[1]) < n_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    cut(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
