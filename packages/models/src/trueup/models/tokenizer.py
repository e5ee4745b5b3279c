"""Text to token ids and back, and chat messages to text."""
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from trueup.models.chat_template import ChatTemplate
from trueup.models.config import ModelConfig
from trueup.models.delta import folders_of
from trueup.models.text_stream import TextStream


class Tokenizer:
    """A folder's ``tokenizer.json`` (byte-level BPE) and chat template.

    ``eos_ids``: generation stops on any of them.
    """

    def __init__(self, folder: Path, tokenizer: tokenizers.Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self.folder, self.eos_ids, self._tokenizer = folder, eos_ids, tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig) -> "Tokenizer":
        """Read ``tokenizer.json``, of a delta its base's if it has none; the stop ids are the config's.

        Raises:
            ValueError: no such file, a damaged one, or one that is not byte-level.
        """
        file = next((file for place in folders_of(folder) if (file := place / "tokenizer.json").is_file()), None)
        if file is None:
            raise ValueError(f"{folder}: no tokenizer.json there; expected a Hugging Face checkpoint folder")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{file}: not a tokenizer file ({error}); copy it again") from None
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"{file}: decoder is {tokenizer.decoder}; expected ByteLevel, as GLM and DeepSeek have")
        # A file may carry the settings of its training; they would cut or fill prompts unasked.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(Path(folder), tokenizer, config.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, with nothing added: a rendered chat template has its special tokens already.

        Raises:
            ValueError: a lone surrogate in the text, which JSON can carry and UTF-8 cannot.
        """
        text.encode()  # the library would say TypeError
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included: a parser needs to see ``</think>``.

        Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary (the padded rows of the head) nothing.
        """
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        """Id of one token by its exact text, as in ``token_id("<|user|>")``.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.folder}: tokenizer.json has no token {token!r}; expected one like '<|user|>'")
        return found

    def stream(self) -> TextStream:
        """A decoder for ids that arrive over time."""
        return TextStream(self._tokenizer)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]],
                            tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
                            **kwargs: Any) -> str:
        """Prompt text of a conversation; ``kwargs`` are the template's own switches (``enable_thinking``, ...).

        Raises:
            ValueError: the folder has no chat template, or it cannot render the messages.
        """
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        # Read on first use: a model without a template still completes plain prompts.
        return ChatTemplate(self.folder)
