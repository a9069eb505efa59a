"""Text: tokenizers, chat templates, tokens to text as they stream, stop strings."""

from specdec_cli.text.overlap import Overlap
from specdec_cli.text.printable import printable
from specdec_cli.text.stream import Released, TextStream
from specdec_cli.text.tokenizer import Tokenizer

__all__ = ["Overlap", "Released", "TextStream", "Tokenizer", "printable"]
