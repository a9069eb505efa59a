"""Write a GGUF file with fewer layers, or with more that add nothing: a draft and a dear target out of one model.

    python benchmarks/gguf_layers.py MODEL.gguf draft.gguf --without 10,12,14    # says something else now and then
    python benchmarks/gguf_layers.py MODEL.gguf target.gguf --idle 72            # the same text, at four times the cost

An idle layer is a copy of the last one whose two projections into the residual stream are zero.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

_SILENT = ("attn_output.weight", "ffn_down.weight")


def write_layers(source: Path, made: Path, without: frozenset[int], num_idle: int) -> None:
    """Write the file.

    Args:
        source: the model.
        made: the new file.
        without: layers to leave out, counted from 0.
        num_idle: layers to add.
    """
    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    kind = str(fields["general.architecture"].contents())
    count = f"{kind}.block_count"
    num = int(fields[count].contents())
    kept = [layer for layer in range(num) if layer not in without]
    writer = GGUFWriter(made, kind)
    for name, field in fields.items():
        if name == count:
            writer.add_uint32(name, len(kept) + num_idle)
        elif name != "general.architecture":
            own = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], own)
    for tensor in reader.tensors:
        head, _, rest = tensor.name.partition(".")
        layer, _, part = rest.partition(".")
        if head != "blk":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        if int(layer) in kept:
            writer.add_tensor(f"blk.{kept.index(int(layer))}.{part}", tensor.data, raw_dtype=tensor.tensor_type)
        for idle in range(num_idle if int(layer) == num - 1 else 0):
            data = tensor.data * 0 if part in _SILENT else tensor.data
            writer.add_tensor(f"blk.{len(kept) + idle}.{part}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("made", type=Path)
    parser.add_argument("--without", default="", help="layers to leave out, with commas")
    parser.add_argument("--idle", type=int, default=0, help="layers to add")
    options = parser.parse_args()
    without = frozenset(int(layer) for layer in options.without.split(",") if layer)
    write_layers(options.source, options.made, without, options.idle)


if __name__ == "__main__":
    main()
