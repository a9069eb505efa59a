"""llama-server's own argument parser, called in the extension module of the wheel `xllamacpp`.

python xllamacpp_parser.py OPTIONS...: exits with 1, and llama-server's words on stderr, where it refuses them.
The wheel gives no way to its parser, so this calls `common_params_parse` by its C++ name. It is for checks of exports
alone: the place of the parameters in their Python object and the number of the server's options are those of 2026.10.
"""

import ctypes
import os
import sys

import xllamacpp
from xllamacpp import xllamacpp as extension

_PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
_OBJECT_HEAD = 16
_SERVER = 12  # of `enum llama_example`


def main() -> None:
    """Parse this program's arguments."""
    parse = getattr(ctypes.CDLL(extension.__file__), _PARSE)
    parse.restype = ctypes.c_bool
    params = xllamacpp.CommonParams()
    words = ["llama-server", *sys.argv[1:], "--port", "4321", "--metrics"]
    given = (ctypes.c_char_p * (len(words) + 1))(*[word.encode() for word in words], None)
    place = ctypes.c_void_p(id(params) + _OBJECT_HEAD)
    is_parsed = parse(ctypes.c_int(len(words)), given, place, ctypes.c_int(_SERVER), None)
    if is_parsed and (params.port, params.endpoint_metrics) != (4321, True):
        sys.stderr.write("this wheel keeps its parameters elsewhere\n")
        is_parsed = False
    sys.stderr.flush()
    os._exit(0 if is_parsed else 1)  # the strings of the parameters belong to the C++ library


if __name__ == "__main__":
    main()
