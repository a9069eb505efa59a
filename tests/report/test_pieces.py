"""Released text is cut where tokens end, though the engine may hold text back."""

from specdec_cli.events import Emitted
from specdec_cli.report.pieces import Piece, TokenPieces, joined, plain_pieces

VOCABULARY = ["Once", " upon", " a", " time", "", "€"]


class OneByOne:
    """A detokenizer that holds token 4's text until token 5, as one of half a character would."""

    def push(self, token_id: int) -> str:
        return VOCABULARY[token_id]

    def flush(self) -> str:
        return ""

    provisional = ""


def emitted(tokens: tuple[int, ...], text: str, num_accepted: int) -> Emitted:
    return Emitted(0, tokens, text, 4, num_accepted, False)


def test_each_token_is_a_piece_of_its_kind() -> None:
    cut = TokenPieces(OneByOne())
    found = cut.feed(emitted((0, 1, 2), "Once upon a", 2))
    assert found == [Piece("Once", "accepted"), Piece(" upon", "accepted"), Piece(" a", "own")]


def test_text_held_back_comes_later_in_its_kind() -> None:
    cut = TokenPieces(OneByOne())
    assert cut.feed(emitted((0, 1), "On", 1)) == [Piece("On", "accepted")]
    assert cut.feed(emitted((2,), "ce upo", 1)) == [Piece("ce", "accepted"), Piece(" upo", "own")]
    assert cut.cut("n a") == [Piece("n", "own"), Piece(" a", "accepted")]


def test_a_character_of_two_tokens_belongs_to_the_one_that_completes_it() -> None:
    assert TokenPieces(OneByOne()).feed(emitted((4, 5), "€", 1)) == [Piece("€", "own")]


def test_text_cropped_at_a_stop_string_is_what_was_released() -> None:
    cut = TokenPieces(OneByOne())
    assert joined(cut.feed(emitted((0, 1), "Once u", 2))) == "Once u"
    assert cut.cut("") == []


def test_unannounced_text_is_shown_all_the_same() -> None:
    assert TokenPieces(OneByOne()).cut("tail") == [Piece("tail", "own")]


def test_control_characters_go() -> None:
    assert plain_pieces("\x1b[2Jhello\x07") == [Piece("hello")]
    assert plain_pieces("\x07") == []
