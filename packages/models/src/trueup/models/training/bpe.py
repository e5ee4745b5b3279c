"""The nano model's own byte-level BPE, in the ``tokenizer.json`` format that the real model uses."""
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# GLM's role and reasoning markers keep their spelling, so that its chat template renders with them.
SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
]
# A newline with its indentation is one token; words and punctuation take one leading space.
SPLIT = r"\s*\n[ \t]*| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of ``vocab_size`` ids, the special ones first (0 = ``<|endoftext|>``)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
