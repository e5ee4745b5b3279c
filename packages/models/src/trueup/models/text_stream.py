"""Token ids that arrive over time, back to text."""
import codecs
import functools
from collections.abc import Iterable

import tokenizers


class TextStream:
    """Text deltas of a growing list of ids: joined they are what ``decode`` gives for all ids.

    A delta never holds part of a character; bytes that may become one wait for the next push.  (The library's
    DecodeStream has no end: what it still holds then is lost.)
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that the ids complete; may be empty."""
        return self._decoder.decode(b"".join(token_bytes(self._tokenizer, i) for i in ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def token_bytes(tokenizer: tokenizers.Tokenizer, token_id: int) -> bytes:
    """What the token adds to the text; a character may be spread over several tokens."""
    token = tokenizer.id_to_token(token_id) or ""
    alphabet = _byte_of_letter()
    # An added token may be outside the alphabet of byte letters; it then stands for itself.
    return bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode()


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself, the other bytes in order for the letters from U+0100 (GPT-2: encoder.py).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
