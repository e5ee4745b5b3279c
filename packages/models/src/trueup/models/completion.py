"""One prompt and what has been generated for it so far."""
from collections.abc import Sequence
from dataclasses import dataclass, field

from trueup.models.text_stream import TextStream


@dataclass
class Completion:
    """Grows round by round; ``finish_reason`` is None until it is complete.

    Args:
        prompt: as it was given, text or token ids.
        prompt_ids: the prompt in token ids.
        text: what was generated, as far as whole characters are known.
        token_ids: what was generated, an end-of-text token included; ``text`` is without it.
        finish_reason: "stop" (an end-of-text token) or "length".
    """

    prompt: str | list[int]
    prompt_ids: list[int]
    stream: TextStream = field(repr=False)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def extend(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """Add the tokens of one round; returns the text that they add."""
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        piece = self.stream.push(list(shown))
        if finish_reason:
            piece += self.stream.finish()
        self.text += piece
        return piece
